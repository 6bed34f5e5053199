"""DenseNet: every layer reads the concatenation of all layers before it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class DenseLayer(nn.Module):
    """Norm, ReLU, 1 x 1 convolution, norm, ReLU, 3 x 3 convolution. The `growth` output channels are appended to the
    input.
    """

    def __init__(self, in_channels: int, growth: int, bottleneck: int) -> None:
        super().__init__()
        inner = bottleneck * growth
        self.body = nn.Sequential(
            nn.BatchNorm2d(in_channels),
            nn.ReLU(),
            nn.Conv2d(in_channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


class DenseNet(nn.Module):
    """A DenseNet with one block of layers per entry of `depths`; the defaults are DenseNet121.

    References:
        Huang et al. (2017), table 1.
    """

    def __init__(
        self,
        classes: int = 1000,
        *,
        depths: Sequence[int] = (6, 12, 24, 16),
        growth: int = 32,
        stem: int = 64,
        bottleneck: int = 4,
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, stem, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(stem),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        )
        channels = stem
        for k, depth in enumerate(depths):
            for _ in range(depth):
                self.features.append(DenseLayer(channels, growth, bottleneck))
                channels += growth
            self.features.extend([nn.BatchNorm2d(channels), nn.ReLU()])
            if k < len(depths) - 1:
                self.features.extend([nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)])
                channels //= 2
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((-2, -1)))
