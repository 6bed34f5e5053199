"""Plain language of README, pages, docstrings, help and errors: lengths of sentences, and words that the style forbids.

A bound is the last measured value, and is lowered together with the value; a goal is next to each bound. A failure
prints the worst sentences.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from sources import FILES, PAGES, PUBLIC, ROOT, nodes, tree_of

from regauge.cli.command_help import options_of
from regauge.cli.commands import commands_by_name
from regauge.cli.main import Command

LONG = 40
"""The largest number of words in a sentence."""

MEAN = {
    "README": 10.6,
    "pages": 14.7,
    "docstrings": 13.3,
    "help": 14.4,
    "errors": 14.8,
    "messages": 9.3,
}  # goal: 15 words
LONG_SENTENCES = {
    "README": 0,
    "pages": 0,
    "docstrings": 0,
    "help": 0,
    "errors": 0,
    "messages": 2,
}  # goal: 0; in messages an option `beside` and the name of a row in records
IDIOMS = {
    "README": 0,
    "pages": 0,
    "docstrings": 0,
    "help": 0,
    "errors": 0,
    "messages": 2,
}  # goal: 0; in messages an option `beside` and the name of a row in records

REASONS = ("NoRuleError", "UndecidedError", "RearrangementError", "AssertionError")
"""Errors that discovery and readers catch and insert into a sentence."""
WITHOUT_REMEDY = 52  # reasons that readers of files put into a sentence; a new error says what to do
REMEDY = re.compile(
    r"(?:^|[;:,(.?] |\b(?:or|and|then|instead|please|so|may|for .*?) )(?:or |and |then |best )?`?(?:"
    r"add|align|allow|apply|ask|bring|build|call|change|check|choose|come|compare|convert|copy|correct|create|"
    r"cut|delete|dequantize|describe|discard|discover|draw|drop|evaluate|export|extend|extract|fetch|fit|fold|"
    r"free|give|import|infer|install|keep|leave|let|load|look|lower|make|materialize|merge|move|name|normalize|"
    r"open|pack|pad|pick|place|put|raise|read|recompute|remove|rename|render|repair|replace|report|reshape|"
    r"restore|return|run|save|say|set|shorten|split|stack|start|store|take|thin|trace|train|try|turn|untie|"
    r"unpack|upgrade|upload|use|wait|widen|wrap|write)\b|"
    r"`(?:regauge|rg|print|element)\b|pip install|did you mean|one by one|at a time"
)
"""A pattern of words that tell the user what to do."""
EXPECTED = re.compile(
    r"\b(?:must|needs?|has to|have to|at least|at most|expected|may not|can be|wanted|only|cannot|instead of|such as|"
    r"between|from 0|positive|(?:is|are) for|there (?:is|are)|they are|it has|has:|reads|belongs? to|but)\b"
)
"""A pattern of words that state what is expected, or what exists."""

TABLES = 8  # goal: 0; rows that records have named, and a reason of a judge

IDIOM = re.compile(
    r"\b(?:beside|by (?:itself|themselves)|what (?:is left|counts|stays)|(?:is|are) (?:told|worth|(?-i:none)(?! of))|"
    r"nobody|so many|unless (?:it is )?given|goes? on|of whatever|whatever (?:is|it)|where there (?:is|are))\b|"
    r", so that\b",
    re.IGNORECASE,
)
"""A pattern of riddles and idioms of a translation. The usual words are "by default", "next to", "remaining" and
"therefore"."""
FENCED = re.compile(r"^(```|:::).*?^\1$|<!--.*?-->|^\$\$.*?^\$\$$", re.DOTALL | re.MULTILINE)
NOT_PROSE = re.compile(r"^\s*(?:\||#|!\[|:::|>>>|\.\.\. |\(.*\)=$)")
"""A pattern of lines of tables, headings, pictures, directives, targets and examples."""
ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")
ENTRY = re.compile(r"^\s*\*{0,2}[\w, ]+: ")
"""A pattern of the name before the text of an argument."""
SECTION = re.compile(r"^\s*(Args|Returns|Raises|References|Example|Examples|Yields|Attributes|Note):$")
ABBREVIATION = re.compile(r"\b(al|e\.g|i\.e|vs|etc|cf|eq|fig|sec|no|approx)\.", re.IGNORECASE)
END = re.compile(r"(?<=[.!?])[\"')*\]]*\s+(?=[\"'(*\[]*[A-Z0-9]|[a-z][\w-]*: )")


@dataclass(frozen=True)
class Sentence:
    """A sentence and its place."""

    text: str
    place: str

    @property
    def words(self) -> int:
        return len(re.findall(r"\w[\w'.,/-]*", self.text))

    def __str__(self) -> str:
        return f"{self.place} ({self.words} words): {self.text}"


def sentences_in(paragraph: str, place: str) -> Iterator[Sentence]:
    """Yield the sentences of at least four words. Code and formulas count as one word each, and links as their text."""
    text = re.sub(r"``?[^`]+``?|\$[^$]+\$", "Code", paragraph)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = ABBREVIATION.sub(r"\1", " ".join(text.split()))
    for part in END.split(text):
        sentence = Sentence(part, place)
        if sentence.words > 3:
            yield sentence


def paragraphs_of(lines: list[str], first: int = 1) -> Iterator[tuple[int, str]]:
    """Yield paragraphs and list items, with their first lines."""
    begin, held = first, list[str]()
    for number, line in enumerate([*lines, ""], first):
        is_item = ITEM.match(line)
        if held and (not line.strip() or is_item or NOT_PROSE.match(line)):
            yield begin, " ".join(held)
            held = []
        if line.strip() and not NOT_PROSE.match(line):
            begin = begin if held else number
            held.append(ITEM.sub("", line))


def sentences_of_page(page: Path) -> Iterator[Sentence]:
    """Yield the sentences of a Markdown page, without blocks, tables, headings and comments."""
    text = FENCED.sub(lambda found: "\n" * found[0].count("\n"), page.read_text(encoding="utf-8"))
    for line, paragraph in paragraphs_of(text.splitlines()):
        yield from sentences_in(paragraph, f"{page.relative_to(ROOT)}:{line}")


def sentences_of_docstring(text: str, place: str) -> Iterator[Sentence]:
    """Yield the sentences of a docstring, without references, examples, formulas and the names of arguments."""
    lines, section, is_example = list[str](), "", False
    for line in text.splitlines():
        heading = SECTION.match(line)
        section = heading[1] if heading else section
        is_example = line.strip().startswith(">>>") or (is_example and bool(line.strip()))
        entry = ENTRY.match(line) if section else None
        is_formula = not section and line.startswith("    ")
        if heading or is_example or is_formula or section == "References":
            lines.append("")
        else:
            lines += ["", line[entry.end() :]] if entry else [line]
    for _, paragraph in paragraphs_of(lines):
        yield from sentences_in(paragraph, place)


def public_docstrings() -> Iterator[tuple[str, str]]:
    """Yield docstrings of public functions and classes, of public methods, and of attributes, each with its place."""
    names = {name.rpartition(".")[2] for name in PUBLIC}
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names:
                yield f"{path}:{node.lineno}", ast.get_docstring(node) or ""
                for inner in node.body if isinstance(node, ast.ClassDef) else []:
                    if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                        yield f"{path}:{inner.lineno}", ast.get_docstring(inner) or ""
                    elif isinstance(inner, ast.Expr) and inner is not node.body[0]:
                        yield f"{path}:{inner.lineno}", ast.literal_eval(inner.value)


def help_texts(commands: Any = Command, typed: str = "regauge") -> Iterator[tuple[str, str]]:
    """Yield descriptions of commands and texts of their options, each with its place."""
    for name, options in commands_by_name(commands).items():
        yield f"{typed} {name}", inspect.getdoc(options) or ""
        inner = get_type_hints(options, include_extras=True).get("command")
        if inner is not None:
            yield from help_texts(inner, f"{typed} {name}")
            continue
        for one in options_of(options):
            texts = [mark.help for mark in one.hint.__metadata__ if getattr(mark, "help", None)]
            yield f"{typed} {name} --{one.name.replace('_', '-')}", texts[-1] if texts else ""


def sentences_of_help() -> Iterator[Sentence]:
    """Yield the sentences of the help of all commands. A text that several options share counts once."""
    places: dict[str, str] = {}
    for place, text in help_texts():
        places.setdefault(text, place)
    for text, place in places.items():
        for _, paragraph in paragraphs_of(text.splitlines()):
            yield from sentences_in(paragraph, place)


def text_of(node: ast.AST) -> str:
    """Return the text of a string in the source, with one word for each value in braces."""
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.JoinedStr):
        return "".join("X" if isinstance(one, ast.FormattedValue) else text_of(one) for one in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def sentences_of_errors() -> Iterator[Sentence]:
    """Yield the sentences of all errors that are raised with a text."""
    for path, every in nodes().items():
        for node in every:
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                for argument in node.exc.args:
                    yield from sentences_in(text_of(argument), f"{path}:{node.lineno}")


def sentences_of_messages() -> Iterator[Sentence]:
    """Yield the sentences of all other texts in the source: printed texts, notes, warnings, and named errors."""
    for path, every in nodes().items():
        skipped: set[int] = set()
        for node in every:
            own = node.value if isinstance(node, ast.Expr) else node if isinstance(node, ast.Raise) else None
            if isinstance(own, ast.Constant | ast.Raise):  # docstrings, and errors that are counted as such
                skipped |= {id(one) for one in ast.walk(own)}
            if id(node) in skipped or not isinstance(node, ast.BinOp | ast.JoinedStr | ast.Constant):
                continue
            skipped |= {id(one) for one in ast.walk(node)}
            if "{%" not in text_of(node):
                yield from sentences_in(text_of(node), f"{path}:{getattr(node, 'lineno', 0)}")


def errors_without_a_remedy() -> list[str]:
    """Return errors without advice, without an expectation, and without a value at the end that may contain them.

    Reasons to which another error adds a remedy are excluded: they begin with "it", or are of a kind for reasons.
    """
    found = []
    for path, every in nodes().items():
        for node in every:
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            text = " ".join(map(text_of, node.exc.args)).strip()
            is_reason = ast.unparse(node.exc.func) in REASONS or text.startswith(("it ", "its "))
            if len(text.split()) > 2 and not is_reason and not (REMEDY.search(text) or EXPECTED.search(text)):
                found += [f"{path}:{node.lineno}: {text}"] * (not text.endswith("X"))
    return found


@cache
def sentences() -> dict[str, list[Sentence]]:
    """Return all sentences that users read, by kind of place."""
    return {
        "README": list(sentences_of_page(ROOT / "README.md")),
        "pages": [one for page in PAGES for one in sentences_of_page(page)],
        "docstrings": [one for place, text in public_docstrings() for one in sentences_of_docstring(text, place)],
        "help": list(sentences_of_help()),
        "errors": list(sentences_of_errors()),
        "messages": list(sentences_of_messages()),
    }


def worst(found: list[Sentence]) -> str:
    """Return the longest sentences, one per line."""
    return "\n".join(str(one) for one in sorted(found, key=lambda one: -one.words)[:30])


@pytest.mark.parametrize("kind", MEAN)
def test_sentences_are_short(kind: str) -> None:
    found = sentences()[kind]
    mean = sum(one.words for one in found) / len(found)
    assert mean <= MEAN[kind], f"{mean:.2f} words on average, at most {MEAN[kind]}:\n{worst(found)}"
    long = [one for one in found if one.words > LONG]
    bound = LONG_SENTENCES[kind]
    assert len(long) <= bound, f"{len(long)} sentences over {LONG} words, at most {bound}:\n{worst(long)}"


@pytest.mark.parametrize("kind", MEAN)
def test_words_are_the_usual_ones(kind: str) -> None:
    found = [(idiom[0], one) for one in sentences()[kind] for idiom in IDIOM.finditer(one.text)]
    lines = [f"{idiom!r}, {one}" for idiom, one in found[:60]]
    assert len(found) <= IDIOMS[kind], "\n".join([f"{len(found)} idioms, at most {IDIOMS[kind]}:", *lines])


def test_words_of_tables_are_the_usual_ones() -> None:
    rows = [f"{page.name}: {row}" for page in PAGES for row in page.read_text("utf-8").splitlines() if row[:1] == "|"]
    found = [row for row in rows if IDIOM.search(re.sub("`[^`]*`", "", row))]
    assert len(found) <= TABLES, "\n".join(found)


def test_errors_say_what_to_do() -> None:
    found = errors_without_a_remedy()
    assert len(found) <= WITHOUT_REMEDY, "\n".join([f"{len(found)} without, at most {WITHOUT_REMEDY}:", *found])


def test_messages_of_the_library_name_no_options_of_commands() -> None:
    """They name arguments in backticks, which commands print as options."""
    every = [one for kind in ("errors", "messages") for one in sentences()[kind] if not one.place.startswith("cli")]
    found = [str(one) for one in every if re.search(r"(?<![\w-])--[a-z]", one.text) and "hf download" not in one.text]
    assert not found, "\n".join(found)


def test_the_rules_can_fail(tmp_path: Path) -> None:
    text = "# A head\n\nOne two `a.b c` four. Five by itself\nsix seven, eight al. nine.\n\n- An item of five words\n"
    found = [one for _, paragraph in paragraphs_of(text.splitlines()) for one in sentences_in(paragraph, "here")]
    assert [one.words for one in found] == [4, 8, 5]
    assert [bool(IDIOM.search(one.text)) for one in found] == [False, True, False]
    entries = [
        "Do a thing to nets.",
        "",
        "Args:",
        "    a: The first of two,",
        "        which follow.",
        "",
        "References:",
        "    A b.",
    ]
    assert [one.words for one in sentences_of_docstring("\n".join(entries), "here")] == [5, 6]
