"""Continuous descent: rotations, invertible matrices and scales by gradients of the loss between the networks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from regauge.alignment.method import Candidates, Method, Start, match_each, start_of
from regauge.alignment.methods.activation_matching import MixedMatching
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.element import Element
from regauge.core.groups import Group
from regauge.core.interpolation import interpolate
from regauge.core.params import Params
from regauge.core.rotations import keeping_ones
from regauge.core.symmetry import Symmetry
from regauge.core.task import Batch
from regauge.training import Adam, Cosine, PlainProgram, descend, differentiate
from regauge.training.descent import check_steps, cycle

CHANGE = 1e-3
"""The descent has converged when the loss changed by less than this share between the last two checks."""


@dataclass(frozen=True)
class ContinuousDescent(Method):
    """Gradient descent on the continuous part of the symmetry, on the task loss between the two networks.

    The second network, moved by the initial element g, is moved further by `h = exp(X)`: for every orthogonal
    group X is a skew-symmetric matrix, for every linear group any matrix, and for every family of positive scales
    the logarithms of its factors. Adam changes X, from zero on, such that the task loss of `(1 - t) a + t h g b` falls,
    on one batch after the other.

    Orders, signs and half periods stay where the initial element puts them: give a method that chooses these as
    `init`, and this method as `init` of `Sinkhorn` or `StraightThrough` for another turn. A few times h is judged by
    the midpoint loss over all batches; the best element is returned, the initial one and the identity included. What
    is maximized is that loss with its sign turned. Every batch costs as much as its size, every judgement a pass over
    all batches.

    Where weights are rotated freely, as in the residual stream of a transformer whose gains are folded, closest
    parameters are not the best ones halfway; this is what brings the path close to flat there.

    Attributes:
        loss: "midpoint", where t is one half; or "random", where it is uniform in (0, 1) at every step, which needs a
            generator.
        init: An element, or a method whose result is the start; None is the identity.
        steps: The number of steps of Adam.
        lr: Its learning rate at the start, in radians for rotations; it falls to zero along half a cosine.
        checks: The number of times that h is judged, evenly spaced; the last one is at the end.

    References:
        Theus et al. (2025), Generalized linear mode connectivity for transformers, who learn elements on the task loss.
    """

    loss: Literal["midpoint", "random"] = "midpoint"
    init: Start = field(default_factory=MixedMatching)
    steps: int = 100
    lr: float = 0.01
    checks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (1 <= self.checks <= self.steps and self.lr > 0):
            raise ValueError(
                f"steps={self.steps}, checks={self.checks}, lr={self.lr}: there must be as many steps as checks and at "
                "least one of both, and lr must be positive"
            )

    def match(self, problem: Problem) -> Results:
        """See `align`."""
        return match_each(problem, self._match_pair)

    def _match_pair(self, problem: Problem) -> Results:
        task, symmetry, chance = problem.require_task(self), problem.symmetry, None
        if self.loss == "random":
            chance = problem.require_generator("loss='random' takes the loss at random points of the line")
        params_a, params_b = problem.pair(0)
        start, notes = start_of(self.init, problem)
        candidates = Candidates(problem, start, notes=notes)
        continuous = (group for group in symmetry.groups if group.matrix != "none" or group.scales)
        freedom = {group.name: _generators(group, symmetry) for group in continuous}
        if not freedom:
            return candidates.result(is_converged=True)
        at_start, last = symmetry.act(start.item(0), params_b), float(candidates.objective)

        def loss(freedom: Params, batch: Batch) -> Tensor:
            moved = symmetry.act(_exponential(symmetry, freedom), at_start)
            # Operators do not differentiate with respect to running statistics.
            there = {name: y.detach() if name in symmetry.buffers else y for name, y in moved.items()}
            t = 0.5 if chance is None else float(torch.rand((), generator=chance, device=chance.device))
            return task.loss(interpolate(params_a, there, t), batch)

        program = PlainProgram(differentiate(loss), freedom, Adam(self.lr))
        checked, is_converged = check_steps(self.steps, self.checks), False
        for state in descend(program, cycle(task), steps=self.steps, schedule=Cosine()):
            if state.step in checked:
                element = symmetry.compose(_exponential(symmetry, program.params()), start)
                reached = float(candidates.offer(element))
                is_converged, last = abs(reached - last) <= CHANGE * abs(last), reached
        return candidates.result(is_converged)


def _generators(group: Group, symmetry: Symmetry) -> Tensor:
    """Coordinates of a group's Lie algebra, all zero: matrices, or logarithms of scales."""
    blocks = tuple(symmetry[base].size for base in group.within)
    n = group.size - group.keeps_ones
    shape = (*blocks, n, n) if group.matrix != "none" else (*blocks, group.scales, n)
    return torch.zeros(shape, dtype=torch.float64)


def _exponential(symmetry: Symmetry, freedom: Mapping[str, Tensor]) -> Element:
    """`exp(X)`: rotations, invertible matrices and positive factors; nothing else moves."""
    element = symmetry.identity()
    for name, x in freedom.items():
        group, value = symmetry[name], element[name]
        if group.matrix == "none":
            value = replace(value, scale=x.exp())
        else:
            matrix = torch.linalg.matrix_exp(x - x.mT if group.matrix == "orthogonal" else x)
            value = replace(value, matrix=keeping_ones(matrix) if group.keeps_ones else matrix)
        element = element.replace(name, value)
    return element
