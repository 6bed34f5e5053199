"""Normalization layers for convolutional networks, by name."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

NormName = Literal["batch", "layer", "group", "filter", "none"]


class ChannelLayerNorm(nn.Module):
    """Layer normalization over the channels of each position of `[batch, channel, y, x]`.

    The layer equals the `LayerNorm` of flax on channels-last images, which the ResNet20 of Git Re-Basin uses.
    `GroupNorm(1, channels)` computes another function, because it also averages over positions.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        moved = functional.layer_norm(x.movedim(1, -1), self.weight.shape, self.weight, self.bias, self.eps)
        return moved.movedim(-1, 1)


class FilterResponseNorm(nn.Module):
    """Filter response normalization with its thresholded linear unit, on `[batch, channel, y, x]`.

    `z = max(weight * x / sqrt(mean over y, x of x^2 + eps) + bias, threshold)`. No activation follows
    `FilterResponseNorm`.

    References:
        Singh and Krishnan (2020), equations 1 to 4.
    """

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.threshold = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, threshold = (t.reshape(-1, 1, 1) for t in (self.weight, self.bias, self.threshold))
        power = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).square() / x.shape[-2:].numel()
        scale = weight * torch.rsqrt(power + self.eps)
        # Only few passes over tensors as large as x, all in its dtype, because memory access determines the time.
        above = torch.addcmul((bias - threshold).to(x.dtype), x, scale.to(x.dtype))
        return functional.relu(above) + threshold.to(x.dtype)


NORMS: dict[NormName, Callable[[int, int], nn.Module]] = {
    "batch": lambda channels, groups: nn.BatchNorm2d(channels),
    "layer": lambda channels, groups: ChannelLayerNorm(channels),
    "group": lambda channels, groups: nn.GroupNorm(groups, channels),
    "filter": lambda channels, groups: FilterResponseNorm(channels),
    "none": lambda channels, groups: nn.Identity(),
}
"""Functions that create a normalization of `channels` channels; `groups` is used only for group normalization."""


def has_activation(norm: NormName) -> bool:
    """Return whether a normalization layer contains an activation.

    No ReLU follows a normalization layer that contains an activation.
    """
    return norm == "filter"
