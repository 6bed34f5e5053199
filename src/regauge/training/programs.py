"""What a back end is: a program that trains the networks of a stack, and how it is chosen."""

from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from regauge.core.params import Params

Backend = Literal["stacked", "compiled", "loop"]
"""One program for all networks of a stack; the same, compiled; or one network after the other."""

PIECE_BYTES = 4 * 2**20
"""Of the largest hidden tensor of a piece of a batch, where a batch may be read in pieces."""


class Program(Protocol):
    """The networks of a stack while they are trained."""

    def step(self, inputs: Tensor, targets: Tensor, factor: float) -> Tensor:
        """One step of all networks.

        Args:
            inputs: A batch for each group of consecutive networks, `[groups, examples, ...]`.
            targets: Classes `[groups, examples]`, or values `[groups or networks, examples, out]`.
            factor: What all learning rates are multiplied with.

        Returns:
            The losses before the step, `[networks]`.
        """

    def outputs(self, inputs: Tensor) -> Tensor:
        """What every network says, in evaluation mode, of a batch that all read, `[networks, examples, out]`."""

    def params(self) -> Params:
        """Parameters and buffers now, `[networks, ...]`, as new tensors."""

    def keep(self, index: Tensor) -> None:
        """Go on with the networks at `index` alone."""


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of one network: cross entropy in nats for classes, mean squared error for values."""
    if targets.is_floating_point():
        return functional.mse_loss(outputs, targets)
    return functional.cross_entropy(outputs, targets)


def learned_names(module: nn.Module) -> list[str]:
    """Names of the parameters that are trained."""
    return [name for name, tensor in module.named_parameters() if tensor.requires_grad]


def channels_last(tensor: Tensor) -> Tensor:
    """Images in the layout that convolutions and pooling on a CPU are fast in."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
