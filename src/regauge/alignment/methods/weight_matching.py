"""Weight matching: the element that brings the parameters of one network closest to another's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from regauge.alignment.engine.ascent import Ascent
from regauge.alignment.engine.balanced import Balanced, Scales, balanced, require_scales
from regauge.alignment.engine.pair_climbs import PairClimbs, climb_pairs, portions
from regauge.alignment.method import Method
from regauge.alignment.methods.weight_matching_pairs import match_in_portions
from regauge.alignment.problem import Problem, batch_of_one
from regauge.alignment.result import Results
from regauge.core.deferred import materialize
from regauge.core.element import Element, stack
from regauge.core.families import Tensors, compared, dot
from regauge.core.symmetry import Symmetry


@dataclass(frozen=True)
class WeightMatching(Method):
    """Coordinate ascent on the inner product of the parameters, over every group of the symmetry.

    It maximizes `<a, g b>`, which is to minimize `|a - g b|`, over reorderings, signs, half-period shifts and
    rotations; an invertible matrix is chosen among the orthogonal ones. Each step is the exact optimum of one
    group and what is nested in it, given all others. The result is a local optimum; it is global where one group
    is all there is.

    Positive scales are no part of that search. Where a symmetry has them, both networks are first brought to the
    points of smallest norm on their orbits (`regauge.core.scales.balance`), a and b are these points, and the
    second network takes over the scales of the first. So the outcome does not depend on how either network
    happens to be scaled. Choosing the scales that minimize the distance instead, jointly with the permutation,
    makes weights smaller wherever two units agree little, and depends on the scales of the first network.

    Departures from the paper: the first costs use the barycentre of what is not known yet, best anchored group
    first (planted permutations of residual networks are then recovered, which fails from the identity); groups
    are visited in a fixed order and only when a neighbor moved; buffers move but do not count.

    Attributes:
        start: Begin at the "barycentre", or at the "identity" as published. Whatever the start, the identity
            is tried when the result would be worse than it.
        restarts: Further climbs from random elements, run as one batch. Of all climbs the one with the largest
            objective is kept or, given a task, the one with the smallest task loss halfway between the networks
            among those that end at or above the identity: the objective says next to nothing about that loss.
            The objective that is reported is that of the kept climb, so it is never below the identity's; the
            loss is compared between climbs only.
        init: Where the first climb begins instead of at `start`: an element from another method or an earlier
            result. What matching does not choose is left out of it: positive factors, and of an invertible
            matrix all but its nearest rotation. For `align_pairs` a single element or one for each pair.
        max_sweeps: Most sweeps over the groups in each climb.
        tolerance: A step must gain more than this share of `sum |a| |b|`.
        scales: "balance" as described; "keep" compares the networks as they are and leaves all factors at one.

    References:
        Ainsworth, Hayase and Srinivasa (2023), Git Re-Basin, section 3.2, algorithm 1.
    """

    start: Literal["barycentre", "identity"] = "barycentre"
    restarts: int = 0
    max_sweeps: int = 100
    tolerance: float = 1e-9
    scales: Scales = "balance"
    init: Element | None = None

    def __post_init__(self) -> None:
        require_scales(self.scales)
        if self.start not in ("barycentre", "identity"):
            raise ValueError(f"start is {self.start!r}; choose 'barycentre' or 'identity'")
        if self.restarts < 0 or self.max_sweeps < 1 or self.tolerance < 0:
            raise ValueError(
                f"restarts={self.restarts}, max_sweeps={self.max_sweeps}, tolerance={self.tolerance}: restarts and "
                "tolerance must not be negative, and at least one sweep is needed"
            )

    def match(self, problem: Problem) -> Results:
        """See `align` and `align_pairs`; the task chooses between restarts."""
        if problem.pairs == 1:
            return self._match_pair(problem)
        symmetry, pairs = problem.symmetry, problem.pairs
        starts = [None if self.init is None else _expanded(_isometric(symmetry, self.init), pairs)]
        starts += [random_isometry(symmetry, self._chance(problem), (pairs,)) for _ in range(self.restarts)]
        climb = partial(self._climb_pairs, symmetry)
        return match_in_portions(problem, climb, starts, is_balanced=self._is_balanced(symmetry))

    def _match_pair(self, problem: Problem) -> Results:
        symmetry, task = problem.symmetry, problem.task
        params_a, params_b = problem.pair(0)
        a, b = compared([params_a, params_b], symmetry)
        if self._is_balanced(symmetry):
            climbs, initial = self._balanced_climbs(problem, balanced(params_a, params_b, a, b, symmetry))
        else:
            climbs, initial = self._climbs(problem, a, b)
        best = max(climbs, key=lambda climb: climb.objective)
        if task is not None and len(climbs) > 1:
            candidates = [climb for climb in climbs if climb.objective >= initial]
            best = min(candidates, key=lambda c: task.midpoint_loss(params_a, symmetry.act(c.element, params_b)))
        return problem.result(
            best.element,
            objective=best.objective,
            initial=initial,
            history=best.history,
            starts=[climb.objective for climb in climbs],
            is_converged=best.is_converged,
            moved=batch_of_one(best.moved),
        )

    def _is_balanced(self, symmetry: Symmetry) -> bool:
        return self.scales == "balance" and any(group.scales for group in symmetry.groups)

    def _chance(self, problem: Problem) -> torch.Generator:
        return problem.require_generator(f"restarts={self.restarts} begin at random elements")

    def _climbs(self, problem: Problem, a: Tensors, b: Tensors) -> tuple[list["_Climb"], float]:
        """One climb, the restarts, and one from the identity where the first one ends below it; what that is worth."""
        symmetry = problem.symmetry
        init = None if self.init is None else _isometric(symmetry, self.init)
        if init is not None and init.batch not in ((), (1,)):
            raise ValueError(
                f"init is a batch of elements of shape {init.batch}; give a single one (`init.item(0)`), or align many "
                "pairs at once with `regauge.align_pairs`"
            )
        init = init.item(0) if init is not None and init.batch else init
        climbs = [self._climb(symmetry, a, b, self.start if init is None else "identity", init)]
        starts = [random_isometry(symmetry, self._chance(problem)) for _ in range(self.restarts if a else 0)]
        if starts:
            many = [{name: t.expand(len(starts), *t.shape) for name, t in tensors.items()} for tensors in (a, b)]
            for part in portions(*many):
                left, right = ({name: t[part] for name, t in tensors.items()} for tensors in many)
                found = self._climb_pairs(symmetry, left, right, stack(starts[part]))
                climbs += [_one(found, k) for k in range(len(found.objective))]
        worth = climbs[0].initial if init is None else sum(dot(a[name], b[name]) for name in a)
        if (self.start != "identity" or init is not None) and climbs[0].objective < worth:
            climbs.append(self._climb(symmetry, a, b, "identity", None))
        return climbs, worth

    def _balanced_climbs(self, problem: Problem, frame: Balanced) -> tuple[list["_Climb"], float]:
        """Climbs between balanced networks, as elements of the networks as they are; what the identity is worth."""
        symmetry = problem.symmetry

        def undone(climb: _Climb, scales: Element) -> _Climb:
            element = symmetry.compose(frame.back, symmetry.compose(climb.element, scales))
            return replace(climb, element=element, moved={})

        climbs = [undone(c, frame.scales) for c in self._climbs(problem, frame.a, frame.b)[0]]
        initial = float(frame.identity_objective(symmetry))
        if max(c.objective for c in climbs) < initial:
            climb = undone(self._climb(symmetry, frame.a, frame.original, "identity", None), frame.original_scales)
            offset = initial - climb.history[0]
            history = tuple(value + offset for value in climb.history)
            climbs.append(replace(climb, objective=climb.objective + offset, history=history))
        return climbs, initial

    def _climb(
        self,
        symmetry: Symmetry,
        a: Tensors,
        b: Tensors,
        start: str,
        element: Element | None,
    ) -> "_Climb":
        ascent = Ascent(symmetry, a, b, start=element, tolerance=self.tolerance)
        if start == "barycentre":
            ascent.start_from_barycentre()
        gained, is_moving = [0.0], True
        while is_moving and len(gained) <= self.max_sweeps:
            is_moving = ascent.sweep()
            gained.append(ascent.gained)
        reached = ascent.exact_objective()
        history = tuple(reached - (ascent.gained - gain) for gain in gained)
        return _Climb(ascent.initial, ascent.element, reached, history, not is_moving, ascent.moved())

    def _climb_pairs(self, symmetry: Symmetry, a: Tensors, b: Tensors, element: Element | None) -> PairClimbs:
        return climb_pairs(
            symmetry,
            a,
            b,
            start=element,
            is_from_barycentre=element is None and self.start == "barycentre",
            max_sweeps=self.max_sweeps,
            tolerance=self.tolerance,
        )


@dataclass(frozen=True)
class _Climb:
    initial: float
    element: Element
    objective: float
    history: tuple[float, ...]
    is_converged: bool
    moved: Mapping[str, Tensor]


def _one(found: PairClimbs, k: int) -> _Climb:
    history = tuple(found.history[: int(found.sweeps[k]) + 1, k].tolist())
    moved = {name: tensor[k] for name, tensor in found.moved.items()}
    start = float(found.history[0, k])
    return _Climb(start, found.element.item(k), float(found.objective[k]), history, bool(found.is_converged[k]), moved)


def random_isometry(symmetry: Symmetry, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Element:
    """A random element that keeps every norm: no scales, no shifts, no invertible matrices that stretch."""
    element, blank = symmetry.random(generator, ("permutation", "sign", "linear"), batch), symmetry.identity(batch)
    for group in symmetry.groups:
        if group.matrix == "linear":
            element = element.replace(group.name, blank[group.name])
    return element


def _isometric(symmetry: Symmetry, element: Element) -> Element:
    """What matching can choose of an element: without positive factors, matrices as their nearest rotations."""
    element = materialize(element, symmetry.groups)
    result = symmetry.identity(element.batch)
    for group in symmetry.groups:
        if group.name not in element:
            raise ValueError(
                f"init has no value for group {group.name!r}; it belongs to another symmetry (its groups are "
                f"{list(element)[:5]}); give an element of the symmetry that is aligned under"
            )
        value, blank = element[group.name], result[group.name]
        for part in ("perm", "sign", "shift", "matrix"):
            known, needed = getattr(value, part), getattr(blank, part)
            if (known is None) != (needed is None) or (known is not None and known.shape != needed.shape):
                raise ValueError(
                    f"init does not fit group {group.name!r} of {group.size} units; give an element of the symmetry "
                    "that is aligned under"
                )
        matrix = value.matrix
        if matrix is not None and group.matrix == "linear":
            u, _, vh = torch.linalg.svd(matrix)
            matrix = u @ vh
        result = result.replace(group.name, replace(value, scale=blank.scale, matrix=matrix))
    return result


def _expanded(element: Element, pairs: int) -> Element:
    if element.batch not in ((), (pairs,)):
        raise ValueError(
            f"init is a batch of elements of shape {element.batch} for {pairs} pairs; give one for each pair, or a "
            "single one for all"
        )
    return element if element.batch else element.expand(pairs)
