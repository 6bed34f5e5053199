"""Markdown tables."""

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, is_numeric: bool = False) -> list[str]:
    r"""The lines of a table, its cells escaped; columns of numbers behind the first are aligned to the right.

    >>> print("\n".join(markdown_table(["", "loss"], [["a|b", "0.1"]], is_numeric=True)))
    |  | loss |
    | --- | ---: |
    | a\|b | 0.1 |
    """
    rule = ["---", *["---:" if is_numeric else "---"] * (len(header) - 1)]
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (header, *rows)]
    return [f"| {' | '.join(row)} |" for row in (cells[0], rule, *cells[1:])]
