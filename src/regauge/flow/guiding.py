"""Losses of tasks that pull flows, and what as many gradient steps do without a flow."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from regauge.core.params import Params
from regauge.core.task import Batch, Task


@dataclass
class BatchLoss:
    """The loss of networks on a batch of a task, another batch in each call, and from the first again after the last.

    Attributes:
        task: What is asked of the networks.
    """

    task: Task
    _rest: Iterator[Batch] = field(default_factory=lambda: iter(()), repr=False)

    def __call__(self, params: Mapping[str, Tensor]) -> Float[Tensor, " models"]:
        batch = next(self._rest, None)
        if batch is None:
            self._rest = iter(self.task.batches)
            batch = next(self._rest)
        found: Tensor = torch.func.vmap(self.task.loss, in_dims=(0, None))(dict(params), batch)
        return found


def descend(loss: BatchLoss, params: Mapping[str, Tensor], *, steps: int, rate: float) -> Params:
    """Networks after plain gradient steps, each on its own loss."""
    now = dict(params)
    names = [name for name, tensor in now.items() if tensor.is_floating_point()]
    for _ in range(steps):
        moved = {name: now[name].detach().requires_grad_() for name in names}
        with torch.enable_grad():
            gradients = torch.autograd.grad(loss({**now, **moved}).sum(), list(moved.values()), allow_unused=True)
        for name, gradient in zip(names, gradients, strict=True):
            now[name] = moved[name].detach() if gradient is None else moved[name].detach() - rate * gradient
    return now
