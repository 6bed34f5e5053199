"""Figures 3.9 to 3.11 of paper 003: pictures of networks between two networks, for several alignments."""

from dataclasses import dataclass, replace

import torch

from regauge.core.progress import Progress
from regauge.inr.rendering.points import PointCloud, Projection, compare_points
from regauge.inr.rendering.strips import Detail, Strip, render_strip, save_strips
from regauge_papers.experiment import Run, Scale
from regauge_papers.shapes.alignment import PICTURED, WAYS, ShapeWay
from regauge_papers.shapes.study import Shape, Study, clouds, networks, study
from regauge_papers.table import Quantity, Row, Table

REPAIRED = "weights, whole group, repaired"
"""The row that is shown in addition to `PICTURED`."""
QUANTITIES = (
    Quantity("loss halfway"),
    Quantity("places with a surface", 0),
    Quantity("largest Chamfer distance", 4),
)


@dataclass(frozen=True)
class Reconstructions:
    """Settings: rendered networks between the first pair of every shape."""

    study: Study
    points: int  # networks in a row, both ends included
    detail: Detail  # resolution of the renderings


def config(scale: Scale, width: int = 128) -> Reconstructions:
    """Return the settings: two shapes of the study, rendered at seven positions."""
    whole = study(scale, width)
    if scale == "smoke":
        return Reconstructions(whole, 3, Detail(Projection(count=50, tries=8)))
    shapes = whole.shapes[:2] if scale == "cpu" else whole.shapes
    return Reconstructions(replace(whole, shapes=shapes), 7, Detail())


def measure(config: Reconstructions, run: Run) -> Table:
    """Render the networks along every line, and measure their distances from the shape."""
    found = networks(config.study, run)
    ways = [way for way in WAYS if way.label in (*PICTURED, REPAIRED)]

    def render(_: Progress, one: Shape, way: ShapeWay) -> Strip:
        return show_path(config.study, run, config.points, config.detail, one, way)

    strips: list[list[Strip]] = run.grid("rendering", render, found, ways)
    rows = []
    for one, strips_of_one in zip(found, strips, strict=True):
        reference = torch.cat(clouds(one.name))
        for strip in strips_of_one:
            chamfers = [_chamfer(picture, reference) for picture in strip.pictures]
            shown = [chamfer for chamfer in chamfers if chamfer is not None]
            record = {
                "loss halfway": strip.losses[config.points // 2],
                "places with a surface": float(len(shown)),
                "largest Chamfer distance": max(shown, default=None),
            }
            rows.append(Row.of(f"{one.name}: {strip.label}", [[record]], QUANTITIES))
    files = {
        one.name: save_strips(strips_of_one, run.file(f"-{one.name}.npz"), overwrite=True)
        for one, strips_of_one in zip(found, strips, strict=True)
    }
    notes = (
        "the paper: from one start every place shows the shape; from two starts only the ends and their neighbors do; "
        "matched by permutations the shape fades more smoothly",
        config.study.description,
        f"{config.points} places; {config.detail.projection.count:,} points each by projection along the gradient; "
        "Chamfer distance (squared, sum of both directions) from 4,096 points of the surface; a cross where no surface "
        "was found",
        *config.study.notes,
    )
    return Table("Reconstructions along the path", notes, QUANTITIES, tuple(rows), strips=files)


def show_path(study: Study, run: Run, points: int, detail: Detail, one: Shape, way: ShapeWay) -> Strip:
    """Render networks on the path of the first pair of a shape."""
    one = one.prune(way.pruned)
    second, _, _ = way.move(one, 0)
    (queries, _), *_ = one.judge.batches
    return render_strip(
        study.inr,
        one.first,
        second,
        one.judge.evaluate,
        label=way.label,
        points=points,
        path=way.path_of(one),
        queries=queries,
        detail=detail,
        generator=run.generator("rendering", one.name),
    )


def _chamfer(picture: object, reference: torch.Tensor) -> float | None:
    """Return the Chamfer distance from the surface, or None if too few points were found."""
    if not isinstance(picture, PointCloud) or not picture.is_complete:
        return None
    return compare_points(picture.points, reference).chamfer
