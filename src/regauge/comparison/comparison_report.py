"""HTML pages of comparisons."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from regauge.checkpoints.output import Output
from regauge.checkpoints.writing import require_writable, save_text
from regauge.names import VERSION


def require_page(out: Output | str | Path | None) -> Path | None:
    """Return the path of the HTML page, or None if no page is requested.

    Raises:
        FileExistsError: The file exists and may not be replaced.
        FileNotFoundError: The folder of the file does not exist.
        ValueError: The file name does not end in `.html`.
    """
    if out is None:
        return None
    output = Output.of(out)
    output.require_alone("comparing")
    require_writable(output.path, overwrite=output.overwrite, suffixes=(".html",))
    return output.path


def write_page(path: Path, facts: Mapping[str, Any], seed: int, distances: Mapping[str, Tensor] | None = None) -> None:
    """Write the HTML page of two networks or, if distances are given, of many networks.

    Args:
        path: The `.html` file.
        facts: `Comparison.facts` together with the names `a` and `b` of both networks, or `Lineages.facts`.
        seed: The random seed, which the page displays.
        distances: The distance matrices, with labels as keys.
    """
    # Imported here, because only comparisons with a page need the package `report`.
    from regauge.report.comparison_page import comparison_page, lineage_page

    facts = {**facts, "version": VERSION, "seed": seed}
    matrices = None if distances is None else {label: one.numpy() for label, one in distances.items()}
    save_text(comparison_page(facts) if matrices is None else lineage_page(facts, matrices), path)


def write_tensor_map(path: Path, facts: Mapping[str, Any]) -> None:
    """Write the HTML page of a conversion, given its facts, rows and notes, and the names of both networks."""
    from regauge.report.comparison_page import tensor_map_page

    save_text(tensor_map_page({**facts, "version": VERSION}), path)
