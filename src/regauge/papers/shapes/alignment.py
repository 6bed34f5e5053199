"""Figures 3.1 to 3.3 and section 3.3 of paper 003, with the whole symmetry of sine units in addition."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

import regauge as rg
from regauge.connect import Path
from regauge.core.interpolation import distance
from regauge.core.params import Params
from regauge.papers.experiment import Run
from regauge.papers.line_quantities import AREA, BARRIER, halfway, mean_curve
from regauge.papers.shapes.study import Shape, Study, networks, samples, task
from regauge.papers.table import Quantity, Record, Row, Table
from regauge.papers.ways import Way, permutations_only, without_shifts

READ = 10_000
"""Samples that methods and repair read."""
QUANTITIES = (
    BARRIER,
    AREA,
    Quantity("highest loss", of=lambda record: max(row["loss"] for row in record["line"])),
    Quantity("loss halfway", of=halfway("loss")),
    Quantity("weight distance", 2),
    Quantity("units that stay"),
    Quantity("CPU s", 2),
)


@dataclass(frozen=True)
class ShapeWay(Way):
    """A row of a comparison of networks of shapes.

    Attributes:
        second: The second network: from the same start, that moved by a hidden element, or from another start.
        is_repaired: Whether networks between the ends are repaired.
        view: The form in which the method sees two networks; the element that it finds moves the network itself.
        pruned: Share of the parameters of both networks, the smallest ones, that are set to zero.
    """

    second: Literal["same", "hidden", "other"] = "other"
    is_repaired: bool = False
    view: Callable[[Params, Params], tuple[Params, Params]] | None = None
    pruned: float = 0.0


def own_ranges(a: Params, b: Params) -> tuple[Params, Params]:
    """Every tensor of either network stretched to [0, 1] by its own least and largest value."""
    first, second = ({name: _stretch(tensor, tensor) for name, tensor in params.items()} for params in (a, b))
    return first, second


def joint_ranges(a: Params, b: Params) -> tuple[Params, Params]:
    """Every tensor stretched by the least and the largest value of both networks."""
    both = {name: torch.stack([tensor, b[name]]) for name, tensor in a.items()}
    first, second = ({name: _stretch(tensor, both[name]) for name, tensor in params.items()} for params in (a, b))
    return first, second


def _stretch(tensor: Tensor, span: Tensor) -> Tensor:
    """Map the range of `span` to [0, 1], and constants to 0."""
    low, width = span.min(), span.max() - span.min()
    return (tensor - low) / torch.where(width > 0, width, 1.0)


WEIGHTS = rg.WeightMatching()
ACTIVATIONS = rg.ActivationMatching()
WAYS = (
    ShapeWay("same start", second="same"),
    ShapeWay("same start, weights, permutations", WEIGHTS, permutations_only, second="same"),
    ShapeWay("same start, hidden copy, weights, permutations", WEIGHTS, permutations_only, second="hidden"),
    ShapeWay("same start, hidden copy, weights, and signs", WEIGHTS, without_shifts, second="hidden"),
    ShapeWay("same start, hidden copy, weights, whole group", WEIGHTS, second="hidden"),
    ShapeWay("different starts"),
    ShapeWay("weights, permutations", WEIGHTS, permutations_only),
    ShapeWay("weights, permutations and signs", WEIGHTS, without_shifts),
    ShapeWay("weights, whole group", WEIGHTS),
    ShapeWay("activations, permutations", ACTIVATIONS, permutations_only),
    ShapeWay("activations, permutations and signs", ACTIVATIONS, without_shifts),
    ShapeWay("activations, whole group", ACTIVATIONS),
    ShapeWay("weights, permutations, repaired", WEIGHTS, permutations_only, is_repaired=True),
    ShapeWay("weights, whole group, repaired", WEIGHTS, is_repaired=True),
    ShapeWay("activations, permutations, repaired", ACTIVATIONS, permutations_only, is_repaired=True),
    ShapeWay("activations, whole group, repaired", ACTIVATIONS, is_repaired=True),
    ShapeWay("activations, whole group, then Sinkhorn", rg.Sinkhorn(init=ACTIVATIONS)),
)
VARIANTS = (
    ShapeWay("weights, permutations", WEIGHTS, permutations_only),
    ShapeWay("minmax1, permutations", WEIGHTS, permutations_only, view=own_ranges),
    ShapeWay("minmax2, permutations", WEIGHTS, permutations_only, view=joint_ranges),
    ShapeWay("half pruned, different starts", pruned=0.5),
    ShapeWay("half pruned, permutations", WEIGHTS, permutations_only, pruned=0.5),
    ShapeWay("half pruned, whole group", WEIGHTS, pruned=0.5),
    ShapeWay("80% pruned, different starts", pruned=0.8),
    ShapeWay("80% pruned, permutations", WEIGHTS, permutations_only, pruned=0.8),
    ShapeWay("80% pruned, whole group", WEIGHTS, pruned=0.8),
)
"""Section 3.3 of the paper."""
PICTURED = (
    "same start",
    "different starts",
    "weights, permutations",
    "weights, whole group",
    "activations, whole group",
)
"""Drawn as curves, and shown as strips; all variants are drawn too."""


CLAIMS = {
    WAYS: "the paper: flat from the same start; two peaks (4th and 4th to last point) from different starts; one bell, "
    "sometimes higher, after weight matching by permutations; activation matching looks like different starts. It "
    "concludes that alignment cannot put these networks into one basin, and knows permutations only",
    VARIANTS: "the paper: after either normalization lines are further from flat than without; with 80% of all "
    "parameters at zero they behave as they do without pruning (at width 512)",
}


def measure(study: Study, run: Run, ways: tuple[ShapeWay, ...] = WAYS) -> Table:
    """Fit the networks, align every pair in every way, and evaluate the lines."""
    found = networks(study, run)
    # One network from the same start for each shape, but several from starts of their own.
    counts = {way: study.pairs if way.second == "other" else 1 for way in ways}
    cells = {way: [(one, k) for one in found for k in range(counts[way])] for way in ways}
    steps = [functools.partial(_record, study, way, *cell, run) for way, own in cells.items() for cell in own]
    records = iter(run.each("aligning", steps))
    rows = []
    for way in ways:
        by_shape: dict[str, list[Record]] = {}
        for one, _ in cells[way]:
            by_shape.setdefault(one.name, []).append(next(records))
        lines = [record["line"] for own in by_shape.values() for record in own]
        curve = mean_curve(lines) if way.label in PICTURED or way in VARIANTS else ()
        rows.append(Row.of(way.label, list(by_shape.values()), QUANTITIES, curve=curve))
    constant = fmean(_constant(study, one, run) for one in found)
    notes = (
        CLAIMS[ways],
        f"{study.description}; ± is the standard error over shapes and pairs, 'over seeds' the standard deviation of "
        "the means of the shapes",
        f"loss: cross entropy in nats on 10,000 samples of both samplings; the best constant prediction has "
        f"{constant:.3f}. Methods and repair read {READ:,} samples of the second sampling",
        "hidden copy: the second network from the same start, moved by a random element of the whole group",
        "units that stay: share of units that the permutation leaves where they are",
        *study.notes,
    )
    return Table(
        f"Implicit shapes of width {study.inr.width}: what alignment is worth",
        notes,
        QUANTITIES,
        tuple(rows),
        "cross entropy on 10,000 samples (nats)",
    )


def move_second(
    way: ShapeWay, study: Study, one: Shape, k: int, symmetry: rg.Symmetry, judge: rg.Task, run: Run
) -> tuple[Params, rg.Element | None, float]:
    """Align the second network of a pair; return it, the element, and the CPU seconds of the alignment."""
    second = one.others[k] if way.second == "other" else one.same
    if way.second == "hidden":
        second = symmetry.act(symmetry.random(run.generator("hidden", one.name)), second)
    if way.method is None:
        return second, None, 0.0
    first, seen = (one.first, second) if way.view is None else way.view(one.first, second)
    read = samples(study, one.name, run)
    order = torch.randperm(len(read), generator=run.generator("read", one.name))[:READ]
    batches = [(read.points[part], read.labels[part]) for part in torch.split(order, READ // 5)]
    data = rg.Task(judge.module, batches, criterion=judge.criterion)
    generator = run.generator("alignment", one.name, k)
    began = time.thread_time()
    part = way.restrict(symmetry)
    element = rg.align(first, seen, part, method=way.method, task=data, generator=generator).element
    return part.act(element, second), element, time.thread_time() - began


def path_of(way: ShapeWay, study: Study, one: Shape, judge: rg.Task, run: Run) -> Path:
    """The straight line, or that with its networks repaired."""
    if not way.is_repaired:
        return rg.connect.Straight()
    read = samples(study, one.name, run)
    order = torch.randperm(len(read), generator=run.generator("read", one.name))[:READ]
    return rg.connect.Repaired(judge.module, [read.points[order]])


def _record(study: Study, way: ShapeWay, one: Shape, k: int, run: Run) -> Record:
    one = one.pruned(way.pruned)

    def make() -> Record:
        judge = task(study, one.name, run)
        symmetry = rg.discover(judge.module, (torch.zeros(2, study.inr.in_features),))
        second, element, seconds = move_second(way, study, one, k, symmetry, judge, run)
        path = path_of(way, study, one, judge, run)
        curve = rg.line(one.first, second, judge, points=study.points, path=path)
        return {
            "line": list(curve.table),
            "weight distance": distance(one.first, second),
            "units that stay": None if element is None else _share_fixed(element, symmetry),
            "CPU s": None if element is None else seconds,
        }

    settings = (study.inr, study.fit, study.queries, study.points, way.method, way.restrict.__name__, way.second)
    more = (way.view.__name__ if way.view else "", way.pruned)
    return run.record((*settings, way.is_repaired, *(more if any(more) else ())), f"{one.name}-{k}", make)


def _share_fixed(element: rg.Element, symmetry: rg.Symmetry) -> float:
    """Share of units that the permutation leaves in their places."""
    stay = total = 0
    for group in symmetry.groups:
        perm = element[group.name].perm
        total += group.size
        stay += group.size if perm is None else int((perm == torch.arange(len(perm))).sum())
    return stay / total


def _constant(study: Study, one: Shape, run: Run) -> float:
    """The loss of the best prediction that is the same everywhere."""
    (_, labels), *_ = task(study, one.name, run).batches
    mean = float(labels.double().mean())
    return -(mean * torch.tensor(mean).log() + (1 - mean) * torch.tensor(1 - mean).log()).item()
