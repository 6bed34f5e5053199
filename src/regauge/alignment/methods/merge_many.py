"""Many networks into one universe by coordinate ascent: each is matched to the mean of the others."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from regauge.alignment.engine.climbs import Climbs
from regauge.alignment.engine.pursuit import Pursuit
from regauge.alignment.many import best_universe, move, one_climb, universe_objective
from regauge.alignment.method import ManyMethod
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import ManyProblem, Problem, batch_of_one
from regauge.alignment.result import ManyResult
from regauge.core.element import Element
from regauge.core.families import Tensors
from regauge.core.symmetry import Symmetry


@dataclass(frozen=True)
class MergeMany(ManyMethod):
    """Match each network to the mean of the others, until no network moves any more.

    It maximizes the sum over pairs of the inner products of the moved networks (`universe_objective`); a step
    of one network gains K - 1 times what its inner product with the mean of the others gains, so the objective
    never falls. The result is a local optimum: no single group of a single network can be improved.

    Departures from the paper: networks are placed one after the other at first, each matched to the mean of
    those that are placed already (the mean of networks that are not aligned knows little); they are then
    visited in a fixed order, and a network is looked at again only where others moved.

    Attributes:
        inner: How a network is placed; its `max_sweeps` and `tolerance` hold for the later rounds too, its
            `scales` for all of it.
        start: Place the networks in "sequence", or begin at the "identity" as published. Whatever the start, the
            identity is tried when the result would be worse than it.
        restarts: Further climbs with the networks in random order. The one with the largest objective is kept
            or, given a task, the one whose mean network has the smallest loss.
        max_rounds: Most rounds over the networks in each climb.

    References:
        Ainsworth, Hayase and Srinivasa (2023), Git Re-Basin, appendix A.10, algorithm 2 (MergeMany).
    """

    inner: WeightMatching = field(default_factory=WeightMatching)
    start: Literal["sequence", "identity"] = "sequence"
    restarts: int = 0
    max_rounds: int = 100

    def __post_init__(self) -> None:
        if self.start not in ("sequence", "identity"):
            raise ValueError(f"start is {self.start!r}; choose 'sequence' or 'identity'")
        if self.restarts < 0 or self.max_rounds < 1:
            raise ValueError(
                f"restarts={self.restarts}, max_rounds={self.max_rounds}: restarts must not be negative, and at least "
                "one round is needed"
            )
        if self.inner.init is not None:
            raise ValueError("inner.init is an element for one pair of networks; leave it out to align many")

    def match_many(self, problem: ManyProblem) -> ManyResult:
        """See `align_many`; the task chooses between restarts."""
        symmetry, count = problem.symmetry, len(problem.networks)

        def climbs(tensors: Sequence[Tensors]) -> list[Climbs]:
            orders = [list(range(count))]
            for _ in range(self.restarts):
                chance = problem.require_generator(f"restarts={self.restarts} visit the networks in random order")
                orders.append(torch.randperm(count, generator=chance, device=chance.device).tolist())
            return [self._climb(problem, tensors, order) for order in orders]

        def from_identity(tensors: Sequence[Tensors]) -> Climbs:
            return improve(tensors, symmetry, [symmetry.identity()] * count, self, range(count))

        return best_universe(problem, self.inner.scales, climbs, from_identity)

    def _climb(self, problem: ManyProblem, tensors: Sequence[Tensors], order: Sequence[int]) -> Climbs:
        symmetry, inner = problem.symmetry, replace(self.inner, scales="keep")
        elements = [symmetry.identity()] * len(tensors)
        if self.start == "sequence":
            total = dict(tensors[order[0]])
            for count, k in enumerate(order[1:], start=1):
                mean = {name: tensor / count for name, tensor in total.items()}
                there, here = (batch_of_one({**problem.networks[k], **own}) for own in (mean, tensors[k]))
                found = inner.match(Problem(there, here, symmetry, None, problem.generator))
                elements[k] = found.element.item(0)
                total = {name: tensor + found.params[name][0] for name, tensor in total.items()}
        return improve(tensors, symmetry, elements, self, order)


def improve(
    tensors: Sequence[Tensors],
    symmetry: Symmetry,
    elements: Sequence[Element],
    settings: MergeMany,
    order: Sequence[int],
) -> Climbs:
    """Rounds in which each network climbs towards the mean of the others, from given elements on.

    Every network keeps its pursuit, so that a later visit looks only at what others moved, starting from the
    potentials of the visit before.
    """
    others, inner = len(tensors) - 1, settings.inner
    placed = [move(symmetry, element, network) for element, network in zip(elements, tensors, strict=True)]
    total = {name: torch.stack([p[name] for p in placed]).sum(0) for name in placed[0]}
    pursuits: dict[int, Pursuit] = {}
    moved_at, seen_at = dict.fromkeys(total, 0), dict.fromkeys(order, -1)
    gained, clock, is_moving = [0.0], 0, True
    while is_moving and len(gained) <= settings.max_rounds:
        gained.append(gained[-1])
        for k in order:
            clock += 1
            now = pursuits[k].second if k in pursuits else placed[k]
            aims = {n: (total[n] - now[n]) / others for n, when in moved_at.items() if when > seen_at[k]}
            if k in pursuits:
                pursuits[k].aim_at(aims)
            else:
                pursuits[k] = Pursuit(symmetry, aims, tensors[k], elements[k], inner.tolerance)
            gain = pursuits[k].climb(inner.max_sweeps)
            gained[-1] += others * gain
            seen_at[k] = clock
            if gain:
                first, second = pursuits[k].first, pursuits[k].second
                for name in pursuits[k].changed:
                    total[name] = others * first[name] + second[name]
                    moved_at[name] = clock
        is_moving = gained[-1] > gained[-2]
    reached = universe_objective([pursuits[k].second for k in range(len(tensors))], tensors, symmetry)
    return one_climb(
        [pursuits[k].element for k in range(len(tensors))],
        [reached - (gained[-1] - gain) for gain in gained],
        is_converged=not is_moving,
    )
