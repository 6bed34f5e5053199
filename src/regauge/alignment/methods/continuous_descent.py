"""Continuous descent: rotations, invertible matrices and scales by gradients of the loss between the networks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from regauge.alignment.method import PROGRAM, Candidates, Method, Start, chunks, start_of
from regauge.alignment.methods.activation_matching import MixedMatching
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results, join
from regauge.core.element import Element
from regauge.core.groups import Group
from regauge.core.interpolation import interpolate
from regauge.core.params import Params
from regauge.core.rotations import keeping_ones
from regauge.core.scales import kept_scales
from regauge.core.symmetry import Symmetry
from regauge.core.task import Batch
from regauge.training import Adam, Cosine, PlainProgram, descend, differentiate
from regauge.training.descent import check_steps, cycle

CHANGE = 1e-3
"""The descent has converged when the loss changed by less than this share between the last two checks."""


@dataclass(frozen=True)
class ContinuousDescent(Method):
    """Gradient descent on the continuous part of the symmetry, on the task loss between the two networks.

    The second network, moved by the initial element g, is moved further by `h = exp(X)`. X is a skew-symmetric matrix
    for every orthogonal group, and any matrix for every linear group. For the families of positive scales it has the
    logarithms of those factors that leave running statistics as they are. Adam changes X, from zero on, such that the
    task loss of `(1 - t) a + t h g b` falls, on one batch after the other.

    Orders, signs and half periods stay where the initial element puts them: give a method that chooses these as
    `init`, and this method as `init` of `Sinkhorn` or `StraightThrough` for another turn. A few times h is judged by
    the midpoint loss over all batches; the best element is returned, the initial one and the identity included. What
    is maximized is that loss with its sign turned. Every batch costs as much as its size, every judgement a pass over
    all batches.

    Where weights are rotated freely, as in the residual stream of a transformer whose gains are folded, closest
    parameters are not the best ones halfway; this is what brings the path close to flat there. Of networks of ReLU
    units it changes the scales: halfway between units that differ activations shrink, and a factor s on one of the two
    sides of a unit, and 1/s on the other, makes up for it: `(1 + s) (1 + 1/s) / 4 > 1`.

    Attributes:
        loss: "midpoint", where t is one half; or "random", where it is uniform in (0, 1) at every step, which needs a
            generator.
        init: An element, or a method whose result is the start; None is the identity.
        steps: The number of steps of Adam.
        lr: Its learning rate at the start for rotations, in radians, and for matrices; it falls to zero along half a
            cosine.
        scale_lr: The learning rate of the logarithms of scales, which may move much further.
        checks: The number of times that h is judged, evenly spaced; the last one is at the end.

    References:
        Theus et al. (2025), Generalized linear mode connectivity for transformers, who learn elements on the task loss.
    """

    loss: Literal["midpoint", "random"] = "midpoint"
    init: Start = field(default_factory=MixedMatching)
    steps: int = 100
    lr: float = 0.01
    scale_lr: float = 0.05
    checks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (1 <= self.checks <= self.steps and self.lr > 0 and self.scale_lr > 0):
            raise ValueError(
                f"steps={self.steps}, checks={self.checks}, lr={self.lr}, scale_lr={self.scale_lr}: there must be as "
                "many steps as checks and at least one of both, and scale_lr and lr must be positive"
            )

    def match(self, problem: Problem) -> Results:
        """See `align` and `align_pairs`: the losses of many pairs fall in one program."""
        problem.require_task(self)
        if self.loss == "random":
            problem.require_generator("loss='random' takes the loss at random points of the line")
        start, notes = start_of(self.init, problem)
        parts = chunks(problem, PROGRAM)
        return join([self._descend(problem[part], start.rows(part), notes) for part in parts])

    def _descend(self, problem: Problem, start: Element, notes: tuple[str, ...]) -> Results:
        task, symmetry, count = problem.require_task(self), problem.symmetry, problem.pairs
        candidates = Candidates(problem, start, notes=notes)
        generators = {group.name: _generators(group, symmetry, count) for group in symmetry.groups}
        freedom = {name: tensor for name, tensor in generators.items() if tensor.numel()}
        is_converged = torch.ones(count, dtype=torch.bool)
        if not freedom:
            return candidates.result(is_converged)
        at_start, last = symmetry.act(start, problem.b), candidates.objective

        def losses(freedom: Params, batch: Batch) -> Tensor:
            moved = symmetry.act(self._exponential(symmetry, freedom, count), at_start)
            # Operators do not differentiate with respect to running statistics.
            there = {name: y.detach() if name in symmetry.buffers else y for name, y in moved.items()}
            between = interpolate(problem.a, there, self._points(problem))
            if count == 1:
                return task.loss({name: t[0] for name, t in between.items()}, batch).reshape(1)
            return torch.func.vmap(lambda params: task.loss(params, batch))(between)

        program = PlainProgram(differentiate(losses), freedom, Adam(self.lr))
        checked = check_steps(self.steps, self.checks)
        for state in descend(program, cycle(task), steps=self.steps, schedule=Cosine()):
            if state.step in checked:
                element = symmetry.compose(self._exponential(symmetry, program.params(), count), start)
                reached = candidates.offer(element)
                is_converged, last = (reached - last).abs() <= CHANGE * last.abs(), reached
        return candidates.result(is_converged)

    def _points(self, problem: Problem) -> Tensor:
        """The point on the line of each pair at which the loss is taken, `[pair]`."""
        if self.loss == "midpoint" or problem.generator is None:
            return torch.full((problem.pairs,), 0.5)
        return torch.rand(problem.pairs, generator=problem.generator, device=problem.generator.device)

    def _exponential(self, symmetry: Symmetry, freedom: Mapping[str, Tensor], pairs: int) -> Element:
        """`exp(X)` for each pair: rotations, invertible matrices and positive factors; nothing else moves.

        Adam moves all coordinates alike, so that those of scales are in units of their own learning rate.
        """
        element = symmetry.identity((pairs,))
        for name, x in freedom.items():
            group, value = symmetry[name], element[name]
            if group.matrix == "none":
                weights = torch.tensor(kept_scales(symmetry, group), dtype=x.dtype)
                value = replace(value, scale=(self.scale_lr / self.lr * (weights.T @ x)).exp())
            else:
                matrix = torch.linalg.matrix_exp(x - x.mT if group.matrix == "orthogonal" else x)
                value = replace(value, matrix=keeping_ones(matrix) if group.keeps_ones else matrix)
            element = element.replace(name, value)
        return element


def _generators(group: Group, symmetry: Symmetry, pairs: int) -> Tensor:
    """Coordinates of a group's Lie algebra for each pair, all zero: matrices, or logarithms of scales, if any."""
    blocks = (pairs, *(symmetry[base].size for base in group.within))
    n = group.size - group.keeps_ones
    shape = (*blocks, n, n) if group.matrix != "none" else (*blocks, len(kept_scales(symmetry, group)), n)
    return torch.zeros(shape, dtype=torch.float64)
