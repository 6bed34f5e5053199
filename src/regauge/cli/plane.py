"""`regauge plane`: measure the loss over the plane through three checkpoints."""

from functools import partial
from math import inf
from time import perf_counter

import regauge as rg
from regauge.cli.line_options import Plane
from regauge.cli.options import UsageError
from regauge.cli.output import STDERR, Advance, Progress, show_progress, tell_table
from regauge.cli.result_files import LOSSES, name_files, require_pictures, write_picture
from regauge.cli.tasks import Judged, read

LABELS = ("A", "B", "C")


def run(options: Plane) -> None:
    """Write the contour plot and the table, and print the three networks and the best point of the grid."""
    require_pictures(options.output, overwrite=options.overwrite)
    if options.metric == "accuracy" and options.loss != "cross-entropy":
        raise UsageError(f"there is no accuracy with --loss {options.loss}; draw the loss, or use --loss cross-entropy")
    judged = read(options, (options.a, options.b, options.c))
    start = perf_counter()
    judged.task.evaluate_average(judged.networks[0])
    seconds = perf_counter() - start
    with show_progress() as progress:

        def begin(label: str, total: float, /) -> Advance:
            STDERR.print(f"{label} takes about {total * seconds:.3g} s; a smaller --resolution is faster")
            return progress(label, total)

        found = _evaluate(options, judged, begin)
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
    tell_table("table", [*networks, best | {"network": f"least of {len(found.ys)} x {len(found.xs)}"}])
    judged.tell_data()
    from regauge.report.figures import plane_figure

    values = found.values[options.metric].numpy()
    is_loss = options.metric == "loss"
    files = name_files((options.a, options.b, options.c))
    figure = plane_figure(
        found.xs.numpy(),
        found.ys.numpy(),
        values if is_loss else 1 - values,
        found.points.numpy(),
        LABELS,
        LOSSES[options.loss] if is_loss else "error rate",
        "; ".join(f"{label}: {name}" for label, name in zip(LABELS, files, strict=True)),
    )
    write_picture(figure, [*networks, *grid], options.output)


def _evaluate(options: Plane, judged: Judged, progress: Progress) -> rg.connect.Plane:
    """Evaluate the plane, many networks at a time if the model allows it, otherwise one by one."""
    buffers = [name for name, _ in judged.model.module.named_buffers()]
    resolution, margin = options.resolution, options.margin
    a, b, c = judged.networks
    evaluate = partial(
        rg.connect.plane, a, b, c, resolution=resolution, margin=margin, buffers=buffers, progress=progress
    )
    try:
        return evaluate(judged.task)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        return evaluate(judged.task.evaluate)
