"""Residual networks: ResNet20 for small images, with variants from papers on matching."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from regauge.nets.norm import NORMS, NormName, has_activation

Shortcut = Literal["A", "B"]


class PadShortcut(nn.Module):
    """The parameter-free shortcut of option A, which takes every second position and pads the channels with zeros on
    both sides.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.before = (out_channels - in_channels) // 2
        self.after = out_channels - in_channels - self.before
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut: `act(norm2(conv2(act(norm1(conv1(x))))) + shortcut(x))`.

    Filter response normalization contains an activation. With filter response normalization, the block therefore has no
    activation after the sum.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, norm: NormName, groups: int, shortcut: Shortcut
    ) -> None:
        super().__init__()
        is_biased = norm == "none"
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=is_biased)
        self.norm1 = NORMS[norm](out_channels, groups)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=is_biased)
        self.norm2 = NORMS[norm](out_channels, groups)
        self.act: nn.Module = nn.Identity() if has_activation(norm) else nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            if shortcut == "A":
                self.shortcut = PadShortcut(in_channels, out_channels, stride)
            else:
                self.shortcut = nn.Sequential(
                    nn.Conv2d(in_channels, out_channels, 1, stride, bias=is_biased), NORMS[norm](out_channels, groups)
                )

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """A network of a stem, stages of residual blocks, the mean over positions, and a linear classifier.

    The channels are the widths of the stem and of each stage. A block is built from its input channels, output channels
    and stride. All stages except the first halve the height and the width of the images.
    """

    def __init__(
        self,
        stem: nn.Module,
        channels: Sequence[int],
        counts: Sequence[int],
        block: Callable[[int, int, int], nn.Module],
        classes: int,
    ) -> None:
        super().__init__()
        self.stem = stem
        self.stages = nn.ModuleList()
        for k, ((before, after), count) in enumerate(zip(pairwise(channels), counts, strict=True)):
            first = block(before, after, 2 if k > 0 else 1)
            self.stages.append(nn.Sequential(first, *(block(after, after, 1) for _ in range(1, count))))
        self.fc = nn.Linear(channels[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.fc(x.mean((-2, -1)))


def resnet20(
    classes: int = 10,
    *,
    width: int = 1,
    in_channels: int = 3,
    norm: NormName = "batch",
    groups: int = 4,
    shortcut: Shortcut = "B",
    blocks: int = 3,
) -> ResNet:
    """Return the CIFAR ResNet with 6 * blocks + 2 layers, and 16, 32 and 64 channels times `width`.

    Each of the three stages has `blocks` blocks, and a normalization with `groups` groups follows every convolution.
    With 3 blocks, the network is ResNet20. A shortcut connects two stages: "A" pads with zero channels, "B" is a 1 x 1
    convolution.

    References:
        He et al. (2016), section 4.2.
    """
    channels = [16 * width, 16 * width, 32 * width, 64 * width]
    conv = nn.Conv2d(in_channels, channels[0], 3, padding=1, bias=norm == "none")
    stem = nn.Sequential(conv, NORMS[norm](channels[0], groups), nn.Identity() if has_activation(norm) else nn.ReLU())
    block = partial(BasicBlock, norm=norm, groups=groups, shortcut=shortcut)
    return ResNet(stem, channels, (blocks, blocks, blocks), block, classes)
