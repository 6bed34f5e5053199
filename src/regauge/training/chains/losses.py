"""The loss of every network of a stack and its derivative, by hand."""

import torch
from torch import Tensor


def mean_losses(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean losses of the networks and their derivatives; the outputs `[networks, out, examples]` are overwritten."""
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
