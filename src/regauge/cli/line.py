"""`regauge line`: the loss along the straight line between two checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor

import regauge as rg
from regauge.checkpoints.reading import load, match
from regauge.checkpoints.writing import require_writable
from regauge.cli.batches import dtype_of, load_batches, task_of
from regauge.cli.errors import UsageError
from regauge.cli.models import load_module
from regauge.cli.options import Line
from regauge.core.params import Params
from regauge.core.task import arguments

PLOT_SUFFIXES = (".svg", ".png", ".pdf")


def run(options: Line) -> None:
    """Print the table and the barrier, and write the plot."""
    if options.output is not None:
        require_writable(options.output, overwrite=options.overwrite, suffixes=PLOT_SUFFIXES)
    console = Console(stderr=True)
    with console.status("building the model and reading the checkpoints"):
        module = load_module(options.model).module
        if any(tensor.is_meta for tensor in module.state_dict().values()):
            module = module.to_empty(device="cpu")
        state = module.state_dict()
        params_a = match(load(options.a), state, str(options.a))
        params_b = match(load(options.b), state, str(options.b))
        batches = load_batches(options.data, options.batch)
    task = task_of(module, batches, loss=options.loss, outputs=options.outputs, dtype=dtype_of(params_a))
    task = replace(task, prepare=_prepare(task))
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


def _prepare(task: rg.Task) -> Callable[[Params], Params] | None:
    """Recomputes the statistics of batch normalization, in models that have it and take positional inputs."""
    if not any(name.endswith("running_mean") for name in task.module.state_dict()):
        return None
    calls = [arguments(inputs) for inputs, _ in task.batches]
    if any(kwargs for _, kwargs in calls):
        raise UsageError(
            "the model has batch normalization, whose statistics must be recomputed between the networks; give inputs "
            "as a tensor or a tuple of tensors, not by name"
        )
    return lambda params: rg.reset_batchnorm(task.module, params, [args for args, _ in calls])


def _table(rows: Sequence[Mapping[str, float]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.4f}" for value in row.values()))
    return table
