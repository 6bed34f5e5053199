"""Sinkhorn re-basin: permutations are relaxed to doubly stochastic plans and optimized by gradients."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from regauge.alignment.descent_method import DescentCourse, DescentMethod, line_measure, losses_at
from regauge.alignment.engine.paired_networks import dots
from regauge.alignment.method import Candidates, Measure, Start, are_alike
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.element import Element
from regauge.core.families import compared
from regauge.core.interpolation import interpolate
from regauge.core.params import Params
from regauge.core.task import Batch
from regauge.relaxed.action import RelaxedAction
from regauge.relaxed.soft_elements import SoftElement, movable
from regauge.training import Adam, PlainProgram, differentiate


@dataclass(frozen=True)
class Sinkhorn(DescentMethod):
    """Gradient descent on relaxed permutations and signs, which minimizes a loss between the two networks.

    The initial element g is first applied to the second network b. Doubly stochastic matrices P (called plans) and soft
    signs are applied to g b, which gives `P(g b)`. Adam changes the logits of plans and signs to minimize a loss:

    | loss | what it is | needs |
    | --- | --- | --- |
    | "l2" | `sum (a - P(g b))^2` | nothing |
    | "midpoint" | the task loss of `(a + P(g b)) / 2` on one batch after the other | a task |
    | "random" | the task loss of `(1 - t) a + t P(g b)`, t uniform in (0, 1) at every step | a task |

    After every `every` steps, the plans are rounded to the closest permutations. The rounded elements are evaluated
    with the same loss. A task loss is evaluated on held-out examples (`DescentMethod`). For the loss "random", held-out
    examples give the mean loss at t = 1/4, 1/2, 3/4. The method returns the best of all rounded elements, the initial
    element and the identity. If `keeps` is "last", the method returns the last rounded element. The objective, which is
    maximized, is minus the loss. The cost of a batch is proportional to its size, and every evaluation takes one pass
    over all held-out examples. A task with a few thousand examples, in batches of some hundred, is therefore best.

    `Sinkhorn` departs from the paper in the following ways. The descent starts near the result of weight matching. The
    learning rate is ten times the published one, and a quarter of the published steps is enough. With `init=None,
    confidence=0.02, lr=0.3, steps=100, keeps="last"`, the method starts at the identity, as published. To compute the
    gradient, the method solves a positive definite linear system of half the published size. Positive scales, shifts
    and rotations stay as in the initial element.

    Attributes:
        loss: The loss to minimize: "l2", "midpoint" or "random".
        init: The initial element: an element, a method that finds it, or None for the identity.
        lr: Adam's learning rate, for logits in units of the temperature.
        temperature: The temperature of the Sinkhorn operator. A higher temperature makes plans softer.
        confidence: The fraction of each row of a plan that the initial plan gives to the initial element.
        keeps: "best" returns the best of all evaluated elements. "last", as published, returns the last element, which
            may be worse than the initial element.

    References:
        Pena et al. (2023), Re-Basin via Implicit Sinkhorn Differentiation, equations 6 to 9; Eisenberger et al.
        (2022); Navon et al. (2024), section 6, for the random point.
    """

    copies = 20
    loss: Literal["l2", "midpoint", "random"] = "midpoint"
    init: Start = field(default_factory=WeightMatching)
    lr: float = 1.0
    temperature: float = 1.0
    confidence: float = 0.1
    keeps: Literal["best", "last"] = "best"
    steps: int = field(default=30, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.lr > 0 and self.temperature > 0 and 0 < self.confidence < 1):
            raise ValueError(
                f"lr={self.lr}, temperature={self.temperature}, confidence={self.confidence}: lr and temperature must "
                "be positive and confidence between 0 and 1"
            )

    @property
    def needs_task(self) -> bool:
        """Whether the loss is a task loss."""
        return self.loss != "l2"

    def learn(self, problem: Problem, start: Element, notes: tuple[str, ...], course: DescentCourse) -> Results:
        """Learn one element for each pair; see `DescentMethod`.

        A single optimization minimizes the losses of all pairs.
        """
        params_a, params_b, symmetry, count = problem.a, problem.b, problem.symmetry, problem.pairs
        task = None if self.loss == "l2" else problem.task
        candidates = Candidates(problem, start, self._measure(problem), notes)
        at_start, is_converged = symmetry.act(start, params_b), torch.ones(count, dtype=torch.bool)
        (a, b) = _floats(params_a, at_start) if task is not None else compared([params_a, at_start], symmetry)
        action = RelaxedAction(symmetry, b, movable(symmetry))
        if not action.keys:
            return candidates.result(is_converged)
        like = next(iter(b.values()))
        soft = SoftElement(
            *(symmetry, action.keys, count), confidence=self.confidence, temperature=self.temperature, like=like
        )

        def losses(parameters: Params, batch: Batch) -> Tensor:
            soft.load(parameters)
            moved = action(soft.matrices(), b)
            # Plans also transform running statistics, but operators do not differentiate with respect to them.
            moved = {name: t.detach() if name in symmetry.buffers else t for name, t in moved.items()}
            if task is None:
                return torch.stack(
                    [(a[name] - moved[name]).square().reshape(len(a[name]), -1).sum(1) for name in a]
                ).sum(0)
            t = next(points)
            between = interpolate({name: params_a[name] for name in moved}, moved, t)
            return losses_at(problem, {**params_a, **between}, t, batch)

        program = PlainProgram(differentiate(losses), soft.parameters, Adam(self.lr * self.temperature))
        points = course.points(self.loss)
        last: Element | None = None
        for _ in course.rounds(program, task):
            soft.load(program.params())
            hard = soft.hard()
            is_converged = torch.zeros_like(is_converged) if last is None else are_alike(hard, last)
            last = hard
            candidates.offer(symmetry.compose(hard, start), is_kept=self.keeps == "last")
        return candidates.result(is_converged)

    def _measure(self, problem: Problem) -> Measure | None:
        """Return the objective that evaluates rounded plans, or None for the default: minus the midpoint loss."""

        def squares(params: Params) -> Tensor:
            a, b = compared([problem.a, params], problem.symmetry)
            differences = (a[name].double() - b[name].double() for name in a)
            return -sum((dots(x, x) for x in differences), torch.zeros(problem.pairs, dtype=torch.float64))

        return squares if self.loss == "l2" else line_measure(problem, self.loss)


def _floats(*networks: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return all tensors of networks except counters, in float32 or float64 and on one device."""
    first = networks[0]
    result = []
    for params in networks:
        floats = {n: t.detach().to(first[n].device) for n, t in params.items() if t.is_floating_point()}
        result.append({n: t.to(torch.promote_types(t.dtype, torch.float32)) for n, t in floats.items()})
    return result
