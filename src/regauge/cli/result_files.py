"""Files that commands write in addition to printed text: pages, pictures with their numbers, and tables."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.checkpoints.writing import require_writable, save_text, whole_file
from regauge.cli.options import PICTURES
from regauge.cli.output import tell_table, tell_written

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSSES = {"cross-entropy": "cross entropy (nats)", "mse": "mean squared error"}
"""Names of the losses in plots."""


def require_pictures(path: Path, *, overwrite: bool) -> None:
    """Raise an error unless a plot and its table can be written."""
    require_writable(path, overwrite=overwrite, suffixes=PICTURES.suffixes)
    require_writable(path.with_suffix(".csv"), overwrite=overwrite, suffixes=(".csv",))


def require_results(page: Path, *, overwrite: bool) -> None:
    """Raise an error unless a page and its numbers (the same name with .json) can be written."""
    require_writable(page, overwrite=overwrite, suffixes=(".html",))
    require_writable(page.with_suffix(".json"), overwrite=overwrite, suffixes=(".json",))


def name_files(paths: Sequence[Path]) -> list[str]:
    """Return names of files or folders for pictures, without parent folders unless two names would be equal."""
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else list(map(str, paths))


def write_picture(figure: "Figure", rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a picture, and its numbers with all digits as CSV. Equal pictures always give equal bytes."""
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    path.with_suffix(".csv").unlink(missing_ok=True)  # of another picture
    with whole_file(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=200, metadata=dates.get(path.suffix))
    tell_written(path, write_rows(rows, path.with_suffix(".csv")))


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write rows as CSV with all digits. The first row determines the columns."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([rows[0].keys(), *(row.values() for row in rows)])
    return save_text(text.getvalue(), path)


def require_table(path: Path | None, *, overwrite: bool) -> None:
    """Raise an error if a table is requested but cannot be written."""
    if path is not None:
        require_writable(path, overwrite=overwrite, suffixes=(".csv",))


def tell_or_write_rows(name: str, rows: Sequence[Mapping[str, Any]], path: Path | None) -> None:
    """Print a table, or write it to a path if one is given."""
    if path is None:
        tell_table(name, rows)
    else:
        tell_written(write_rows(rows, path))
