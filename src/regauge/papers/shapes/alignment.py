"""Figures 3.1 to 3.3 and section 3.3 of paper 003, and what the whole symmetry of sine units adds to them."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

import regauge as rg
from regauge.alignment import Method
from regauge.connect import Curve, Path
from regauge.core.interpolation import distance
from regauge.core.params import Params
from regauge.papers.classifiers import mean_curve
from regauge.papers.experiment import Run
from regauge.papers.shapes.pairs import Shape, Study, networks, pairs, samples, task
from regauge.papers.symmetries import permutations_only, without_shifts
from regauge.papers.table import Quantity, Record, Row, Table

READ = 10_000
"""Samples that methods and repair read."""
QUANTITIES = (
    Quantity("barrier"),
    Quantity("AUC"),
    Quantity("highest loss"),
    Quantity("loss halfway"),
    Quantity("weight distance", 2),
    Quantity("units that stay"),
    Quantity("CPU s", 2),
)


def whole(symmetry: rg.Symmetry) -> rg.Symmetry:
    """All of the symmetry."""
    return symmetry


@dataclass(frozen=True)
class Way:
    """One row.

    Attributes:
        label: In words.
        method: What aligns the second network; None leaves it.
        restrict: Takes the symmetry to the part of it that is used.
        second: Which second network: from the same start, the same moved by a hidden element, or from another start.
        is_repaired: Whether networks between the ends are repaired.
        view: What the method sees of two networks; what it finds moves the network itself.
        pruned: Share of the parameters of both networks, the smallest ones, that are zero.
    """

    label: str
    method: Method | None = None
    restrict: Callable[[rg.Symmetry], rg.Symmetry] = field(default=whole)
    second: Literal["same", "hidden", "other"] = "other"
    is_repaired: bool = False
    view: Callable[[Params, Params], tuple[Params, Params]] | None = None
    pruned: float = 0.0


def own_ranges(a: Params, b: Params) -> tuple[Params, Params]:
    """Every tensor of either network stretched to [0, 1] by its own least and largest value."""
    first, second = ({name: _stretched(tensor, tensor) for name, tensor in params.items()} for params in (a, b))
    return first, second


def joint_ranges(a: Params, b: Params) -> tuple[Params, Params]:
    """Every tensor stretched by the least and the largest value of both networks."""
    both = {name: torch.stack([tensor, b[name]]) for name, tensor in a.items()}
    first, second = ({name: _stretched(tensor, both[name]) for name, tensor in params.items()} for params in (a, b))
    return first, second


def _stretched(tensor: Tensor, span: Tensor) -> Tensor:
    """The range of `span` becomes [0, 1]; what has no range becomes 0."""
    low, width = span.min(), span.max() - span.min()
    return (tensor - low) / torch.where(width > 0, width, 1.0)


WEIGHTS = rg.WeightMatching()
ACTIVATIONS = rg.ActivationMatching()
WAYS = (
    Way("same start", second="same"),
    Way("same start, weights, permutations", WEIGHTS, permutations_only, "same"),
    Way("same start, hidden copy, weights, permutations", WEIGHTS, permutations_only, "hidden"),
    Way("same start, hidden copy, weights, and signs", WEIGHTS, without_shifts, "hidden"),
    Way("same start, hidden copy, weights, whole group", WEIGHTS, second="hidden"),
    Way("different starts"),
    Way("weights, permutations", WEIGHTS, permutations_only),
    Way("weights, permutations and signs", WEIGHTS, without_shifts),
    Way("weights, whole group", WEIGHTS),
    Way("activations, permutations", ACTIVATIONS, permutations_only),
    Way("activations, permutations and signs", ACTIVATIONS, without_shifts),
    Way("activations, whole group", ACTIVATIONS),
    Way("weights, permutations, repaired", WEIGHTS, permutations_only, is_repaired=True),
    Way("weights, whole group, repaired", WEIGHTS, is_repaired=True),
    Way("activations, permutations, repaired", ACTIVATIONS, permutations_only, is_repaired=True),
    Way("activations, whole group, repaired", ACTIVATIONS, is_repaired=True),
    Way("activations, whole group, then Sinkhorn", rg.Sinkhorn(init=ACTIVATIONS)),
)
VARIANTS = (
    Way("weights, permutations", WEIGHTS, permutations_only),
    Way("minmax1, permutations", WEIGHTS, permutations_only, view=own_ranges),
    Way("minmax2, permutations", WEIGHTS, permutations_only, view=joint_ranges),
    Way("half pruned, different starts", pruned=0.5),
    Way("half pruned, permutations", WEIGHTS, permutations_only, pruned=0.5),
    Way("half pruned, whole group", WEIGHTS, pruned=0.5),
    Way("80% pruned, different starts", pruned=0.8),
    Way("80% pruned, permutations", WEIGHTS, permutations_only, pruned=0.8),
    Way("80% pruned, whole group", WEIGHTS, pruned=0.8),
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


def measure(study: Study, run: Run, ways: tuple[Way, ...] = WAYS) -> Table:
    """Fit the networks, align every pair in every way, and evaluate the lines."""
    found = networks(study, run)
    cells = [
        (way, one, k)
        for way in ways
        for one, k in pairs(found, study.pairs)
        if way.second == "other" or k == 0  # One network from the same start for each shape.
    ]
    records = run.each("aligning", [functools.partial(_record, study, *cell, run) for cell in cells])
    rows = []
    for way in ways:
        of = [(one, k, record) for (other, one, k), record in zip(cells, records, strict=True) if other is way]
        rows.append(_row(way, study, of))
    constant = fmean(_constant(study, one, run) for one in found)
    notes = (
        CLAIMS[ways],
        f"{study.described()}; ± is the standard error over shapes and pairs, 'over seeds' the standard deviation of "
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


def moved(
    way: Way, study: Study, one: Shape, k: int, symmetry: rg.Symmetry, judge: rg.Task, run: Run
) -> tuple[Params, rg.Element | None, float]:
    """The second network of a pair, aligned; how; and the CPU seconds of that."""
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


def path_of(way: Way, study: Study, one: Shape, judge: rg.Task, run: Run) -> Path:
    """The straight line, or that with its networks repaired."""
    if not way.is_repaired:
        return rg.connect.Straight()
    read = samples(study, one.name, run)
    order = torch.randperm(len(read), generator=run.generator("read", one.name))[:READ]
    return rg.connect.Repaired(judge.module, [read.points[order]])


def _record(study: Study, way: Way, one: Shape, k: int, run: Run) -> Record:
    one = one.pruned(way.pruned)

    def make() -> Record:
        judge = task(study, one.name, run)
        symmetry = rg.discover(judge.module, (torch.zeros(2, study.inr.in_features),))
        second, element, seconds = moved(way, study, one, k, symmetry, judge, run)
        path = path_of(way, study, one, judge, run)
        curve = rg.line(one.first, second, judge, points=study.points, path=path)
        record: Record = {"line": list(curve.table), "distance": distance(one.first, second), "seconds": seconds}
        if element is not None:
            record["stay"] = _staying(element, symmetry)
        return record

    settings = (study.inr, study.fit, study.queries, study.points, way.method, way.restrict.__name__, way.second)
    more = (way.view.__name__ if way.view else "", way.pruned)
    return run.record((*settings, way.is_repaired, *(more if any(more) else ())), f"{one.name}-{k}", make)


def _staying(element: rg.Element, symmetry: rg.Symmetry) -> float:
    """Share of units that stay where they are."""
    stay = total = 0
    for group in symmetry.groups:
        perm = element[group.name].perm
        total += group.size
        stay += group.size if perm is None else int((perm == torch.arange(len(perm))).sum())
    return stay / total


def _row(way: Way, study: Study, of: Sequence[tuple[Shape, int, Record]]) -> Row:
    curves = [Curve(tuple(record["line"])) for _, _, record in of]
    by_shape = {one.name: [j for j, (other, _, _) in enumerate(of) if other.name == one.name] for one, _, _ in of}

    def grouped(values: Sequence[float]) -> list[list[float]]:
        return [[values[j] for j in group] for group in by_shape.values()]

    values = {
        "barrier": grouped([curve.barrier for curve in curves]),
        "AUC": grouped([max(0.0, curve.auc) for curve in curves]),
        "highest loss": grouped([max(row["loss"] for row in curve.table) for curve in curves]),
        "loss halfway": grouped([curve.table[study.points // 2]["loss"] for curve in curves]),
        "weight distance": grouped([record["distance"] for _, _, record in of]),
    }
    if way.method is not None:
        values["units that stay"] = grouped([record["stay"] for _, _, record in of])
        values["CPU s"] = grouped([record["seconds"] for _, _, record in of])
    is_drawn = way.label in PICTURED or way in VARIANTS
    return Row(way.label, values, curve=mean_curve(curves) if is_drawn else ())


def _constant(study: Study, one: Shape, run: Run) -> float:
    """The loss of the best prediction that is the same everywhere."""
    (_, labels), *_ = task(study, one.name, run).batches
    mean = float(labels.double().mean())
    return -(mean * torch.tensor(mean).log() + (1 - mean) * torch.tensor(1 - mean).log()).item()
