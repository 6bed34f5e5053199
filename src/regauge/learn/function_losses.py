"""Losses between the outputs of two networks. Losses between outputs depend only on the functions, not on the
weights.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regauge.core.task import Task


@dataclass(frozen=True)
class SquaredError:
    """The mean squared difference of outputs, for signals such as images, occupancies and distances.

    References:
        Paper 002, section 4.
    """

    def __call__(self, made: Tensor, wanted: Tensor, targets: Any) -> Tensor:
        """Return the loss of each network, `[models]`, from outputs `[models, examples, ...]`."""
        return (made - wanted).square().flatten(1).mean(1)


@dataclass(frozen=True)
class Distillation:
    """The divergence between the class probabilities of two networks at one temperature, times the squared temperature.

    The divergence is the Kullback-Leibler divergence of softmax probabilities, whose logits are divided by the
    temperature. With the factor of the squared temperature, gradients are as large as at temperature one. Classes are
    on the last axis.

    Attributes:
        temperature: The number by which logits are divided.

    References:
        Hinton et al. (2015), Distilling the knowledge in a neural network, section 2; paper 002, section 4.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}, but must be positive and finite")

    def __call__(self, made: Tensor, wanted: Tensor, targets: Any) -> Tensor:
        """Return the loss of each network, `[models]` in nats, from logits `[models, examples, ..., classes]`."""
        if wanted.ndim < 3 or wanted.shape[-1] < 2:
            raise ValueError(
                f"the networks give {tuple(wanted.shape[1:])} numbers for the inputs, which cannot be logits of two or "
                "more classes; distillation is for classifiers, use the squared error"
            )
        logs, known = ((x / self.temperature).log_softmax(-1) for x in (made, wanted))
        divergence = (known.exp() * (known - logs)).sum(-1)
        return self.temperature**2 * divergence.flatten(1).mean(1)


@dataclass(frozen=True)
class Criterion:
    """The loss of a task on its targets. The outputs of the original network are not used.

    Attributes:
        task: The task whose criterion is used.
    """

    task: Task

    def __call__(self, made: Tensor, wanted: Tensor, targets: Any) -> Tensor:
        """Return the loss of each network on the task, `[models]`."""
        return torch.func.vmap(self.task.criterion, in_dims=(0, None))(made, targets)


FunctionLoss = SquaredError | Distillation
"""Losses that compare a network with the original network and need no targets."""
