"""Settings of training. Importing the settings does not import torch, so command-line options are read fast."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from regauge.names import later
from regauge.training.schedules import Constant, OneCycle, Schedule

if TYPE_CHECKING:
    from regauge.training.optimizers import Optimizer


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The settings that all kinds of training share.

    Attributes:
        epochs: Number of passes over the examples.
        batch: Number of examples in a step; None for all examples.
        schedule: The schedule of the learning rate.

    Raises:
        ValueError: A value is invalid.
    """

    epochs: float | None = None
    batch: int | None = 128
    schedule: Schedule = field(default_factory=Constant)

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"batch is {self.batch}, but must be at least 1, or None for all examples")


@dataclass(frozen=True, kw_only=True)
class DescentConfig(TrainingConfig):
    """Settings of gradient descent with any optimizer.

    Attributes:
        steps: Number of optimizer steps; give either `steps` or `epochs`.
        optimizer: The optimizer with its learning rate.
    """

    steps: int | None = None
    optimizer: "Optimizer" = field(default_factory=later("regauge.training.optimizers:Adam", lr=1e-3))

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"steps is {self.steps} and epochs is {self.epochs}; give one of them, and only one")
        if (self.steps is not None and self.steps < 1) or (self.epochs is not None and not 0 < self.epochs < math.inf):
            raise ValueError(f"steps is {self.steps} and epochs is {self.epochs}; the one given must be positive")

    def count_steps(self, examples: int) -> int:
        """Return the number of training steps for `examples` examples. An epoch may end with a smaller batch."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, round(self.epochs * math.ceil(examples / (self.batch or examples))))


@dataclass(frozen=True, kw_only=True)
class NetTrainingConfig(TrainingConfig):
    """Settings for training a net on networks by AdamW.

    Attributes:
        epochs: Largest number of passes over the networks.
        batch: Number of networks in a training step.
        lr: Largest learning rate of the schedule.
        weight_decay: Weight decay of AdamW.
        schedule: Schedule of the learning rate; by default, the rate rises for a twentieth of the steps and then falls
            like a cosine.
        clip: Largest norm of a gradient; a gradient with a larger norm is scaled down to this norm.
        patience: End the training after this number of epochs without a better validation score; None: never.
        seconds: End the training after this number of seconds of wall time and keep the best net so far; None: no
            limit. On a busy machine, fewer steps fit into the time limit. The learning rate follows the steps or the
            seconds, whichever are closer to their limit. A run that ends by time depends on the machine's speed.
        is_cpu_time: Whether `seconds` are CPU seconds of this process, which a busy machine does not shorten. The time
            of all threads is added up; the time of a GPU is not included.
        average: Decay of the moving average of the weights, which is used in validation and in the result. After few
            steps, the decay is smaller: at most (1 + steps) / (10 + steps). 0 or None: no averages.
        device: The device on which the net is trained: cpu, cuda or another device of torch.
    """

    epochs: int = 100
    batch: int = 64
    lr: float = 2e-3
    weight_decay: float = 1e-2
    schedule: Schedule = field(default_factory=lambda: OneCycle(rise=0.05, start=0.04, end=1e-2))
    clip: float = 1.0
    patience: int | None = None
    seconds: float | None = None
    is_cpu_time: bool = False
    average: float | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        from regauge.core.devices import find_device

        is_whole = self.epochs >= 1 and self.batch >= 1 and (self.patience is None or self.patience >= 1)
        is_positive = self.lr > 0 and self.weight_decay >= 0 and self.clip > 0
        if not is_whole or not is_positive or (self.seconds is not None and not self.seconds > 0):
            raise ValueError(
                f"epochs={self.epochs}, batch={self.batch}, lr={self.lr}, weight_decay={self.weight_decay}, "
                f"clip={self.clip}, patience={self.patience} and seconds={self.seconds} are invalid; all must be "
                "positive, but weight_decay may be 0, and patience and seconds None"
            )
        if self.average is not None and not 0 <= self.average < 1:
            raise ValueError(
                f"average={self.average} is not the decay of a moving average; give a number from 0 to less than 1"
            )
        find_device(self.device)
