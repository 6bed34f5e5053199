"""MobileNetV2: inverted residuals with depthwise convolutions and linear bottlenecks."""

from collections.abc import Sequence

from torch import Tensor, nn

SETTINGS: tuple[tuple[int, int, int, int], ...] = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, channels, repetitions and stride of each stage (table 2 of the paper)."""


class InvertedResidual(nn.Module):
    """Expand by a 1 x 1 convolution, filter depthwise, and project without an activation. The input is added if the
    shapes are equal.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = in_channels * expansion
        self.body = nn.Sequential()
        if expansion != 1:
            self.body.extend(_conv_norm_act(in_channels, inner, 1, 1, 1))
        self.body.extend(_conv_norm_act(inner, inner, 3, stride, inner))
        self.body.extend([nn.Conv2d(inner, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels)])
        self.is_residual = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return x + out if self.is_residual else out


class MobileNetV2(nn.Module):
    """MobileNetV2 with channels times `width`, rounded to multiples of 8; `last` are those before the classifier.

    References:
        Sandler et al. (2018), section 4 and table 2.
    """

    def __init__(
        self,
        classes: int = 1000,
        *,
        width: float = 1.0,
        in_channels: int = 3,
        settings: Sequence[tuple[int, int, int, int]] = SETTINGS,
        last: int = 1280,
    ) -> None:
        super().__init__()
        before, last = _round_channels(32 * width), _round_channels(last * max(1.0, width))
        self.features = nn.Sequential(*_conv_norm_act(in_channels, before, 3, 2, 1))
        for expansion, channels, repeats, stride in settings:
            after = _round_channels(channels * width)
            for i in range(repeats):
                self.features.append(InvertedResidual(before, after, stride if i == 0 else 1, expansion))
                before = after
        self.features.extend(_conv_norm_act(before, last, 1, 1, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((-2, -1)))


def _conv_norm_act(in_channels: int, out_channels: int, kernel: int, stride: int, groups: int) -> list[nn.Module]:
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out_channels), nn.ReLU6()]


def _round_channels(channels: float) -> int:
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest
