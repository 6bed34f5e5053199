"""Figures 3.6 and 3.12 of paper 003: renderings of networks without their smallest parameters."""

from dataclasses import dataclass, replace

import torch

from regauge.core.progress import Progress
from regauge.inr.rendering.points import PointCloud, Projection, compare_points, extract_points
from regauge.inr.rendering.strips import Detail, Strip, render_networks, save_strips
from regauge_papers.experiment import Run, Scale
from regauge_papers.shapes.alignment import VARIANTS, WEIGHTS, ShapeWay
from regauge_papers.shapes.reconstructions import show_path
from regauge_papers.shapes.study import Shape, Study, clouds, networks, study
from regauge_papers.table import Quantity, Record, Row, Table
from regauge_papers.ways import permutations_only

MOST = 0.8
"""The largest share of pruned parameters that the paper considers acceptable."""
SHARES = (0.0, 0.5, 0.6, 0.7, MOST, 0.9, 0.95)
QUANTITIES = (
    Quantity("loss"),
    Quantity("surface found", 2),
    Quantity("points found", 0),
    Quantity("Chamfer distance", 4),
    Quantity("F-score"),
)
PATHS = (
    ShapeWay("same start, 80% pruned", second="same", pruned=MOST),
    *(replace(way, label=way.label.replace("80% pruned, ", "")) for way in VARIANTS if way.pruned == MOST),
    ShapeWay("permutations, as trained", WEIGHTS, permutations_only),
)


@dataclass(frozen=True)
class Pruning:
    """Settings: networks of shapes, the shares of parameters that are set to zero, and the rendering."""

    study: Study
    shares: tuple[float, ...]
    detail: Detail  # resolution of the renderings
    shown: int  # shapes whose paths are shown
    points: int  # networks of a path, both ends included


def config(scale: Scale) -> Pruning:
    """Return the settings: the networks of `alignment-512`, at the paper's width, with paths of two shapes."""
    whole = study(scale, 512)
    if scale == "smoke":
        return Pruning(whole, (0.0, 0.5, 0.9), Detail(Projection(count=50, tries=8)), 1, 3)
    return Pruning(whole, SHARES, Detail(), 2 if scale == "cpu" else len(whole.shapes), 7)


def measure(config: Pruning, run: Run) -> Table:
    """Prune the first network of each shape by each share, and both networks of some pairs before alignment."""
    found = networks(config.study, run)
    projection = config.detail.projection

    def judge(share: float, k: int) -> Record:
        one = found[k].prune(share)
        cloud = extract_points(config.study.inr, one.first, projection, generator=run.generator("rendering", one.name))
        loss = one.judge.evaluate(one.first)["loss"]
        return {"loss": loss, "surface found": float(cloud.is_complete), **_agree(cloud, one)}

    settings = (*config.study.key, projection)
    records = run.records("pruning", settings, judge, config.shares, range(len(found)))
    rows = [
        Row.of(f"{share:.0%}", [[record] for record in own], QUANTITIES)
        for share, own in zip(config.shares, records, strict=True)
    ]
    files = {}
    shown = found[: config.shown]

    def render(_: Progress, one: Shape, way: ShapeWay) -> Strip:
        return show_path(config.study, run, config.points, config.detail, one, way)

    lines: list[list[Strip]] = run.grid("rendering paths", render, shown, PATHS)
    files["shares"] = save_strips(
        [_show_shares(config, one, run) for one in found], run.file("-shares.npz"), overwrite=True
    )
    for one, strips in zip(shown, lines, strict=True):
        files[one.name] = save_strips(strips, run.file(f"-{one.name}.npz"), overwrite=True)
    notes = (
        "the paper: 80% is the most that can be pruned with an acceptable quality, and lines between pruned networks "
        "behave as those between whole ones; it shows pictures and prints no numbers",
        "pruned: the smallest of all weights and biases of a network, by absolute value, are set to zero; nothing is "
        "trained afterwards",
        config.study.description,
        f"the first network of each shape. {projection.count:,} points are wanted by projection along the gradient; "
        "Chamfer distance (squared, sum of both directions) and F-score (0.01) from 4,096 points of the surface, over "
        "the shapes for which any were found",
        *config.study.notes,
    )
    return Table(
        f"Pruned shapes of width {config.study.inr.width}", notes, QUANTITIES, tuple(rows), strips=files, unit="shape"
    )


def _agree(cloud: PointCloud, one: Shape) -> Record:
    """Measure the distance of the found points from the shape; return None if no points were found."""
    count = len(cloud.points)
    if not count:
        return {"points found": 0.0, "Chamfer distance": None, "F-score": 0.0}
    agreement = compare_points(cloud.points, torch.cat(clouds(one.name)))
    return {"points found": float(count), "Chamfer distance": agreement.chamfer, "F-score": agreement.f_score}


def _show_shares(config: Pruning, one: Shape, run: Run) -> Strip:
    """Render the first network of a shape with increasing pruning."""
    (points, _), *_ = one.judge.batches
    return render_networks(
        config.study.inr,
        {f"{share:.0%}": one.prune(share).first for share in config.shares},
        one.judge.evaluate,
        label=one.name,
        queries=points,
        detail=config.detail,
        generator=run.generator("rendering", one.name),
    )
