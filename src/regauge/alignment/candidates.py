"""The best of several elements by a measure that is taken of the networks that they move."""

from collections.abc import Callable

import torch
from torch import Tensor

from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.element import Element
from regauge.core.params import Params

Measure = Callable[[Params], Tensor]
"""From moved second networks to what is maximized, float64 `[pairs]`."""


class Candidates:
    """For each pair the best of the elements that were offered, the identity included.

    Args:
        problem: The pairs.
        start: The first element of each pair to be offered, preferred to an identity that is as good.
        measure: What is maximized; the loss halfway between the networks with its sign turned unless given, which needs
            a task.

    Attributes:
        initial: The objective at the identity, float64 `[pairs]`.
        objective: The best objective so far.
    """

    def __init__(self, problem: Problem, start: Element | None = None, measure: Measure | None = None) -> None:
        self._problem = problem
        self._measure = (lambda params: -problem.midpoint_losses(params)) if measure is None else measure
        self._best = problem.symmetry.identity((problem.pairs,))
        self.initial = self.objective = self._measure(dict(problem.b))
        self._reached: list[Tensor] = []
        if start is not None:
            self._reached.append(self._measure(problem.move(start)))
            self._best = start.where(self._reached[0] >= self.initial, self._best)
            self.objective = torch.maximum(self.initial, self._reached[0])
        self._history = [self.objective]

    def offer(self, element: Element, params: Params | None = None) -> Tensor:
        """Measure one element for each pair, which moves to `params`, and keep better ones; their objectives."""
        reached = self._measure(self._problem.move(element) if params is None else params)
        self._best = element.where(reached > self.objective, self._best)
        self.objective = torch.maximum(self.objective, reached)
        self._reached.append(reached)
        self._history.append(self.objective)
        return reached

    def result(self, is_converged: Tensor | bool | None = None) -> Results:
        """The best elements, with the objective after each offer as history."""
        return self._problem.result(
            self._best,
            objective=self.objective,
            initial=self.initial,
            history=torch.stack(self._history),
            starts=torch.stack(self._reached) if self._reached else (),
            is_converged=is_converged,
        )
