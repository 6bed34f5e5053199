"""Straight-through matching: weight matching to a target, which follows gradients of the midpoint loss."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from regauge.alignment.descent_method import DescentCourse, DescentMethod, losses_at
from regauge.alignment.engine.climbs import Pursuit
from regauge.alignment.method import Candidates, Start, are_alike
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.element import Element
from regauge.core.families import compared
from regauge.core.interpolation import interpolate
from regauge.core.params import Params, batch_of_one
from regauge.core.task import Batch
from regauge.training import SGD, PlainProgram


@dataclass(frozen=True)
class StraightThrough(DescentMethod):
    """A method that matches the second network to a target network, which gradient descent changes to lower the
    midpoint loss.

    Gradients are computed as if the matching step were the identity ("straight through").

    The target theta starts at the first network. At every step, the second network is matched to theta by coordinate
    ascent on `<theta, g b>`, starting from the last element. The loss of `(a + g b) / 2` on the next batch is
    differentiated with respect to g b. The gradient step is applied to the target theta. The objective is minus the
    midpoint loss on held-out examples (`DescentMethod`).

    `StraightThrough` departs from the paper in the following ways. Every group of the symmetry is matched to theta. The
    learning rate is thirty times the published one. The method selects an element by its loss on held-out examples,
    instead of by its loss on a single batch. On MNIST, the departures from the paper gave lower barriers.

    Attributes:
        init: The initial element: an element, a method that finds it, or None for the identity.
        lr: The learning rate of gradient descent with momentum.
        momentum: The momentum of gradient descent.
        sweeps: The largest number of coordinate ascent sweeps in each step.

    References:
        Ainsworth, Hayase and Srinivasa (2023), Git Re-Basin, section 3.3, algorithm 3.
    """

    copies = 9
    init: Start = field(default_factory=WeightMatching)
    lr: float = 0.3
    momentum: float = 0.9
    sweeps: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.sweeps >= 1 and self.lr > 0 and 0 <= self.momentum < 1):
            raise ValueError(
                f"sweeps={self.sweeps}, lr={self.lr}, momentum={self.momentum}: there must be a sweep, lr must "
                "be positive and momentum in [0, 1)"
            )

    @property
    def _size(self) -> int:
        """The number of pairs in one chunk, which is 1. Pairs are therefore learned one after the other."""
        return 1

    def learn(self, problem: Problem, start: Element, notes: tuple[str, ...], course: DescentCourse) -> Results:
        """Learn one element for each pair; see `DescentMethod`."""
        symmetry = problem.symmetry
        params_a, params_b = problem.pair(0)
        candidates = Candidates(problem, start, notes=notes)
        start = last = start.item(0)
        a, b = compared([params_a, params_b], symmetry)
        is_converged = False
        if not a:
            return candidates.result(is_converged=True)
        pursuit = Pursuit(symmetry, a, b, start)
        rest = symmetry.act(start, params_b, skip=a.keys())

        def gradient(theta: Params, batch: Batch) -> tuple[Tensor, list[Tensor | None]]:
            nonlocal rest
            pursuit.aim_at({name: tensor.clone() for name, tensor in theta.items()})
            if pursuit.climb(self.sweeps):
                rest = symmetry.act(pursuit.element, params_b, skip=a.keys())
            middle = interpolate({name: t for name, t in params_a.items() if name not in a}, rest)
            between = {name: t.requires_grad_() for name, t in interpolate(a, pursuit.second).items()}
            middle |= {name: t.to(params_a[name].dtype) for name, t in between.items()}
            loss = losses_at(problem, batch_of_one(middle), 0.5, batch).sum()
            found = torch.autograd.grad(loss, list(between.values()), allow_unused=True)
            return loss.detach(), [None if g is None else g / 2 for g in found]

        program = PlainProgram(gradient, a, SGD(self.lr, momentum=self.momentum))
        for _ in course.rounds(program, problem.task):
            is_converged = bool(are_alike(pursuit.element, last))
            last = pursuit.element
            candidates.offer(last.expand(1))
        return candidates.result(is_converged)
