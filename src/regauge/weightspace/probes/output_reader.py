"""A net that predicts numbers for each network from the network's outputs at probes, without reading weights."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from regauge.weightspace.layers.dense import Dense, Norm

CHANNELS = (16, 32)
KERNELS = (5, 3)
"""The channels and kernel size of each convolution over a grid of probes. The convolutions have stride two."""
CONVOLUTIONS: dict[int, type[nn.Conv2d | nn.Conv3d]] = {2: nn.Conv2d, 3: nn.Conv3d}
"""Convolution classes by the number of axes of the grid."""


class OutputReader(nn.Module):
    """An MLP with two hidden layers on the outputs at all probes.

    If the probes form a grid, convolutions come before the MLP.

    Args:
        sizes: The lengths of the grid's axes, or the number of probes if the probes form no grid.
        channels: The number of output values of a network at each probe.
        hidden: The width of the MLP.
        outputs: The number of outputs for each network.
        dropout: The dropout probability of hidden units in training.
        generator: The random generator of the initial weights.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        channels: int,
        hidden: int,
        outputs: int,
        dropout: float,
        *,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.sizes = tuple(sizes)
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        if len(self.sizes) > 1:
            for (inner, outer), kernel in zip(pairwise((channels, *CHANNELS)), KERNELS, strict=True):
                self.convolutions.append(_convolution(len(sizes), inner, outer, kernel, generator))
                self.norms.append(Norm(outer))
                sizes = [-(-size // 2) for size in sizes]
            channels = CHANNELS[-1]
        self.dense = nn.ModuleList(
            Dense(inner, hidden, generator=generator) for inner in (channels * math.prod(sizes), hidden)
        )
        self.norms.extend(Norm(hidden) for _ in self.dense)
        self.dropout = nn.Dropout(dropout)
        self.last = Dense(hidden, outputs, generator=generator)

    def forward(self, made: Tensor) -> Tensor:
        """Map outputs `[models, channels * probes]`, where probes vary fastest, to predictions `[models, outputs]`."""
        x = made
        count = len(self.convolutions)
        if count:
            x = x.reshape(len(x), -1, *self.sizes)
        for convolve, norm in zip(self.convolutions, self.norms[:count], strict=True):
            x = nn.functional.silu(norm(convolve(x).movedim(1, -1))).movedim(-1, 1)
        x = x.flatten(1)
        for dense, norm in zip(self.dense, self.norms[count:], strict=True):
            x = self.dropout(nn.functional.silu(norm(dense(x))))
        result: Tensor = self.last(x)
        return result


def _convolution(axes: int, inner: int, outer: int, kernel: int, generator: torch.Generator | None) -> nn.Module:
    made = CONVOLUTIONS[axes](inner, outer, kernel, stride=2, padding=kernel // 2)
    with torch.no_grad():
        fan = inner * kernel**axes
        made.weight.copy_(torch.randn(made.weight.shape, generator=generator) / math.sqrt(fan))
        assert made.bias is not None
        made.bias.zero_()
    return made
