"""What networks compute at probes, to numbers for each network: their weights are not looked at."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from regauge.weightspace.layers.dense import Dense, Norm

CHANNELS = (16, 32)
KERNELS = (5, 3)
"""Channels and window of the convolutions over a sheet; each leaves every second place."""
CONVOLUTIONS: tuple[type[nn.Conv1d | nn.Conv2d | nn.Conv3d], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BLOCKS = 2


class OutputReader(nn.Module):
    """An MLP with residual blocks on the outputs at all probes, after convolutions if the probes lie on a sheet.

    Args:
        sizes: Lengths of the axes of the sheet; one number where probes have no order.
        channels: Numbers of one network at each probe.
        hidden: Width of the MLP.
        outputs: How many numbers for each network.
        dropout: Share of the hidden units that are dropped in training.
        generator: Source of the weights.
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
        self.first = Dense(channels * math.prod(sizes), hidden, generator=generator)
        self.blocks = nn.ModuleList(_Block(hidden, dropout, generator) for _ in range(BLOCKS))
        self.norm, self.dropout = Norm(hidden), nn.Dropout(dropout)
        self.last = Dense(hidden, outputs, generator=generator)

    def forward(self, made: Tensor) -> Tensor:
        """From `[models, channels * probes]`, the probes last, to `[models, outputs]`."""
        x = made
        if self.convolutions:
            x = x.reshape(len(x), -1, *self.sizes)
            for convolve, norm in zip(self.convolutions, self.norms, strict=True):
                x = nn.functional.silu(norm(convolve(x).movedim(1, -1))).movedim(-1, 1)
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.last(self.dropout(nn.functional.silu(self.norm(x))))
        return result


class _Block(nn.Module):
    def __init__(self, width: int, dropout: float, generator: torch.Generator | None) -> None:
        super().__init__()
        self.norm, self.dropout = Norm(width), nn.Dropout(dropout)
        self.into = Dense(width, width, generator=generator)
        self.out = Dense(width, width, gain=0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.dropout(nn.functional.silu(self.into(self.norm(x)))))
        return made


def _convolution(axes: int, inner: int, outer: int, kernel: int, generator: torch.Generator | None) -> nn.Module:
    made = CONVOLUTIONS[axes - 1](inner, outer, kernel, stride=2, padding=kernel // 2)
    with torch.no_grad():
        fan = inner * kernel**axes
        made.weight.copy_(torch.randn(made.weight.shape, generator=generator) / math.sqrt(fan))
        assert made.bias is not None
        made.bias.zero_()
    return made
