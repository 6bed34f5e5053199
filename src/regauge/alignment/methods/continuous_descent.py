"""Continuous descent on rotations, invertible matrices and scales, with gradients of the loss between the networks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from regauge.alignment.descent_method import DescentCourse, DescentMethod, line_measure, losses_at
from regauge.alignment.method import Candidates, Start
from regauge.alignment.methods.data_matching import DataMatching
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.element import Element
from regauge.core.groups import Group
from regauge.core.interpolation import interpolate
from regauge.core.params import Params
from regauge.core.rotations import keeping_ones
from regauge.core.scales import kept_scales
from regauge.core.symmetry import Symmetry
from regauge.core.task import Batch
from regauge.training import Adam, PlainProgram, differentiate

CHANGE = 1e-3
"""The descent has converged if the loss changes by less than this fraction between evaluations."""


@dataclass(frozen=True)
class ContinuousDescent(DescentMethod):
    """Gradient descent on the continuous part of the symmetry.

    The descent minimizes the task loss on the linear path between the two networks. The initial element g is applied to
    the second network, and `h = exp(X)` is applied to the transformed network. X is a skew-symmetric matrix for every
    orthogonal group, and an arbitrary matrix for every linear group. For families of positive scales, X contains the
    logarithms of the factors. Factors that would change running statistics are not optimized. X starts at zero. Adam
    minimizes the task loss of `(1 - t) a + t h g b`, one batch per step.

    Permutations, signs and half periods stay as in the initial element. To choose permutations and signs, pass another
    method as `init`. To alternate methods, pass `ContinuousDescent` as `init` of `Sinkhorn` or `StraightThrough`. The
    mean of X over the latest steps is evaluated on held-out examples (`DescentMethod`). The objective is minus the loss
    on the held-out examples. The held-out loss is the loss at the midpoint or, with random points, the mean of the
    losses at t = 1/4, 1/2, 3/4. The cost of a batch is proportional to its size. Every evaluation takes one or three
    passes over the held-out examples.

    In a transformer with folded gains, any rotation may act on the residual stream. In a transformer with folded gains,
    the closest parameters do not give the lowest midpoint loss, and the descent removes the barrier nearly completely.
    In ReLU networks, the descent changes the scales. At the midpoint between different units, activations are too
    small. If one network has the incoming weights of a unit times s, and its outgoing weights times 1/s, their product
    at the midpoint is larger: `(1 + s) (1 + 1/s) / 4 > 1`.

    Attributes:
        loss: "random": t is uniformly random in (0, 1) at every step. "midpoint": t is one half.
        init: The initial element: an element, a method that finds it, or None for the identity.
        lr: Adam's learning rate for rotations (in radians) and for matrices.
        scale_lr: Adam's learning rate for the logarithms of scales, which may change much more than rotations.

    References:
        Theus et al. (2025), Generalized linear mode connectivity for transformers: elements are learned by minimizing
        the task loss at random points of the path. Shamir and Zhang (2013), Stochastic gradient descent for non-smooth
        optimization, equation 7: the mean over the latest steps.
    """

    loss: Literal["midpoint", "random"] = "random"
    init: Start = field(default_factory=DataMatching)
    lr: float = 0.01
    scale_lr: float = 0.05
    steps: int = field(default=400, kw_only=True)
    every: int = field(default=20, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.lr > 0 and self.scale_lr > 0):
            raise ValueError(f"lr={self.lr}, scale_lr={self.scale_lr}: both must be positive")

    def reads_representatives(self, symmetry: Symmetry, *, has_task: bool) -> bool:
        """Return whether the method gets representatives, whose gains are one, instead of the given networks. The
        method gets the given networks if gains of one leave no scales to optimize.

        For example, if all layers have batch normalization, only gains have scales that leave running statistics
        unchanged. If all layers have batch normalization, the descent therefore optimizes the networks themselves.
        Networks with a residual stream that can be rotated are still passed as representatives. Networks with
        translations are passed as representatives too, except if only running statistics are translated.
        """
        behind = symmetry.on_data.on_representatives()
        is_lost = any(kept_scales(symmetry, g) and not kept_scales(behind, behind[g.name]) for g in symmetry.groups)
        others = [one for one in symmetry.translations if not set(symmetry.buffers) & {*one.parameters}]
        is_lost &= not symmetry.rotatable and not others
        return super().reads_representatives(symmetry, has_task=has_task) and not is_lost

    def learn(self, problem: Problem, start: Element, notes: tuple[str, ...], course: DescentCourse) -> Results:
        """Learn one element for each pair; see `DescentMethod`.

        A single optimization minimizes the losses of many pairs.
        """
        symmetry, count = problem.symmetry, problem.pairs
        candidates = Candidates(problem, start, line_measure(problem, self.loss), notes)
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
            t = next(points)
            return losses_at(problem, interpolate(problem.a, there, t), t, batch)

        points = course.points(self.loss)
        program = PlainProgram(differentiate(losses), freedom, Adam(self.lr))
        for mean in course.rounds(program, problem.task):
            element = symmetry.compose(self._exponential(symmetry, mean, count), start)
            reached = candidates.offer(element)
            is_converged, last = (reached - last).abs() <= CHANGE * last.abs(), reached
        return candidates.result(is_converged)

    def _exponential(self, symmetry: Symmetry, freedom: Mapping[str, Tensor], pairs: int) -> Element:
        """Return `exp(X)` for each pair: rotations, invertible matrices and positive factors.

        All other values of the returned element are the identity. Adam uses one learning rate for all coordinates of X.
        Therefore the coordinates of scales are in units of `scale_lr`.
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
    """Return zero coordinates of a group's Lie algebra for each pair: matrices, or logarithms of scales."""
    blocks = (pairs, *(symmetry[base].size for base in group.within))
    n = group.size - group.keeps_ones
    shape = (*blocks, n, n) if group.matrix != "none" else (*blocks, len(kept_scales(symmetry, group)), n)
    return torch.zeros(shape, dtype=torch.float64)
