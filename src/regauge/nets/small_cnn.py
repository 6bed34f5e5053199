"""The network of the small CNN zoo: three convolutions, an average over positions, one linear layer."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Three 3 x 3 convolutions of equal width with stride two, global average pooling, and logits.

    With 16 channels and one input channel it has 4,970 parameters.

    Args:
        channels: Of every convolution.
        classes: Number of outputs.
        in_channels: Channels of the images.
        activation: After every convolution.

    References:
        Unterthiner et al. (2020), section 3.
    """

    def __init__(
        self,
        channels: int = 16,
        classes: int = 10,
        *,
        in_channels: int = 1,
        activation: Callable[[Tensor], Tensor] = torch.relu,
    ) -> None:
        super().__init__()
        sizes = [in_channels, channels, channels]
        self.convolutions = nn.ModuleList(nn.Conv2d(before, channels, 3, stride=2, padding=1) for before in sizes)
        self.head = nn.Linear(channels, classes)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = self.activation(convolution(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits
