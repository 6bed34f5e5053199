"""Output of commands: progress on the standard error, and reports.

A command reports sentences and tables together with the facts that they contain. Reports are printed immediately. For
output in JSON, the facts are collected into one object, which is printed at the end.
"""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rich import progress as rich
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regauge.cli.commands import as_options
from regauge.core.escaping import escape, escape_json, escape_lines
from regauge.core.progress import Advance as Advance
from regauge.core.progress import Progress as Progress
from regauge.core.progress import no_progress as no_progress

UNLIMITED = 10_000
"""The number of characters in a line if there is no terminal."""
ESTIMATE_SECONDS = 600
"""The number of recent seconds whose steps determine the estimate of the remaining time."""
LINE_SECONDS = 60
"""The number of seconds between two lines of progress, if the output is a file or a pipe, which cannot show bars."""
STDERR = Console(stderr=True, markup=False, emoji=False)
FORMAT, VERSION = "regauge.report", 1
_FACTS: ContextVar[dict[str, Any] | None] = ContextVar("facts", default=None)
"""The facts of a report, if the output is JSON."""


@contextmanager
def report(command: str, *, as_json: bool) -> Iterator[None]:
    """Return a context that prints what a command reports. With JSON, one object is printed at the end.

    With JSON, all other output goes to the standard error.
    """
    if not as_json:
        yield
        return
    facts: dict[str, Any] = {"format": FORMAT, "version": VERSION, "command": command}
    token = _FACTS.set(facts)
    try:
        with redirect_stdout(sys.stderr):
            yield
        print(escape_json(json.dumps(_plain(facts), indent=1, ensure_ascii=False, allow_nan=False)))
    finally:
        _FACTS.reset(token)


def tell(text: object, /, **facts: Any) -> None:
    """Print a text, or add its facts to the report. Lists with equal names are joined. Texts without facts are notes.

    Arguments in the text become options. Strings from files may contain line breaks; the caller must escape them.
    """
    known, shown = _FACTS.get(), as_options(str(text))
    if known is None:
        print(escape_lines(shown))
        return
    for name, value in (facts or {"notes": [shown.strip()]}).items():
        known[name] = [*known[name], *value] if isinstance(known.get(name), list) else value


def warn(text: str) -> None:
    """Print a text for users on the standard error."""
    print(escape_lines(text), file=sys.stderr)


def tell_written(*paths: Path) -> None:
    """Report the files or folders that a command wrote."""
    first, *others = paths
    tell(" and ".join([f"written: {first}", *(path.name for path in others)]), written=[str(path) for path in paths])


def tell_notes(notes: Sequence[str]) -> None:
    """Report sentences as notes."""
    for note in notes:
        tell(note)


def tell_table(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    title: str | None = None,
    *,
    decimals: int = 4,
    digits: int | None = None,
) -> None:
    """Report rows as a table with the names of the first row. Numbers are rounded when printed, but not in JSON.

    Args:
        name: Name of the table in JSON.
        rows: Rows with equal names. A value with an empty name is the label of its row (`name` in JSON).
        title: A title that is printed above the table.
        decimals: The number of decimals of printed numbers.
        digits: The number of significant digits of printed numbers, in place of decimals.
    """
    if _FACTS.get() is not None:
        tell("", **{name: [{key or "name": value for key, value in row.items()} for row in rows]})
        return
    style = f".{decimals}f" if digits is None else f".{digits}g"
    table = Table(box=None, pad_edge=False, title=title)
    for name, value in rows[0].items() if rows else ():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(_cell(value, style) for value in row.values()))
    show(table)


def show(table: Table) -> None:
    """Print a table at its full width if no terminal limits the width. Markup in texts is not interpreted."""
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = Console(width=UNLIMITED, markup=False, emoji=False).measure(table).maximum
    console.print(table)


def show_status(label: str) -> AbstractContextManager[object]:
    """Display a message about the current work until the context ends."""
    return STDERR.status(Text(escape(label)))


@contextmanager
def show_progress(*, is_transient: bool = False, is_counted: bool = True) -> Iterator[Progress]:
    """Display a bar with the remaining time for each piece of work, until the context ends.

    In a file or a pipe, lines replace bars: at most one line a minute, and the final state of all bars. Transient bars
    disappear at the end, and are omitted in a file or a pipe. Amounts without a unit are in percent.
    """
    columns = (
        rich.TextColumn("{task.description}", markup=False),
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
        told = time.monotonic()

        def begin(label: str, total: float, /) -> Advance:
            task = bars.add_task(escape(label), total=total)

            def advance(amount: float = 1, /, *, loss: float | None = None) -> None:
                nonlocal told
                bars.advance(task, amount)
                if not bars.disable and not STDERR.is_terminal and time.monotonic() - told >= LINE_SECONDS:
                    told = time.monotonic()
                    STDERR.print(_line(bars.tasks[task]), soft_wrap=True, highlight=False)

            return advance

        yield begin


def _line(task: rich.Task) -> str:
    """Return a line about the progress of a piece of work."""
    columns = (rich.TimeElapsedColumn(), rich.TimeRemainingColumn())
    elapsed, left = (column.render(task).plain for column in columns)
    return f"{task.description}: {task.percentage:.1f}% in {elapsed}, left: {left}"


def _cell(value: Any, style: str) -> str:
    if isinstance(value, float):
        return format(value, style)
    return f"{value:,}" if type(value) is int else escape(str(value))


def _plain(value: Any) -> Any:
    """Return a value ready for JSON, without rounding. Infinite numbers and NaN become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return str(value)
