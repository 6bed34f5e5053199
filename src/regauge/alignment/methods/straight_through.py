"""Straight-through matching: weight matching toward a target that gradients of the midpoint loss move."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from regauge.alignment.engine.climbs import Pursuit
from regauge.alignment.method import Candidates, Method, Start, are_alike, match_each, start_of
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.families import compared
from regauge.core.interpolation import interpolate
from regauge.core.params import Params
from regauge.core.task import Batch
from regauge.training import SGD, PlainProgram, descend
from regauge.training.descent import check_steps, cycle


@dataclass(frozen=True)
class StraightThrough(Method):
    """Matching to a target that follows the loss, by gradients that go straight through the matching.

    The target theta begins at the first network. At every step the second network is matched to theta, by
    coordinate ascent on `<theta, g b>` from the last element; the loss of `(a + g b) / 2` on the next batch is
    differentiated, and theta takes the gradient as if it were g b. What is maximized is the midpoint loss over
    all batches with its sign turned. The initial element, the identity and the elements at a few checks are
    judged so, and the best is returned.

    Departures from the paper. Theta is matched over every group of the symmetry. The learning rate is thirty times
    larger, and the last element is preferred to the one of the best single batch: on MNIST this ended at lower
    barriers. Elements are judged on all batches.

    Attributes:
        init: An element, or a method whose result is the start; None is the identity.
        steps: The number of steps of gradient descent with momentum.
        lr: Its learning rate.
        momentum: Its momentum.
        sweeps: Most sweeps of coordinate ascent in each step.
        checks: The number of times that the element is judged, evenly spaced; the last one is at the end.

    References:
        Ainsworth, Hayase and Srinivasa (2023), Git Re-Basin, section 3.3, algorithm 3.
    """

    init: Start = field(default_factory=WeightMatching)
    steps: int = 100
    lr: float = 0.3
    momentum: float = 0.9
    sweeps: int = 3
    checks: int = 4

    def __post_init__(self) -> None:
        is_counted = 1 <= self.checks <= self.steps and self.sweeps >= 1
        if not (is_counted and self.lr > 0 and 0 <= self.momentum < 1):
            raise ValueError(
                f"steps={self.steps}, checks={self.checks}, sweeps={self.sweeps}, lr={self.lr}, "
                f"momentum={self.momentum}: there must be as many steps as checks and at least one of each, lr must be "
                "positive and momentum in [0, 1)"
            )

    def match(self, problem: Problem) -> Results:
        """See `align`."""
        return match_each(problem, self._match_pair)

    def _match_pair(self, problem: Problem) -> Results:
        task, symmetry = problem.require_task(self), problem.symmetry
        params_a, params_b = problem.pair(0)
        start, notes = start_of(self.init, problem)
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
            loss = task.loss(middle, batch)
            found = torch.autograd.grad(loss, list(between.values()), allow_unused=True)
            return loss.detach(), [None if g is None else g / 2 for g in found]

        program = PlainProgram(gradient, a, SGD(self.lr, momentum=self.momentum))
        checked = check_steps(self.steps, self.checks)
        for state in descend(program, cycle(task), steps=self.steps):
            if state.step in checked:
                is_converged = bool(are_alike(pursuit.element, last))
                last = pursuit.element
                candidates.offer(last.expand(1))
        return candidates.result(is_converged)
