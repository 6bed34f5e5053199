"""`regauge line`: the loss along a path between two checkpoints."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch

import regauge as rg
from regauge.cli.line_options import Line
from regauge.cli.options import UsageError
from regauge.cli.output import Advance, Progress, show_progress, tell, tell_table
from regauge.cli.result_files import LOSSES, name_files, require_pictures, write_picture
from regauge.cli.tasks import Judged, read, task_on
from regauge.connect import Path
from regauge.hub import dtype_of
from regauge.training import Adam

TRAINED: dict[str, type[rg.connect.Bezier] | type[rg.connect.PolygonalChain]] = {
    "bezier": rg.connect.Bezier,
    "chain": rg.connect.PolygonalChain,
}
STATISTICS_BATCHES = 2
"""Batches from which statistics of batch normalization are recomputed in every step of a path's training."""


def run(options: Line) -> None:
    """Print the table and the barrier, and write the plot."""
    if options.output is not None:
        require_pictures(options.output, overwrite=options.overwrite)
    if options.train is not None and options.path not in TRAINED:
        raise UsageError(f"--train is for paths that are trained, bezier and chain; {options.path} is not")
    if options.held.keep and options.path != "geodesic":
        raise UsageError("--keep is for the geodesic path, for which the model is traced")
    judged = read(options, (options.a, options.b), options.held)
    with show_progress(is_transient=True) as progress:
        path, (a, b) = _make_path(options, judged, progress)
        # A function does not know what is structure, so that buffers that were moved may differ.
        judge = judged.task.evaluate if options.held.move else judged.task
        prepare = judged.task.prepare
        curve = rg.line(a, b, judge, points=options.points, path=path, prepare=prepare, progress=progress)
    tell_table("table", curve.table)
    tell(curve, barrier=curve.barrier, raw_barrier=curve.raw_barrier, auc=curve.auc, stored=curve.stored)
    judged.tell_data()
    if options.output is not None:
        from regauge.report.line_figures import path_figure

        first, second = name_files((options.a, options.b))
        figure = path_figure(curve.table, LOSSES[options.loss], (f"A: {first}", f"B: {second}"))
        write_picture(figure, curve.table, options.output)


def _make_path(options: Line, judged: Judged, progress: Progress) -> tuple[Path, Sequence[rg.Params]]:
    """Make the path, and the networks that it connects."""
    if options.path == "straight":
        return rg.connect.Straight(), judged.networks
    if options.path == "geodesic":
        symmetry = judged.symmetry
        manifold = rg.canonical.canonical_manifold(symmetry)
        tell(
            f"both networks were brought to scales of one, which changes no function; on the way there are:\n{manifold}"
        )
        return rg.connect.Geodesic(manifold), [rg.canonicalize(p, symmetry, parts=("scale",)) for p in judged.networks]
    return _train_path(options, judged, progress), judged.networks


def _train_path(options: Line, judged: Judged, progress: Progress) -> Path:
    """Train the control points of a path."""
    a, b = judged.networks
    task = replace(judged.choosing, prepare=None)
    if options.train is not None:
        task = task_on(options, judged.model, options.train, dtype_of(a))
    few = replace(task, batches=list(task.batches)[:STATISTICS_BATCHES])
    losses: list[float] = []

    def begin(label: str, total: float, /) -> Advance:
        show = progress(label, total)

        def advance(amount: float = 1, /, *, loss: float | None = None) -> None:
            losses.extend([] if loss is None else [loss])
            show(amount, loss=loss)

        return advance

    path = rg.connect.train_path(
        a,
        b,
        replace(task, prepare=rg.connect.prepare_statistics(few).prepare),
        TRAINED[options.path].between(a, b, bends=options.bends),
        generator=torch.Generator().manual_seed(options.seed),
        steps=options.steps,
        optimizer=Adam(options.lr),
        progress=begin,
    )
    part = max(1, len(losses) // 10)
    data = options.train or judged.choosing.name
    tell(
        f"trained for {options.steps} steps on {data}: mean loss of a batch somewhere on the path "
        f"{fmean(losses[:part]):.4g} in the first {part} steps, {fmean(losses[-part:]):.4g} in the last"
    )
    return path
