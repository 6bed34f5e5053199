"""Functions that all programs for training a stack of networks use."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Backend = Literal["stacked", "compiled", "loop"]
"""The kind of program: one program for all networks of a stack, the same program compiled, or one network after the
other."""

PIECE_BYTES = 4 * 2**20
"""The largest size in bytes of a hidden tensor for a part of a batch, if a batch may be split."""


Batch = tuple[Tensor, Tensor]
"""Inputs for each group of consecutive networks, `[groups, examples, ...]`, and targets: class indices `[groups,
examples]`, or numbers `[groups or networks, examples, out]`."""


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of one network: cross entropy in nats for class indices, or mean squared error for numbers."""
    if targets.is_floating_point():
        return functional.mse_loss(outputs, targets)
    return functional.cross_entropy(outputs, targets)


def mean_losses(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return `mean_loss` of every network and its gradient. The outputs `[networks, out, examples]` are overwritten."""
    networks, out, examples = outputs.shape
    if targets.is_floating_point():
        repeats = networks // len(targets)
        wanted = targets.transpose(1, 2)
        wanted = wanted.repeat_interleave(repeats, 0) if len(targets) not in (1, networks) else wanted
        delta = outputs.sub_(wanted)
        losses = delta.square().mean((1, 2))
        return losses, delta.mul_(2 / (out * examples))
    classes = targets.unsqueeze(1).repeat_interleave(networks // len(targets), 0)
    logs = torch.log_softmax(outputs, 1)
    losses = -logs.gather(1, classes).mean((1, 2))
    delta = logs.exp_()
    delta.scatter_add_(1, classes, delta.new_full((1, 1, 1), -1.0).expand_as(classes))
    return losses, delta.mul_(1 / examples)


def learned_names(module: nn.Module) -> list[str]:
    """Return the names of the trained parameters."""
    return [name for name, tensor in module.named_parameters() if tensor.requires_grad]


def channels_last(tensor: Tensor) -> Tensor:
    """Convert images to channels-last layout, in which convolutions and pooling are fast on a CPU."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
