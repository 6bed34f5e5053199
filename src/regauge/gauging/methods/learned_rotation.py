"""LearnedRotation: descent over the rotations of all groups for small rounding errors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from regauge.core.element import Element, Value
from regauge.core.groups import Group
from regauge.core.params import Params
from regauge.core.rotations import zero_sum_basis
from regauge.core.symmetry import Symmetry
from regauge.gauging.method import GaugeMethod, GaugeProblem, fixed_reasons
from regauge.gauging.methods.rotation_losses import OfOutputs, OfWeights, RotationLoss, rotated
from regauge.gauging.methods.rotations import Hadamard
from regauge.gauging.moves import Move
from regauge.gauging.result import Chosen
from regauge.gauging.rounding import FOUR_BITS, RoundToNearest

EVERY = 10
"""Steps after which the rotations so far are tried with true rounding."""


@dataclass(frozen=True)
class LearnedRotation(GaugeMethod):
    """Rotations of every orthogonal and linear group, found by descent.

    It begins at the identity or where Hadamard matrices lead, whichever is better. Rotations are `C(A) R_0` with
    Cayley's map `C(A) = (1 - A)^-1 (1 + A)` of a skew matrix A for each copy of a group. What descends is a smooth
    stand-in for rounding; the best rotation with true rounding that is met on the way is kept.

    With `by="weights"` no data are used: what descends is the expected rounding error, `sum over scales of range^2`,
    relative to the norm of each layer, and the objective is the ratio of signal to rounding noise of the weights of all
    layers, in dB. With `by="outputs"` a second descent from there follows the outputs of the network on the batches of
    the task, one after the other: their distance from those of the network as it was, with uniform noise as wide as
    the steps of rounding in its place. The distance is the divergence of the softmax in nats where the task has cross
    entropy, else the relative squared error; the objective is that with rounded weights over all batches, with its
    sign turned. Unlike in the paper, gradients do not go straight through the rounding, and targets are not needed.

    Attributes:
        scheme: How weights are rounded.
        steps: Of Adam.
        lr: Its rate at the start; it falls to zero along a line.
        by: Whether the error of weights or that of outputs is made small; the latter needs a task and a generator.

    References:
        Liu et al. (2024), SpinQuant, section 3.2, for descent on rotations by Cayley's map.
    """

    scheme: RoundToNearest = FOUR_BITS
    steps: int = 100
    lr: float = 0.01
    by: Literal["weights", "outputs"] = "weights"

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.lr > 0:
            raise ValueError(f"steps is {self.steps} and lr is {self.lr}, but both must be positive")

    @property
    def needs_task(self) -> bool:  # type: ignore[override]
        """Whether outputs are looked at."""
        return self.by == "outputs"

    def choose(self, problem: GaugeProblem) -> Chosen:
        """The best rotations met on the way."""
        found = problem.uncovered
        symmetry, before = found.symmetry, found.before
        fixed = fixed_reasons(problem.symmetry, found)
        loss = self._loss(problem)
        initial = loss.score(problem.params, problem.symmetry)
        if all(group.matrix == "none" for group in symmetry.groups):
            return Chosen((), initial, initial, (initial,), loss.unit, fixed, ("there is nothing to rotate",))
        start = problem.params if before is None else before(problem.params)

        def score(one: Element) -> float:
            return loss.score({**start, **rotated(start, symmetry, one)}, symmetry)

        best, reached, history = symmetry.identity(), initial, [initial]
        flat = Hadamard(self.scheme).rotate(symmetry, problem.generator)
        ways: list[RotationLoss] = [loss] if self.by == "weights" else [OfWeights(self.scheme), loss]
        starts = [symmetry.identity(), flat]
        for way in ways:
            for element in self._descend(way, start, symmetry, max(starts, key=score)):
                objective = score(element)
                if objective > reached:
                    best, reached = element, objective
                history.append(reached)
            starts.append(best)
        if reached == initial:
            notes = ("the network stays as it is: no rotation on the way makes rounding better",)
            return Chosen((), initial, initial, tuple(history), loss.unit, fixed, notes)
        moves = (*([] if before is None else [before]), Move(symmetry, best))
        return Chosen(moves, reached, initial, tuple(history), loss.unit, fixed)

    def _descend(self, loss: RotationLoss, params: Params, symmetry: Symmetry, element: Element) -> Iterator[Element]:
        """The rotations that descent from an element meets, now and then."""
        groups = [group for group in symmetry.groups if group.matrix != "none"]
        skew = {group.name: _skew_start(group, symmetry).requires_grad_() for group in groups}
        optimizer = torch.optim.Adam(list(skew.values()), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, self.steps)
        for step in range(self.steps + 1):
            if step % EVERY == 0 or step == self.steps:
                yield _turn(element, symmetry, groups, skew)
            with torch.enable_grad():
                optimizer.zero_grad()
                turned = _turn(element, symmetry, groups, skew, is_tracked=True)
                loss.descend(params, symmetry, turned).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()

    def _loss(self, problem: GaugeProblem) -> RotationLoss:
        if self.by == "weights":
            return OfWeights(self.scheme)
        if problem.generator is None:
            raise ValueError("LearnedRotation(by='outputs') draws noise: give a generator, or learn by='weights'")
        assert problem.task is not None
        return OfOutputs(problem.params, self.scheme, problem.task, problem.generator)


def _skew_start(group: Group, symmetry: Symmetry) -> Tensor:
    n = group.size - group.keeps_ones
    lead = tuple(symmetry[base].size for base in group.within)
    return torch.zeros(*lead, n, n, dtype=torch.float64)


def _turn(
    element: Element, symmetry: Symmetry, groups: list[Group], skew: Mapping[str, Tensor], *, is_tracked: bool = False
) -> Element:
    """The element turned on by Cayley's map."""
    values: dict[str, Value] = dict(element.items())
    for group in groups:
        raw = skew[group.name] if is_tracked else skew[group.name].detach()
        a = raw - raw.mT
        one = torch.eye(a.shape[-1], dtype=a.dtype)
        turn = torch.linalg.solve(one - a, one + a)
        if group.keeps_ones:
            basis = zero_sum_basis(group.size)
            turn = basis.mT @ turn @ basis + 1 / group.size
        known = values[group.name].matrix
        assert known is not None
        values[group.name] = replace(values[group.name], matrix=turn @ known)
    return Element(values)
