"""What commands show and leave behind: progress on the standard error, tables, and pictures with their numbers."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import progress as rich
from rich.console import Console
from rich.table import Table

from regauge.cli.options import Written
from regauge.core.progress import Advance, Progress
from regauge.storage.checkpoints.form import Form
from regauge.storage.checkpoints.writing import require_writable, save_text, whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSSES = {"cross-entropy": "cross entropy (nats)", "mse": "mean squared error"}
"""Names of the losses in plots."""
UNLIMITED = 10_000
"""Characters in a line where no terminal limits it."""
ESTIMATE_SECONDS = 600
"""The estimate of the time left looks at the steps of these last seconds."""
STDERR = Console(stderr=True)


def print_table(rows: Sequence[Mapping[str, float | str]], title: str | None = None, *, decimals: int = 4) -> None:
    """Print rows under the names of the first one, texts on the left."""
    table = Table(box=None, pad_edge=False, title=title)
    for name, value in rows[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.{decimals}f}" if isinstance(value, float) else str(value) for value in row.values()))
    show(table)


def show(table: Table) -> None:
    """Print a table, as wide as it needs to be where no terminal limits it."""
    console = Console()
    if not console.is_terminal:
        console.width = Console(width=UNLIMITED).measure(table).maximum
    console.print(table)


def require_pictures(path: Path, *, overwrite: bool) -> None:
    """Raise unless a plot and the table beside it can be written."""
    require_writable(path, overwrite=overwrite, suffixes=(".svg", ".png", ".pdf"))
    require_writable(path.with_suffix(".csv"), overwrite=overwrite, suffixes=(".csv",))


def write_picture(figure: "Figure", rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a picture, the same bytes every time, and its numbers with all their digits beside it as CSV."""
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with whole_file(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=200, metadata=dates.get(path.suffix))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([rows[0].keys(), *(row.values() for row in rows)])
    table = save_text(text.getvalue(), path.with_suffix(".csv"))
    print(f"written: {path} and {table.name}")


def form_of(options: Written) -> Form:
    """How the options ask for the output to be written."""
    return Form.of(options.dtype, options.shard_size or None)


def show_status(label: str) -> AbstractContextManager[object]:
    """Show what is going on, until the context ends."""
    return STDERR.status(label)


@contextmanager
def show_progress(*, is_transient: bool = False, is_counted: bool = True) -> Iterator[Progress]:
    """Show a bar for each piece of work, with an estimate of the time left, until the context ends.

    Transient bars vanish at the end and are left out in a file or a pipe; amounts that are not counted are in percent.
    """
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn() if is_counted else rich.TaskProgressColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("left:"),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(
        *columns,
        console=STDERR,
        transient=is_transient,
        disable=is_transient and not STDERR.is_terminal,
        speed_estimate_period=ESTIMATE_SECONDS,
    ) as bars:

        def begin(label: str, total: float, /) -> Advance:
            task = bars.add_task(label, total=total)

            def advance(amount: float = 1, /, *, loss: float | None = None) -> None:
                bars.advance(task, amount)

            return advance

        yield begin
