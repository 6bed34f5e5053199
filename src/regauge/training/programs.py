"""What the programs that train the networks of a stack have in common."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Backend = Literal["stacked", "compiled", "loop"]
"""One program for all networks of a stack; the same, compiled; or one network after the other."""

PIECE_BYTES = 4 * 2**20
"""Size of the largest hidden tensor of a piece of a batch, where a batch may be read in pieces."""


Batch = tuple[Tensor, Tensor]
"""Inputs for each group of consecutive networks, `[groups, examples, ...]`, and targets: classes `[groups, examples]`,
or values `[groups or networks, examples, out]`."""


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
