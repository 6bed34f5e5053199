"""ResNet50, whose blocks are bottlenecks."""

from torch import Tensor, nn

from regauge.nets.resnet import ResNet


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 (with the stride) and 1 x 1 convolutions with batch normalization, and a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        channels = out_channels // 4
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out_channels)
        self.act = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.norm1(self.conv1(x)))
        out = self.act(self.norm2(self.conv2(out)))
        return self.act(self.norm3(self.conv3(out)) + self.shortcut(x))


def resnet50(
    classes: int = 1000, *, width: int = 64, in_channels: int = 3, blocks: tuple[int, ...] = (3, 4, 6, 3)
) -> ResNet:
    """ResNet50 for images of 224 pixels: bottlenecks with `width`, 2 `width`, ... channels, where the 3 x 3 convolution
    has the stride.

    References:
        He et al. (2016), table 1.
    """
    stem = nn.Sequential(
        nn.Conv2d(in_channels, width, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    )
    return ResNet(stem, [width, *(4 * width * 2**k for k in range(len(blocks)))], blocks, Bottleneck, classes)
