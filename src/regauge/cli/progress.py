"""What is shown while a command works, on the standard error: progress bars, and words about what takes a while."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from rich import progress as rich
from rich.console import Console

from regauge.core.progress import Advance, Progress

ESTIMATE_SECONDS = 600
"""The estimate of the time left looks at the steps of these last seconds."""
STDERR = Console(stderr=True)


def show_status(label: str) -> AbstractContextManager[object]:
    """Show what is going on, until the context ends."""
    return STDERR.status(label)


@contextmanager
def show_progress(*, is_transient: bool = False, is_counted: bool = True) -> Iterator[Progress]:
    """Show a bar for each piece of work, with an estimate of the time left, until the context ends.

    Args:
        is_transient: Whether the bars vanish at the end and are left out in a file or a pipe.
        is_counted: Whether amounts are shown as numbers, else in percent.
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
