"""`regauge line`: measure the loss along a path between two checkpoints."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

import regauge as rg
from regauge.cli.line_options import Line
from regauge.cli.options import UsageError
from regauge.cli.output import Progress, show_progress, tell, tell_table
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
"""The number of batches from which every step of a path's training recomputes statistics of batch normalization."""


def run(options: Line) -> None:
    """Print the table and the barrier, and write the plot."""
    if options.output is not None:
        require_pictures(options.output, overwrite=options.overwrite)
    if options.train is not None and options.path not in TRAINED:
        raise UsageError(f"--train is for paths that are trained, bezier and chain; {options.path} is not")
    if options.held.keep and options.path != "geodesic" and not options.align:
        raise UsageError("--keep is only for --path geodesic and --align; leave it out")
    if options.align and options.path != "straight":
        raise UsageError(f"--align is only for the straight path; for --path {options.path}, run `regauge align` first")
    judged = read(options, (options.a, options.b), options.held)
    with show_progress(is_transient=True) as progress:
        path, (a, b) = _make_path(options, judged, progress)
        # A function does not know what is structure, so that buffers that were moved may differ.
        judge = judged.task.evaluate if options.held.move else judged.task
        ways: dict[str, Any] = {"symmetry": judged.symmetry if options.align else None, "path": path}
        curve = rg.line(a, b, judge, options.points, prepare=judged.task.prepare, progress=progress, **ways)
    tell_table("table", curve.rows)
    tell(curve, **curve.facts)
    judged.tell_data()
    if options.output is not None:
        first, second = name_files((options.a, options.b))
        figure = curve.plot(title=LOSSES[options.loss], ends=(f"A: {first}", f"B: {second}"))
        write_picture(figure, curve.rows, options.output)


def _make_path(options: Line, judged: Judged, progress: Progress) -> tuple[Path, Sequence[rg.Params]]:
    """Make the path, and the networks that it connects."""
    if options.path == "straight":
        return rg.connect.Straight(), judged.networks
    if options.path == "geodesic":
        symmetry = judged.symmetry
        manifold = rg.canonical.canonical_manifold(symmetry)
        tell(f"both networks were normalized, which keeps their functions; the path lies on:\n{manifold}")
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
    path = rg.connect.train_path(
        a,
        b,
        replace(task, prepare=rg.connect.prepare_statistics(few).prepare),
        TRAINED[options.path].between(a, b, bends=options.bends),
        generator=torch.Generator().manual_seed(options.seed),
        steps=options.steps,
        optimizer=Adam(options.lr),
        progress=progress,
        on_step=lambda state: losses.append(float(state.loss)),
    )
    part = max(1, len(losses) // 10)
    tell(
        f"trained for {options.steps} steps on {options.train or judged.choosing.name}: mean loss of a batch on the "
        f"path: {fmean(losses[:part]):.4g} in the first {part} steps, {fmean(losses[-part:]):.4g} in the last {part}"
    )
    return path
