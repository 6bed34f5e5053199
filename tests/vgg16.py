"""The VGG16 network."""

from collections.abc import Sequence
from typing import Literal

from regauge.nets.norm import NormName
from regauge.nets.vgg import VGG

VGG16: tuple[int | Literal["pool"], ...] = (
    *(64, 64, "pool"),
    *(128, 128, "pool"),
    *(256, 256, 256, "pool"),
    *(512, 512, 512, "pool"),
    *(512, 512, 512, "pool"),
)
"""The channels of the 13 convolutions, and the positions of pooling layers."""


def vgg16(
    classes: int = 10,
    *,
    width: float = 1.0,
    hidden: Sequence[int] = (512, 512),
    image: int = 32,
    in_channels: int = 3,
    norm: NormName = "none",
) -> VGG:
    """VGG16 for images of 32 pixels (one position remains) or larger multiples of 32.

    References:
        Simonyan and Zisserman (2015), configuration D.
    """
    plan: list[int | Literal["pool"]] = [step if step == "pool" else max(1, int(step * width)) for step in VGG16]
    return VGG(plan, hidden, classes, image=image, in_channels=in_channels, norm=norm)
