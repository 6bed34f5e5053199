"""Losses of tasks that guide flows, and plain gradient descent as a comparison."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from regauge.core.given import as_pair
from regauge.core.params import Params
from regauge.core.task import Batch, Task
from regauge.training import SGD, PlainProgram, differentiate
from regauge.training import descend as take_steps


@dataclass
class BatchLoss:
    """The loss of networks on the batches of a task. Each call uses the next batch, cyclically.

    Attributes:
        task: The task whose loss guides the networks.
        dropout: The share of input values that are set to zero. Each call chooses the zeroed input values at random,
            and equally for all networks. Input values that are not set to zero are divided by one minus the share.
            Dropout of inputs reduces overfitting to the examples if guidance is strong. The inputs must be a single
            tensor.
        generator: The random generator of the dropout. By default, a fixed generator.

    References:
        Srivastava et al. (2014), Dropout. `BatchLoss` applies dropout to inputs.
    """

    task: Task
    dropout: float = 0.0
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), repr=False)
    _rest: Iterator[Batch] = field(default_factory=lambda: iter(()), init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is a share of the inputs, from 0 to below 1; choose such a share")

    def __call__(self, params: Mapping[str, Tensor]) -> Float[Tensor, " models"]:
        batch = next(self._rest, None)
        if batch is None:
            self._rest = iter(self.task.batches)
            batch = next(self._rest)
        if self.dropout:
            batch = self._drop(batch)
        found: Tensor = torch.func.vmap(self.task.loss, in_dims=(0, None))(dict(params), batch)
        return found

    def _drop(self, batch: Batch) -> Batch:
        """Return the batch with random input values set to zero."""
        inputs, targets = as_pair(batch)
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise ValueError(
                f"dropout={self.dropout} is for inputs that are one floating-point tensor, but they are "
                f"{inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__}; choose dropout=0"
            )
        kept = torch.rand(inputs.shape, generator=self.generator).to(inputs) >= self.dropout
        return inputs * kept / (1 - self.dropout), targets


def descend(loss: BatchLoss, params: Mapping[str, Tensor], *, steps: int, rate: float) -> Params:
    """Return networks after plain gradient steps. Each network descends its own loss."""
    learned = {name: tensor for name, tensor in params.items() if tensor.is_floating_point()}
    gradient = differentiate(lambda moved, _: loss({**params, **moved}))
    program: PlainProgram[None] = PlainProgram(gradient, learned, SGD(rate))
    for _ in take_steps(program, itertools.repeat(None), steps=steps):
        pass
    return {**params, **program.params()}
