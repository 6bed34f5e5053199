"""ConvNeXt: depthwise 7 x 7 convolutions, an inverted bottleneck with GELU, and layer scale."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regauge.nets.norm import ChannelLayerNorm


class ConvNeXtBlock(nn.Module):
    """`x + gain * project(gelu(expand(norm(depthwise(x)))))`, the linear layers on the channel axis."""

    def __init__(self, channels: int, expansion: int = 4, layer_scale: float = 1e-6) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.expand = nn.Linear(channels, expansion * channels)
        self.act = nn.GELU()
        self.project = nn.Linear(expansion * channels, channels)
        self.gain = nn.Parameter(torch.full((channels,), layer_scale))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.depthwise(x).movedim(1, -1))
        return x + (self.gain * self.project(self.act(self.expand(inner)))).movedim(-1, 1)


class ConvNeXt(nn.Module):
    """A ConvNeXt with one stage per entry of `depths` and `widths`; the defaults are ConvNeXt-T.

    References:
        Liu et al. (2022), section 3.
    """

    def __init__(
        self,
        classes: int = 1000,
        *,
        depths: Sequence[int] = (3, 3, 9, 3),
        widths: Sequence[int] = (96, 192, 384, 768),
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(in_channels, widths[0], 4, 4), ChannelLayerNorm(widths[0], eps=1e-6))
        for k, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if k > 0:
                self.features.extend([ChannelLayerNorm(widths[k - 1], eps=1e-6), nn.Conv2d(widths[k - 1], width, 2, 2)])
            self.features.extend(ConvNeXtBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(widths[-1], eps=1e-6)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.features(x).mean((-2, -1))))
