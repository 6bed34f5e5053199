"""Weight matching, which finds the element that brings the parameters of one network closest to another network's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from regauge.alignment.engine.climbs import Climbs, Fallback, climb, ladder, portions, side_by_side
from regauge.alignment.engine.frames import Frame, Scales, are_isometric, match_frames
from regauge.alignment.engine.paired_networks import norms
from regauge.alignment.engine.refit import refit_near_copies
from regauge.alignment.method import Method
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results, join
from regauge.core.element import Element, concatenate, materialize
from regauge.core.families import Tensors
from regauge.core.groups import class_labels
from regauge.core.symmetry import Symmetry

TRIES = 32
"""The largest number of further ascents if the second network may be an unrecognized copy of the first network."""
MISSED = 1e-4
"""The objective of a copy may be below the largest possible value by at most this fraction.

Rounding to 16 bits causes a smaller difference.
"""


@dataclass(frozen=True)
class WeightMatching(Method):
    """Coordinate ascent on the inner product of the parameters, over every group of the symmetry.

    The method maximizes `<a, g b>` over permutations, signs, half-period shifts and rotations. Equivalently, it
    minimizes `|a - g b|`. Each step finds the exact optimum of one group and of the groups nested in it, while all
    other groups are fixed. The result is a local optimum. The optimum is global if the symmetry has only one group.

    Positive scales and invertible matrices are not optimized. If a symmetry has scales or matrices, both networks are
    first balanced: a and b are the networks of smallest norm on their orbits (`regauge.core.balance`). After balancing,
    only a rotation remains to be chosen for each invertible matrix. The second network gets the scales and matrices of
    the first network. The matched element therefore does not depend on the scales of the given networks. Scales are
    balanced because scales that minimize the distance would shrink the weights of units that agree little. Scales that
    minimize the distance would also depend on the scales of the first network. If the two networks are nearly equal,
    scales and matrices are fitted by least squares, provided that the fit brings the networks closer. The fit helps
    because balancing determines a unit's scale poorly if a gain is near zero.

    `WeightMatching` departs from the paper in the following ways. Until an element is chosen for a group, costs are
    averaged over all elements of the group (the barycenter). The element of the group whose cost depends least on other
    groups is chosen first. The method recovers planted permutations of residual networks from the barycenter, but not
    from the identity. Rotations come first, computed from tensors that no other group changes
    (`regauge.alignment.engine.first_rotations`). Groups are visited in a fixed order, and only if a neighboring group
    changed. Elements act on buffers, but buffers do not contribute to the objective. Norms and fourth powers of
    parameters show whether the second network can be a copy of the first. If the second network can be a copy, further
    ascents start from random elements until the copy is recognized.

    Attributes:
        start: The start of the ascent: the "barycenter", or the "identity" as published. The identity is returned if it
            is better than the result.
        restarts: The number of further ascents from random elements, which run as one batch. Without a task, the ascent
            with the largest objective is kept. With a task, the ascent with the smallest midpoint loss is kept, among
            ascents whose objective is at least that of the identity. The objective hardly predicts the midpoint loss.
            The reported objective is that of the kept ascent, and never below that of the identity. The task loss only
            selects among ascents.
        init: The initial element of the first ascent, which replaces `start`. The initial element may come from another
            method or from an earlier result. Positive factors of the initial element are ignored, and the nearest
            rotation replaces each invertible matrix. For `align_pairs`, `init` is a single element or one element for
            each pair.
        max_sweeps: The largest number of sweeps over the groups in each ascent.
        tolerance: A step is taken only if it gains more than this fraction of `sum |a| |b|`.
        scales: The treatment of scales and matrices. With "balance", both networks are balanced before they are
            compared. The second network keeps its running statistics, and the scales of filters before batch
            normalization. With the filter scales of the first network, the second network's statistics would no longer
            match its activations. Recomputing the statistics would undo part of the transformation. Only a copy of the
            first network whose statistics were also transformed gets the filter scales of the first network. With
            "recompute", or with a task that recomputes statistics (`prepare`), no copy gets the filter scales of the
            first network. "keep" compares the networks without balancing, leaves all factors at one, and restricts
            invertible matrices to orthogonal matrices.

    References:
        Ainsworth, Hayase and Srinivasa (2023), Git Re-Basin, section 3.2, algorithm 1.
    """

    start: Literal["barycenter", "identity"] = "barycenter"
    restarts: int = 0
    max_sweeps: int = 100
    tolerance: float = 1e-9
    scales: Scales = "balance"
    init: Element | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.restarts < 0 or self.max_sweeps < 1 or self.tolerance < 0:
            raise ValueError(
                f"restarts={self.restarts}, max_sweeps={self.max_sweeps}, tolerance={self.tolerance}: restarts and "
                "tolerance must not be negative, and at least one sweep is needed"
            )

    def match(self, problem: Problem) -> Results:
        """Match the pairs of networks; see `align` and `align_pairs`. If there is a task, the task loss selects among
        restarts.
        """
        symmetry, pairs = problem.symmetry, problem.pairs
        init = None if self.init is None else _isometric(symmetry, self.init, pairs)
        restarts = []
        for _ in range(self.restarts):
            chance = problem.require_generator(f"restarts={self.restarts} begin at random elements")
            restarts.append(random_isometry(symmetry, chance, (pairs,)))

        def match(part: slice) -> Results:
            here = None if init is None else init.rows(part)
            return self._match(problem[part], here, [start.rows(part) for start in restarts])

        parts = list(portions(problem.a, problem.b))
        # A task has one module, which runs one network at a time.
        return join(side_by_side(match, parts) if problem.task is None else [match(part) for part in parts])

    def _match(self, problem: Problem, init: Element | None, restarts: Sequence[Element]) -> Results:
        def match(frame: Frame) -> Results:
            return refit_near_copies(problem, self._match_in(frame, problem, init, restarts), frame)

        return match_frames(problem, self.scales, match)

    def _match_in(self, frame: Frame, problem: Problem, init: Element | None, restarts: Sequence[Element]) -> Results:
        if not frame.a:
            zeros, identity = torch.zeros(1, problem.pairs), problem.symmetry.identity()
            ended = torch.ones(problem.pairs, dtype=torch.bool)
            return problem.result(
                identity, objective=zeros, initial=zeros, history=zeros, starts=zeros, is_converged=ended
            )
        initial, is_from_barycenter = frame.identity_objective(), init is None and self.start == "barycenter"
        climbs = [self._climb(frame, frame.a, frame.b, init, is_from_barycenter=is_from_barycenter)]
        climbs += self._climbs(frame, restarts)
        climbs += self._climb_copies(frame, climbs)

        def from_identity(rows: Tensor, *, is_from_original: bool) -> Climbs:
            part = frame.rows(rows)
            second = part.original() if is_from_original else part.b
            return self._climb(part, part.a, second, None, is_from_original=is_from_original)

        fallbacks = [Fallback(initial, partial(from_identity, is_from_original=True))]
        if frame.sides is not None and (is_from_barycenter or init is not None):
            fallbacks.insert(0, Fallback(frame.objective(frame.b), partial(from_identity, is_from_original=False)))
        losses = None if problem.task is None else (lambda element: problem.line_losses(problem.move(element)))
        best, starts = ladder(climbs, fallbacks, initial, losses)
        return problem.result(
            best.element,
            objective=best.objective,
            initial=initial,
            history=best.history,
            starts=starts,
            is_converged=best.is_converged,
            moved=best.moved,
            notes=frame.notes,
        )

    def _climb_copies(self, frame: Frame, climbs: Sequence[Climbs]) -> list[Climbs]:
        """Run further ascents from random elements, until all pairs of networks that may be copies are equal."""
        most = torch.stack([norms(frame.a[name]) * norms(frame.b[name]) for name in frame.a]).sum(0)
        reached = torch.stack([one.objective for one in climbs]).amax(0)
        rows = ((reached < (1 - MISSED) * most) & climbs[0].is_converged).nonzero().flatten()
        if len(rows):
            few = frame.rows(rows)
            rows = rows[are_isometric(few.symmetry, few.a, few.b)]
        found: list[Climbs] = []
        chance = torch.Generator().manual_seed(0)  # the same for each pair, so no pair depends on others
        while len(rows) and len(found) < TRIES:
            part = frame.rows(rows)
            drawn = part.symmetry.random(chance, ("permutation", "sign", "linear"))
            start = _isometric(part.symmetry, drawn, len(rows))
            found.append(climbs[0].but(rows, self._climb(part, part.a, part.b, start)))
            reached = torch.maximum(reached, found[-1].objective)
            rows = rows[reached[rows] < (1 - MISSED) * most[rows]]
        return found

    def _climbs(self, frame: Frame, starts: Sequence[Element]) -> list[Climbs]:
        """Return one coordinate ascent from each start for each pair of networks.

        For a single pair, all ascents run as one batch.
        """
        if not starts or starts[0].batch[0] > 1:
            return [self._climb(frame, frame.a, frame.b, start) for start in starts]
        count, all_starts, climbs = len(starts), concatenate(starts), []
        a, b = ({n: t.expand(count, *t.shape[1:]) for n, t in tensors.items()} for tensors in (frame.a, frame.b))
        for part in portions(a, b):
            left, right = ({name: t[part] for name, t in tensors.items()} for tensors in (a, b))
            found = self._climb(frame, left, right, all_starts.rows(part))
            climbs += [found.at(torch.tensor([k])) for k in range(len(found.objective))]
        return climbs

    def _climb(
        self,
        frame: Frame,
        a: Tensors,
        b: Tensors,
        start: Element | None,
        *,
        is_from_barycenter: bool = False,
        is_from_original: bool = False,
    ) -> Climbs:
        found = climb(
            frame.symmetry,
            a,
            b,
            start=start,
            is_from_barycenter=is_from_barycenter,
            max_sweeps=self.max_sweeps,
            tolerance=self.tolerance,
        )
        return frame.lead_back(found, is_from_original=is_from_original)


def random_isometry(symmetry: Symmetry, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Element:
    """Return a random element that keeps every norm: no scales, no shifts, and only orthogonal matrices."""
    element, blank = symmetry.random(generator, ("permutation", "sign", "linear"), batch), symmetry.identity(batch)
    for group in symmetry.groups:
        if group.matrix == "linear":
            element = element.replace(group.name, blank[group.name])
    return element


def _isometric(symmetry: Symmetry, init: Element, pairs: int) -> Element:
    """Return an element with scales of one, and with matrices replaced by their nearest rotations."""
    init = materialize(init, symmetry.groups)
    if init.batch not in ((), (pairs,)):
        raise ValueError(
            f"init is a batch of elements of shape {init.batch}; give a single one (`init.item(0)`)"
            + (f" for {pairs} pairs, or one for each" if pairs > 1 else "")
        )
    values = {}
    for name, blank in symmetry.identity(init.batch).items():
        if name not in init:
            raise ValueError(
                f"init has no value for group {name!r}; it belongs to another symmetry (its groups are "
                f"{list(init)[:5]}); give an element of this symmetry"
            )
        given, needed = ({part: t.shape for part, t in v.items() if part != "scale"} for v in (init[name], blank))
        if given != needed:
            raise ValueError(
                f"init does not fit group {name!r} of {symmetry[name].size} units; give an element of this symmetry"
            )
        order, labels = init[name].perm, class_labels(symmetry[name])
        if order is not None and not torch.equal(labels[order], labels.expand_as(order)):
            raise ValueError(
                f"init exchanges units of group {name!r} that differ in a structure tensor (see `symmetry.structure`); "
                "give an element of `symmetry.bind(params_a)`"
            )
        values[name] = replace(init[name], scale=blank.scale)
        if symmetry[name].matrix == "linear":
            u, _, vh = torch.linalg.svd(init[name].matrix)
            values[name] = replace(values[name], matrix=u @ vh)
    element = Element(values, init.batch)
    return element if element.batch else element.expand(pairs)
