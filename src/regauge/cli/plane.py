"""`regauge plane`: the loss over the plane through three checkpoints."""

import functools
from collections.abc import Callable, Mapping
from math import inf

from rich.console import Console

import regauge as rg
from regauge.cli.evaluation import LOSSES, Judged, read, require_pictures, save_figure, save_rows, table_of, table_path
from regauge.cli.options import Plane, UsageError
from regauge.core.params import Params

LABELS = ("A", "B", "C")


def run(options: Plane) -> None:
    """Write the contour plot and the table, and print the three networks and the best point of the grid."""
    require_pictures(options.output, overwrite=options.overwrite)
    if options.metric == "accuracy" and options.loss != "cross-entropy":
        raise UsageError(f"there is no accuracy with --loss {options.loss}; draw the loss, or use the cross entropy")
    console = Console(stderr=True)
    judged = read(options, (options.a, options.b, options.c), console)
    with console.status("evaluating the plane"):
        found = _run_plane(options, judged)
    networks: list[dict[str, float | str]] = [
        {"network": label, "x": x, "y": y, **{name: float(values[k]) for name, values in found.at_points.items()}}
        for k, (label, (x, y)) in enumerate(zip(LABELS, found.points.tolist(), strict=True))
    ]
    grid: list[dict[str, float | str]] = [
        {"network": "", "x": x, "y": y, **{name: float(values[i, j]) for name, values in found.values.items()}}
        for i, y in enumerate(found.ys.tolist())
        for j, x in enumerate(found.xs.tolist())
    ]
    best = grid[int(found.values["loss"].nan_to_num(nan=inf).argmin())]
    Console().print(table_of([*networks, best | {"network": f"least of {len(found.ys)} x {len(found.xs)}"}]))
    if judged.task.prepare is not None:
        print("everywhere but at the three the statistics of batch normalization were recomputed from these data")
    from regauge.report.figures import plane_figure

    values = found.values[options.metric].numpy()
    is_loss = options.metric == "loss"
    figure = plane_figure(
        found.xs.numpy(),
        found.ys.numpy(),
        values if is_loss else 1 - values,
        found.points.numpy(),
        LABELS,
        LOSSES[options.loss] if is_loss else "error rate",
    )
    save_figure(figure, options.output)
    save_rows([*networks, *grid], table_path(options.output))
    print(f"written: {options.output} and {table_path(options.output).name}")


def _run_plane(options: Plane, judged: Judged) -> rg.connect.Plane:
    """Evaluate the plane, many networks at a time where the model allows it, else one by one."""
    evaluated = functools.partial(_evaluate_plane, options, judged)
    try:
        return evaluated(judged.task)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        return evaluated(judged.task.evaluate)


def _evaluate_plane(
    options: Plane, judged: Judged, judge: rg.Task | Callable[[Params], Mapping[str, float]]
) -> rg.connect.Plane:
    buffers = [name for name, _ in judged.model.module.named_buffers()]
    a, b, c = judged.networks
    return rg.plane(a, b, c, judge, resolution=options.resolution, margin=options.margin, buffers=buffers)
