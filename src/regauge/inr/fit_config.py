"""Settings for fitting a network to a signal. Importing the settings does not import torch, so options are read
fast.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from regauge.names import later
from regauge.training.training_configs import DescentConfig

if TYPE_CHECKING:
    from regauge.training.optimizers import Optimizer

LossName = Literal["bce", "mse", "focal"]
Represented = Literal["unsigned", "signed", "occupancy"]
"""The signal of a shape that a network represents."""
RATE = 1e-4
"""The default learning rate."""


@dataclass(frozen=True, kw_only=True)
class FitConfig(DescentConfig):
    """Settings of a fit with Adam on random samples, drawn with replacement. The defaults come from paper 003.

    Attributes:
        steps: Number of steps of Adam.
        batch: Number of samples in a step, drawn from 500,000 points of a shape or from all pixels of an image.
        loss: The loss. By default, cross entropy for distances, squared error for images, and the focal loss for
            occupancy.

    Raises:
        ValueError: A number is not positive, or the loss is unknown.

    References:
        Paper 003, chapter 3.
    """

    steps: int | None = 500
    batch: int | None = 10_000
    optimizer: "Optimizer" = field(default_factory=later("regauge.training.optimizers:Adam", lr=RATE))
    loss: LossName | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss not in (None, *get_args(LossName)):
            raise ValueError(f"there is no loss {self.loss!r}; choose from {', '.join(get_args(LossName))}")
