"""`regauge line`: the loss along the straight line between two checkpoints."""

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor, nn

import regauge as rg
from regauge.checkpoints.reading import load, match
from regauge.checkpoints.writing import require_writable
from regauge.cli.batches import Batch, batch_evaluator, load_batches
from regauge.cli.errors import UsageError
from regauge.cli.models import load_module
from regauge.cli.options import Line
from regauge.core.params import Params

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
    evaluate = batch_evaluator(module, batches, loss=options.loss, outputs=options.outputs)
    prepare = _prepare(module, batches)
    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=options.points)

        def counted(params: Mapping[str, Tensor]) -> dict[str, float]:
            values = evaluate(params)
            progress.advance(task)
            return values

        curve = rg.line(counted, params_a, params_b, points=options.points, prepare=prepare)
    Console().print(_table(curve.table))
    print(curve)
    if prepare is not None:
        print("between the ends the statistics of batch normalization were recomputed from these data")
    if options.output is not None:
        from regauge.report.figures import line_figure

        line_figure({"": curve.table}).savefig(options.output)
        print(f"written: {options.output}")


def _prepare(module: nn.Module, batches: list[Batch]) -> Callable[[Params], Params] | None:
    """Recomputes the statistics of batch normalization, in models that have it and take positional inputs."""
    if not any(name.endswith("running_mean") for name in module.state_dict()):
        return None
    inputs = [batch.inputs if isinstance(batch.inputs, tuple) else (batch.inputs,) for batch in batches]
    if any(isinstance(values[0], Mapping) for values in inputs):
        raise UsageError(
            "the model has batch normalization, whose statistics must be recomputed between the networks; give inputs "
            "as a tensor or a tuple of tensors, not by name"
        )
    return lambda params: rg.reset_batchnorm(module, params, inputs)


def _table(rows: Sequence[Mapping[str, float]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.4f}" for value in row.values()))
    return table
