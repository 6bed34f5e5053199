"""Several methods, judged by what counts: the loss halfway between the two networks."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.alignment.matching import Matching, Method, require_task
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


@dataclass(frozen=True)
class BestOf:
    """Every method is tried, and the element with the lowest task loss at the midpoint is kept.

    The objectives of different methods cannot be compared, and the inner product of the weights does not predict
    the barrier: on residual networks the two even go against each other. The loss halfway between the networks
    can be compared. The objective here is that loss with its sign turned, over all batches of the task; the
    identity takes part, so the result is never worse than no alignment.

    Attributes:
        methods: In the order in which they are tried; the first of equally good ones is kept.
    """

    methods: tuple[Method, ...]

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("there is no method to choose from; give at least one")

    def match(
        self,
        params_a: Mapping[str, Tensor],
        params_b: Mapping[str, Tensor],
        symmetry: Symmetry,
        *,
        task: Task | None,
        generator: torch.Generator | None,
    ) -> Matching:
        """See `align`."""
        task = require_task(task, self)
        initial = -task.midpoint_loss(params_a, params_b)
        history, reached = [initial], []
        best, moved = symmetry.identity(), {name: params_b[name] for name in symmetry.sites}
        for method in self.methods:
            found = method.match(params_a, params_b, symmetry, task=task, generator=generator)
            here = {**symmetry.act(found.element, params_b, skip=found.moved), **found.moved}
            reached.append(-task.midpoint_loss(params_a, here))
            if reached[-1] > history[-1]:
                best, moved = found.element, {name: here[name] for name in symmetry.sites}
            history.append(max(history[-1], reached[-1]))
        return Matching(best, history[-1], initial, tuple(history), True, tuple(reached), moved)
