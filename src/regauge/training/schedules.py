"""Schedules: the factor of every network's learning rate at each step, as torch's schedulers compute it."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """A constant learning rate."""

    def factor(self, step: int, steps: int) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from the learning rate down to a share of it, `torch.optim.lr_scheduler.CosineAnnealingLR`.

    Attributes:
        final: Share of the learning rate that would be reached after the last step.

    References:
        Loshchilov and Hutter (2017), equation 5 without restarts.
    """

    final: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.final <= 1:
            raise ValueError(f"the final share of the learning rate is {self.final}, but must lie in [0, 1]")

    def factor(self, step: int, steps: int) -> float:
        """`final + (1 - final) (1 + cos(pi step / steps)) / 2`."""
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * step / steps)) / 2


@dataclass(frozen=True)
class OneCycle:
    """Up from a small learning rate and down to a tiny one, `OneCycleLR` with cosines and without cycled momentum.

    Attributes:
        rise: Share of the steps on which the learning rate rises.
        start: It starts at this share of its maximum.
        end: It ends at this share of its start.

    References:
        Smith and Topin (2018); torch.optim.lr_scheduler.OneCycleLR.
    """

    rise: float = 0.3
    start: float = 1 / 25
    end: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 < self.rise < 1 or not 0 < self.start <= 1 or not 0 <= self.end <= 1:
            raise ValueError(f"{self} is no cycle; rise must lie in (0, 1), start in (0, 1] and end in [0, 1]")

    def factor(self, step: int, steps: int) -> float:
        """A cosine up to 1 at step `rise * steps - 1`, and one down to `start * end` at the last step."""
        peak = self.rise * steps - 1
        if step <= peak:
            return _between(self.start, 1.0, step / peak if peak > 0 else 1.0)
        fall = steps - 1 - peak
        return _between(1.0, self.start * self.end, (step - peak) / fall if fall > 0 else 1.0)


@dataclass(frozen=True)
class StepDecay:
    """The learning rate is multiplied by a factor every `every` steps, `torch.optim.lr_scheduler.StepLR`.

    Attributes:
        every: Steps between two drops.
        gamma: Factor of a drop.
    """

    every: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if self.every < 1 or not 0 < self.gamma <= 1:
            raise ValueError(f"{self} is no decay; every must be at least 1 and gamma lie in (0, 1]")

    def factor(self, step: int, steps: int) -> float:
        """`gamma ** (step // every)`."""
        return float(self.gamma ** (step // self.every))


Schedule = Constant | Cosine | OneCycle | StepDecay


def _between(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))
