"""VGG networks with 3 x 3 convolutions, max pooling, and a classifier on the flattened features."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from regauge.nets.norm import NORMS, NormName


class VGG(nn.Module):
    """A network of convolutions with ReLU, followed by linear layers on all features of the last feature map.

    The argument `plan` lists the number of channels of each convolution, and "pool" for 2 x 2 max pooling. A
    normalization follows each convolution. Images must be square with sides of `image` pixels. The argument `hidden`
    lists the widths of the classifier's hidden layers.
    """

    def __init__(
        self,
        plan: Sequence[int | Literal["pool"]],
        hidden: Sequence[int],
        classes: int,
        *,
        image: int,
        in_channels: int,
        norm: NormName,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential()
        before, side = in_channels, image
        for step in plan:
            if step == "pool":
                self.features.append(nn.MaxPool2d(2))
                side //= 2
                continue
            self.features.append(nn.Conv2d(before, step, 3, padding=1, bias=norm == "none"))
            if norm != "none":
                self.features.append(NORMS[norm](step, 1))
            self.features.append(nn.ReLU())
            before = step
        if side == 0:
            raise ValueError(f"images of {image} pixels are pooled away; use larger images or fewer 'pool' in the plan")
        self.classifier = nn.Sequential()
        before *= side * side
        for width in hidden:
            self.classifier.extend([nn.Linear(before, width), nn.ReLU()])
            before = width
        self.classifier.append(nn.Linear(before, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))
