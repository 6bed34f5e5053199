"""Figures 3.1 to 3.3 and section 3.3 of paper 003, extended by the whole symmetry of sine units."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

import regauge as rg
from regauge.connect import Path
from regauge.core.interpolation import distance
from regauge.core.params import Params
from regauge.inr.fields.signal_samples import entropy_floor
from regauge_papers.experiment import Run
from regauge_papers.shapes.study import Shape, Study, networks
from regauge_papers.table import AREA, BARRIER, Quantity, Record, Row, Table, halfway
from regauge_papers.ways import PUBLISHED_ACTIVATIONS, PUBLISHED_WEIGHTS, Way, permutations_only, without_shifts

View = Callable[[Params, Params], tuple[Params, Params]]
READ = 10_000
"""The number of samples for methods that use data, and for repair."""
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
    """A row of a comparison. The second network has the initialization of the first network, a different
    initialization, or is a moved network.

    A moved network has the same initialization, and is then transformed by a random element of the whole group.
    """

    second: Literal["same", "hidden", "other"] = "other"
    view: View | None = field(default=None, repr=False)  # the networks as the method sees them, to find the element
    pruned: float = 0.0  # share of the parameters of both networks, the smallest ones, that are set to zero

    def count(self, study: Study) -> int:
        """Return the number of pairs for each shape: one pair with the same initialization, or several pairs with
        different initializations.
        """
        return study.pairs if self.second == "other" else 1

    def move(self, one: Shape, k: int) -> tuple[Params, rg.Element | None, float]:
        """Align the second network of a pair. Return the network, the element, and the CPU seconds."""
        second = one.others[k] if self.second == "other" else one.same
        if self.second == "hidden":
            second = one.symmetry.act(one.symmetry.random(one.run.generator("hidden", one.name)), second)
        if self.method is None:
            return second, None, 0.0
        first, seen = (one.first, second) if self.view is None else self.view(one.first, second)
        data, generator = one.read("read", READ, READ // 5), one.run.generator("alignment", one.name, k)
        began = time.thread_time()
        part = self.restrict(one.symmetry)
        element = rg.align(first, seen, part, method=self.method, task=data, generator=generator).element
        return part.act(element, second), element, time.thread_time() - began

    def path_of(self, one: Shape) -> Path:
        """Return the line to the second network, which is repaired if the row requests it."""
        batches = one.read("read", READ, READ).batches if self.is_repaired else ()
        return self.path(one.judge.module, [points for points, _ in batches])


def own_ranges(a: Params, b: Params) -> tuple[Params, Params]:
    """Stretch every tensor of each network to [0, 1] by its own smallest and largest value."""
    first, second = ({name: _stretch(tensor, tensor) for name, tensor in params.items()} for params in (a, b))
    return first, second


def joint_ranges(a: Params, b: Params) -> tuple[Params, Params]:
    """Stretch every tensor by the smallest and largest value of both networks."""
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
    ShapeWay("weights as published, permutations", PUBLISHED_WEIGHTS, permutations_only),
    ShapeWay("weights, permutations and signs", WEIGHTS, without_shifts),
    ShapeWay("weights, whole group", WEIGHTS),
    ShapeWay("activations as published, permutations", PUBLISHED_ACTIVATIONS, permutations_only),
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
"""The rows for section 3.3 of the paper: variants of its method that stretch or prune the networks before matching."""
PICTURED = (
    "same start",
    "different starts",
    "weights, permutations",
    "weights, whole group",
    "activations, whole group",
)
"""The rows that are drawn as curves, shown as strips, and compared by their codes. The rows in `VARIANTS` are also
drawn."""


COMPARED = "weights, permutations"
"""The row with which all other rows are compared, shape by shape. The row "weights, permutations" is the paper's
method."""
CLAIMS = {
    WAYS: "the paper: flat from the same start; two peaks (4th and 4th to last point) from different starts; one bell, "
    "sometimes higher, after weight matching by permutations; activation matching looks like different starts. It "
    "concludes that alignment cannot put these networks into one basin, and knows permutations only",
    VARIANTS: "the paper: after either normalization lines are further from flat than without; with 80% of all "
    "parameters at zero they behave as they do without pruning (at width 512)",
}


def measure(study: Study, run: Run, ways: tuple[ShapeWay, ...] = WAYS) -> Table:
    """Fit the networks, align every pair by each method, and evaluate the lines."""
    shapes = {one.name: one for one in networks(study, run)}

    def measure_pair(cell: tuple[ShapeWay, str, int]) -> Record:
        way, name, k = cell
        one = shapes[name].prune(way.pruned)
        second, element, seconds = way.move(one, k)
        return {
            "line": list(rg.line(one.first, second, one.judge, points=study.points, path=way.path_of(one)).table),
            "weight distance": distance(one.first, second),
            "units that stay": None if element is None else _share_fixed(element, one.symmetry),
            "CPU s": None if element is None else seconds,
        }

    cells = [(way, name, k) for way in ways for name in shapes for k in range(way.count(study))]
    records = iter(run.records("aligning", (*study.key, study.points), measure_pair, cells))
    rows = [
        Row.of(
            way.label,
            [[next(records) for _ in range(way.count(study))] for _ in shapes],
            QUANTITIES,
            is_drawn=way.label in PICTURED or way in VARIANTS,
        )
        for way in ways
    ]
    # The best prediction that is the same everywhere is the mean label.
    constant = fmean(entropy_floor(torch.cat([y for _, y in one.judge.batches]).mean()) for one in shapes.values())
    notes = (
        CLAIMS[ways],
        f"{study.description}; ± is the standard error over shapes, each the mean of its pairs, since pairs of a shape "
        "share a network",
        f"loss: cross entropy in nats on {study.judged:,} samples of both samplings; the best constant prediction has "
        f"{constant:.3f}. Methods and repair read {READ:,} samples of the second sampling",
        "as published: weights from the identity, activations by products that are not centered; otherwise weights "
        "begin at the barycenter, and activations are compared by correlations",
        "hidden copy: the second network from the same start, moved by a random element of the whole group",
        "units that stay: share of units that the permutation leaves where they are",
        *study.notes,
    )
    return Table(
        f"Implicit shapes of width {study.inr.width}: what alignment is worth",
        notes,
        QUANTITIES,
        tuple(rows),
        f"cross entropy on {study.judged:,} samples (nats)",
        unit="shape",
        paired=COMPARED,
    )


def _share_fixed(element: rg.Element, symmetry: rg.Symmetry) -> float:
    """Return the fraction of units that the permutation does not move."""
    stay = total = 0
    for group in symmetry.groups:
        perm = element[group.name].perm
        total += group.size
        stay += group.size if perm is None else int((perm == torch.arange(len(perm))).sum())
    return stay / total
