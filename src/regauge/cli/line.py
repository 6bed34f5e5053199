"""`regauge line`: the loss along the straight line between two checkpoints."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor

import regauge as rg
from regauge.checkpoints.reading import load, match
from regauge.checkpoints.writing import require_writable
from regauge.cli.batches import dtype_of, load_batches, task_of, with_reset
from regauge.cli.models import load_module
from regauge.cli.options import Line

PLOT_SUFFIXES = (".svg", ".png", ".pdf")


def run(options: Line) -> None:
    """Print the table and the barrier, and write the plot."""
    if options.output is not None:
        require_writable(options.output, overwrite=options.overwrite, suffixes=PLOT_SUFFIXES)
    console = Console(stderr=True)
    with console.status("building the model and reading the checkpoints"):
        module = load_module(options.model, values="always").module
        state = module.state_dict()
        params_a = match(load(options.a), state, str(options.a))
        params_b = match(load(options.b), state, str(options.b))
        batches = load_batches(options.data, options.batch)
    task = with_reset(task_of(module, batches, loss=options.loss, outputs=options.outputs, dtype=dtype_of(params_a)))
    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=options.points)

        def counted(params: Mapping[str, Tensor]) -> dict[str, float]:
            values = task.evaluate(params)
            progress.advance(bar)
            return values

        curve = rg.line(counted, params_a, params_b, points=options.points, prepare=task.prepare)
    Console().print(_table(curve.table))
    print(curve)
    if task.prepare is not None:
        print("between the ends the statistics of batch normalization were recomputed from these data")
    if options.output is not None:
        from regauge.report.figures import line_figure

        line_figure({"": curve.table}).savefig(options.output)
        print(f"written: {options.output}")


def _table(rows: Sequence[Mapping[str, float]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.4f}" for value in row.values()))
    return table
