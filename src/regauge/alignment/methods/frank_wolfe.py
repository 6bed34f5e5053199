"""Frank-Wolfe: all groups of all networks at once, over relaxed elements."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from regauge.alignment.engine.climbs import Climbs
from regauge.alignment.engine.frames import Scales
from regauge.alignment.many import best_universe
from regauge.alignment.method import ManyMethod
from regauge.alignment.methods.merge_many import MergeMany, improve
from regauge.alignment.methods.weight_matching import random_isometry
from regauge.alignment.mixtures import RelaxedUniverse, Vertex, highest
from regauge.alignment.problem import ManyProblem
from regauge.alignment.result import ManyResult
from regauge.core.element import Element
from regauge.core.families import Tensors, families
from regauge.core.symmetry import Symmetry


@dataclass(frozen=True)
class FrankWolfe(ManyMethod):
    """The Frank-Wolfe method over relaxed elements of all groups at once, for two networks or many.

    It maximizes the objective of `WeightMatching`, for many networks summed over all pairs (`universe_objective`).
    Elements are relaxed to convex combinations of elements, such as doubly stochastic matrices for permutations. Signed
    permutations, rotations and nested groups are relaxed in the same way. Each step goes from the current point towards
    the hard elements that maximize the gradient, which takes one exact `closest` for each group and network. The step
    size maximizes the objective, which is a polynomial in the step size with exactly computed coefficients. In the end
    the groups are made hard one after the other. This never lowers the objective if it is linear in each group. The
    elements then climb further by coordinate ascent (`MergeMany`'s rounds) until no group of any network can be
    improved.

    All groups move a little in each step, which avoids some local optima of coordinate ascent. Planted permutations of
    a residual MLP (stream of 64, six blocks, noise as large as the weights, three inputs and outputs as its only
    anchors) are found in 20 of 20 trials. `WeightMatching` finds them as often from the barycenter, its default start,
    and never from the identity. Frank-Wolfe takes about three to eight times as long.

    Departures from the paper: the line search is exact. Relaxed elements start at the barycenter. The first network
    stays as it is, because a common element may move the whole universe. The result is improved by coordinate ascent.
    Positive scales are treated as in `WeightMatching`. A group may be repeated within two other groups, neither of
    which is within the other. All three groups then take part only in the last climb.

    Attributes:
        start: Begin at the "barycenter", or at the "identity" as published. Whatever the start, the identity is
            tried when the result would be worse than it.
        restarts: Further climbs from points halfway between the start and random elements. The one with the
            largest objective is kept or, given a task, the one whose mean network has the smallest loss.
        max_steps: Largest number of steps in each climb.
        tolerance: A step must gain more than this share of the sum of `|a| |b|` over pairs.
        scales: "balance", "recompute" or "keep", as in `WeightMatching`.

    References:
        Crisostomi et al. (2024), C2M3: Cycle-consistent multi-model merging, sections 3.1 and 3.2.
    """

    start: Literal["barycenter", "identity"] = "barycenter"
    restarts: int = 0
    max_steps: int = 200
    tolerance: float = 1e-6
    scales: Scales = "balance"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.restarts < 0 or self.max_steps < 1 or self.tolerance < 0:
            raise ValueError(
                f"restarts={self.restarts}, max_steps={self.max_steps}, tolerance={self.tolerance}: restarts and "
                "tolerance must not be negative, and at least one step is needed"
            )

    def match_many(self, problem: ManyProblem) -> ManyResult:
        """See `align_many`; the task chooses between restarts."""
        symmetry = problem.symmetry

        def climbs(tensors: Sequence[Tensors]) -> list[Climbs]:
            ends = [self._climb(tensors, symmetry, None)]
            for _ in range(self.restarts):
                chance = problem.require_generator(f"restarts={self.restarts} begin at random elements")
                ends.append(self._climb(tensors, symmetry, chance))
            return ends

        def from_identity(tensors: Sequence[Tensors]) -> Climbs:
            return improve(tensors, symmetry, [symmetry.identity()] * len(tensors), MergeMany(), range(len(tensors)))

        return best_universe(problem, self.scales, climbs, from_identity)

    def _climb(self, tensors: Sequence[Tensors], symmetry: Symmetry, chance: torch.Generator | None) -> Climbs:
        sites = {name: symmetry.sites[name] for name in tensors[0]}
        free = [family for family in families(symmetry.groups, sites) if not family.fixed]
        universe = RelaxedUniverse(tensors, free)
        if self.start == "barycenter":
            universe.start_from_barycenter()
        if chance is not None:
            drawn = [random_isometry(symmetry, chance) for _ in tensors]
            universe.step([dict.fromkeys(m.families, g) for m, g in zip(universe.mixtures, drawn, strict=True)], 0.5)
        path: list[float] = []
        is_converged = False
        while len(path) <= self.max_steps:
            vertices = universe.vertices()
            line = universe.line(vertices)
            if not path:
                path.append(float(line[0]))
            size, value = highest(line)
            if value - path[-1] <= self.tolerance * universe.scale:
                is_converged = True
                break
            universe.step(vertices, size)
            path.append(value)
        elements = [_join(symmetry, vertex) for vertex in universe.settle()]
        end = improve(tensors, symmetry, elements, MergeMany(), range(len(tensors)))
        # Hard elements may fall below relaxed ones where a group acts along two axes of one tensor, and by rounding
        # elsewhere; the part of the path that is above them is no part of the history.
        below = torch.tensor([value for value in path if value < float(end.history[0])], dtype=torch.float64)
        history = torch.cat([below.unsqueeze(1), end.history])
        return replace(end, history=history, is_converged=end.is_converged & is_converged)


def _join(symmetry: Symmetry, vertex: Vertex) -> Element:
    """Return the elements of all families as one."""
    values = {name: value for element in vertex.values() for name, value in element.items()}
    return Element(values).fill(symmetry.identity())
