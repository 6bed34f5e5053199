"""Ways to align the second network of a pair, each with a method and the part of the symmetry that the method may
use."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

import regauge as rg
from regauge.alignment import Method
from regauge.connect import Path, Repaired, Straight
from regauge.core.groups import Group
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge_papers.tempered import TemperedJudge

Restrict = Callable[[Symmetry], Symmetry]
"""A function that returns a part of a symmetry."""


def whole(symmetry: Symmetry) -> Symmetry:
    """Return the whole symmetry."""
    return symmetry


def without_shifts(symmetry: Symmetry) -> Symmetry:
    """Return the subgroup of permutations, signs and scales, which ignores the half periods of sine networks."""
    return replace(symmetry, groups=tuple(_without_shifts(group) for group in symmetry.groups))


def without_matrices(symmetry: Symmetry) -> Symmetry:
    """Return the subgroup that only reorders, flips and rescales units: matrices with one entry in every row.

    For rotations that do not change the vector of ones, the returned subgroup consists of the permutations.
    """
    return replace(symmetry, groups=tuple(_without_matrix(group) for group in symmetry.groups))


def permutations_only(symmetry: Symmetry) -> Symmetry:
    """Return the subgroup of permutations, also for groups that act by matrices."""
    return replace(symmetry, groups=tuple(_permutations(group) for group in symmetry.groups))


PUBLISHED_WEIGHTS = rg.WeightMatching(start="identity", scales="keep")
"""Weight matching as in Git Re-Basin, section 3.2, except that groups are visited in a fixed order."""
PUBLISHED_ACTIVATIONS = rg.ActivationMatching(statistic="product", scales="keep")
"""Activation matching as in Git Re-Basin, section 3.1, with products of activations that are not centered."""


TEMPERED = "Naive, temperature fitted"
TEMPERED_NOTE = (
    f"{TEMPERED}: not aligned, but the outputs of each network of the line, its ends too, are divided by the number "
    "that makes the loss on training examples least"
)


@dataclass(frozen=True)
class Way:
    """A row of a table: a way to align the second network of a pair. Results are stored by label and method."""

    label: str
    method: Method | None = None  # None leaves the network as it is
    restrict: Restrict = field(default=whole, repr=False)  # to the part that is used
    is_repaired: bool = False  # whether the networks between the ends are repaired
    is_tempered: bool = False  # whether each network of the line has a softmax temperature fitted to training examples

    def align(
        self, a: Params, b: Params, symmetry: Symmetry, task: rg.Task, generator: torch.Generator
    ) -> tuple[Params, float]:
        """Align the second network if there is a method. Return the network and the CPU seconds."""
        began = time.thread_time()
        if self.method is not None:
            symmetry = self.restrict(symmetry)
            b = rg.align(a, b, symmetry, method=self.method, task=task, generator=generator).params
        return b, time.thread_time() - began

    def judge(self, judge: rg.Task, fitting: rg.Task) -> rg.Task | TemperedJudge:
        """Return the judge of the networks of a line. If the judge uses temperatures, they are fitted to the task
        `fitting`.
        """
        return TemperedJudge(judge, fitting) if self.is_tempered else judge

    def path(self, module: nn.Module, batches: Sequence[Tensor]) -> Path:
        """Return the line to the second network. Networks on the line are repaired with statistics of the inputs if
        requested.
        """
        return Repaired(module, batches) if self.is_repaired else Straight()


def _without_shifts(group: Group) -> Group:
    places = tuple(replace(place, parity=(), shift=()) for place in group.placements)
    return replace(group, shifts=0, placements=places)


def _without_matrix(group: Group) -> Group:
    if group.matrix == "none":
        return group
    if group.is_proper:  # Neither a swap of two axes nor a sign of one is a rotation without reflection.
        return replace(group, matrix="none", is_proper=False, placements=())
    signs, scales = int(not group.keeps_ones), int(group.matrix == "linear")
    places = tuple(
        replace(place, is_inverse=False, sign=(1,) * signs, scale=(-1 if place.is_inverse else 1,) * scales)
        for place in group.placements
    )
    return replace(
        group, is_permuted=True, signs=signs, scales=scales, matrix="none", keeps_ones=False, placements=places
    )


def _permutations(group: Group) -> Group:
    group = _without_matrix(group)
    places = tuple(replace(place, scale=(), sign=(), parity=(), shift=()) for place in group.placements)
    return replace(group, scales=0, signs=0, shifts=0, placements=places)
