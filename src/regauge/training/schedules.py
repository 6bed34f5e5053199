"""Schedules of learning rates and momentum, like torch's schedulers."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple


class Rate(NamedTuple):
    """The learning rate factor and momentum of one step under a schedule.

    Attributes:
        factor: The factor of every learning rate.
        momentum: The momentum of SGD or the first decay of Adam. If `momentum` is None, the optimizer keeps its own
            momentum.
    """

    factor: float = 1.0
    momentum: float | None = None


class Schedule(ABC):
    """A schedule of the learning rate. Subclasses are frozen dataclasses."""

    @abstractmethod
    def rate(self, step: int, steps: int) -> Rate:
        """Return the rate of the step with index `step`, from 0 to `steps - 1`."""


@dataclass(frozen=True)
class Constant(Schedule):
    """A constant learning rate."""

    def rate(self, step: int, steps: int) -> Rate:
        """Return the factor 1."""
        return Rate()


@dataclass(frozen=True)
class Cosine(Schedule):
    """A half cosine from the learning rate down to a share of it, like `torch.optim.lr_scheduler.CosineAnnealingLR`.

    Attributes:
        final: The share of the learning rate that would be reached after the last step.

    References:
        Loshchilov and Hutter (2017), equation 5 without restarts.
    """

    final: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.final <= 1:
            raise ValueError(f"the final share of the learning rate is {self.final}, but must lie in [0, 1]")

    def rate(self, step: int, steps: int) -> Rate:
        """Return the factor `final + (1 - final) (1 + cos(pi step / steps)) / 2`."""
        return Rate(self.final + (1 - self.final) * (1 + math.cos(math.pi * step / steps)) / 2)


@dataclass(frozen=True)
class OneCycle(Schedule):
    """A rise from a small learning rate and a fall to a tiny one, like `torch.optim.lr_scheduler.OneCycleLR`.

    Attributes:
        rise: The share of the steps during which the learning rate rises.
        start: The initial learning rate, divided by the largest learning rate.
        end: The final learning rate, divided by the initial learning rate.
        momentum: The smallest and the largest momentum. The momentum falls to the smallest value while the learning
            rate rises, and rises to the largest value while the learning rate falls. Torch cycles between 0.85 and
            0.95. If `momentum` is None, the optimizer's momentum is not changed.

    References:
        Smith and Topin (2018); torch.optim.lr_scheduler.OneCycleLR.
    """

    rise: float = 0.3
    start: float = 1 / 25
    end: float = 1e-4
    momentum: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.rise < 1 or not 0 < self.start <= 1 or not 0 <= self.end <= 1:
            raise ValueError(f"{self} is not a cycle; rise must lie in (0, 1), start in (0, 1] and end in [0, 1]")
        if self.momentum is not None and not 0 <= self.momentum[0] <= self.momentum[1] < 1:
            raise ValueError(f"momentum is {self.momentum}, but must be two numbers in [0, 1), the smaller one first")

    def rate(self, step: int, steps: int) -> Rate:
        """Return a cosine factor that rises to 1 at step `rise * steps - 1` and ends at `start * end`."""
        peak = self.rise * steps - 1
        if step <= peak:
            risen = (1 - math.cos(math.pi * (step / peak if peak > 0 else 1.0))) / 2
            factor = self.start + (1 - self.start) * risen
        else:
            fall = steps - 1 - peak
            risen = (1 + math.cos(math.pi * ((step - peak) / fall if fall > 0 else 1.0))) / 2
            factor = self.start * self.end + (1 - self.start * self.end) * risen
        if self.momentum is None:
            return Rate(factor)
        low, high = self.momentum
        return Rate(factor, high + (low - high) * risen)


@dataclass(frozen=True)
class StepDecay(Schedule):
    """A schedule that multiplies the rate by a factor after each `every` steps, like `torch.optim.lr_scheduler.StepLR`.

    Attributes:
        every: The number of steps from one decay to the next.
        gamma: The factor by which each decay multiplies the learning rate.
    """

    every: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if self.every < 1 or not 0 < self.gamma <= 1:
            raise ValueError(f"{self} is not a decay; every must be at least 1 and gamma lie in (0, 1]")

    def rate(self, step: int, steps: int) -> Rate:
        """Return the factor `gamma ** (step // every)`."""
        return Rate(float(self.gamma ** (step // self.every)))
