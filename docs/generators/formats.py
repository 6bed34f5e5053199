"""The page of file formats, from the tables by which files are read and written, and from docstrings."""

from inspect import getdoc
from typing import Any

from generators.api import heading
from generators.commands import rest
from regauge.checkpoints import FORMATS, alignments
from regauge.core.symmetry import Symmetry
from regauge.core.symmetry_text import FORMAT, VERSION
from regauge.zoo import EXPORTERS
from regauge.zoo.formats.importer_table import FORMATS as IMPORTERS


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A table in reStructuredText."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in (head, *rows):
        lines += [f"   {'* -' if number == 0 else '  -'} {cell}".rstrip() for number, cell in enumerate(row)]
    return [*lines, ""]


def code(names: Any) -> str:
    """Names as code, with commas."""
    return ", ".join(f"``{name}``" for name in names)


def format_page() -> str:
    """The text of the page."""
    read = [
        (
            name,
            code(one.suffixes),
            "no; says what to do" if one.is_refused else "yes" if one.opener else "no",
            "yes" if one.writer else "no",
            code(one.names),
        )
        for name, one in FORMATS.items()
    ]
    imported, exported = (
        [(code([name]), rest(" ".join((getdoc(one) or "").partition("\n\n")[0].split()))) for name, one in rows.items()]
        for rows in (IMPORTERS, EXPORTERS)
    )
    return "\n".join(
        [
            heading("File formats"),
            heading("Checkpoints", "-"),
            "How they are chosen in a folder, sharded and streamed: :doc:`/checkpoints`.",
            "",
            *table(("format", "endings", "read", "written", "names in a folder, in their order"), read),
            heading("Alignments", "-"),
            rest(getdoc(alignments) or ""),
            "",
            heading("Symmetries", "-"),
            f"JSON with ``format`` ({FORMAT!r}), ``version`` ({VERSION}), ``groups`` and the other attributes of "
            f":class:`regauge.Symmetry`. {rest(getdoc(Symmetry.to_json) or '')}",
            "",
            heading("Recipes of merges", "-"),
            "YAML of mergekit: :doc:`/recipes`.",
            "",
            heading("Populations", "-"),
            "The store, version 1: :doc:`/store`. Other formats are imported and exported (:doc:`/populations`):",
            "",
            *table(("imported", ""), imported),
            *table(("exported", ""), exported),
        ]
    )
