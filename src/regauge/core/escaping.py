"""Functions that escape text from files. Escaped text cannot move the cursor, begin a line, act as markup, or end a
cell of a table.
"""

import json
import re
from collections.abc import Sequence

UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters, line breaks, surrogates, and characters that are invisible or change the text direction."""
MARKDOWN = re.compile(r"([\\*\[\]])")
"""Characters that have a meaning as markup within a line of Markdown."""


def escape(text: str) -> str:
    r"""Return a text on one line, with invisible characters replaced by Python escape sequences.

    >>> print(escape("\x1b[31mred\nname"))
    \x1b[31mred\nname
    """
    return UNSEEN.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def escape_lines(text: str) -> str:
    """Escape each line of a text, and keep the line breaks."""
    return "\n".join(map(escape, text.split("\n")))


def escape_json(text: str) -> str:
    """Return a JSON text of several lines, with invisible characters replaced by JSON escape sequences."""
    return "\n".join(UNSEEN.sub(_in_json, line) for line in text.split("\n"))


def _in_json(found: re.Match[str]) -> str:
    return json.dumps(found.group())[1:-1]


def escape_html(text: str) -> str:
    """Return a text for HTML pages and Markdown, in which tags and entities are escaped."""
    return escape(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def escape_markdown(text: str) -> str:
    r"""Return a text as one line of Markdown that displays it literally, without links, images and tags.

    >>> print(escape_markdown("![x](y) <b> `code`"))
    !\[x\](y) &lt;b&gt; &#96;code&#96;
    """
    return escape_html(MARKDOWN.sub(r"\\\1", text)).replace("`", "&#96;")


def escape_code(text: str) -> str:
    """Return a text as inline code for one line of Markdown. Backquotes become quotation marks."""
    return "`" + escape_html(text).replace("`", "'") + "`"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table for a terminal. Cells in the last column are not padded.

    >>> print("\n".join(text_table(["group", "acts on"], [["a", "x"], ["longer", "y"]])))
    group   acts on
    ------  -------
    a       x
    longer  y
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)][:-1]
    rule = ["-" * width for width in (*widths, len(header[-1]))]
    cells = ([*map(str.ljust, row[:-1], widths), row[-1]] for row in (header, rule, *rows))
    return ["  ".join(row).rstrip() for row in cells]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, is_numeric: bool = False) -> list[str]:
    r"""Return the lines of a Markdown table with escaped cells.

    If `is_numeric`, all columns except the first are right-aligned.

    >>> print("\n".join(markdown_table(["", "loss"], [["a|b", "0.1"]], is_numeric=True)))
    |  | loss |
    | --- | ---: |
    | a\|b | 0.1 |
    """
    rule = ["---", *["---:" if is_numeric else "---"] * (len(header) - 1)]
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (header, *rows)]
    return [f"| {' | '.join(row)} |" for row in (cells[0], rule, *cells[1:])]
