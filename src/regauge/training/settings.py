"""Settings of networks: one number for all networks, or a distribution from which each network samples a number."""

import hashlib
import math
from dataclasses import dataclass

LATER = "later"
"""A mark for fields that did not exist in earlier versions. Stores contain a marked field only if its value is not the
default."""


@dataclass(frozen=True)
class Uniform:
    """The uniform distribution between `low` and `high`."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not -math.inf < self.low <= self.high < math.inf:
            raise ValueError(f"{self} is not an interval; give low <= high, both finite")

    def at(self, u: float) -> float:
        """Return the u-quantile of the distribution."""
        return self.low + (self.high - self.low) * u


@dataclass(frozen=True)
class LogUniform:
    """The log-uniform distribution between `low` and `high`."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < math.inf:
            raise ValueError(f"{self} has no logarithms; give 0 < low <= high, both finite")

    def at(self, u: float) -> float:
        """Return the u-quantile of the distribution."""
        return float(self.low * (self.high / self.low) ** u)


@dataclass(frozen=True)
class Choice:
    """The uniform distribution over a list of values."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values or not all(map(math.isfinite, self.values)):
            raise ValueError(f"{self} has nothing to choose from; give at least one value, all finite")

    def at(self, u: float) -> float:
        """Return the u-quantile of the list."""
        return self.values[int(u * len(self.values))]


Setting = float | Uniform | LogUniform | Choice
"""A number, or a distribution from which each network samples a number, such as a learning rate."""


def draw(setting: Setting, *key: int | str) -> float:
    """Sample a value from a setting. Only the key determines which value is sampled."""
    if isinstance(setting, float | int):
        return float(setting)
    return setting.at((derive_seed(*key) >> 10) / 2**53)


def bounds(setting: Setting) -> tuple[float, float]:
    """Return the smallest and the largest value that can be sampled."""
    if isinstance(setting, float | int):
        return float(setting), float(setting)
    if isinstance(setting, Choice):
        return min(setting.values), max(setting.values)
    return setting.low, setting.high


def require_setting(name: str, setting: Setting, low: float, high: float = math.inf, *, is_open: bool = False) -> None:
    """Raise a ValueError unless a setting stays in [low, high], or in (low, high] if `is_open`."""
    smallest, largest = bounds(setting)
    if not low <= smallest <= largest <= high or (is_open and smallest == low) or largest == math.inf:
        side = "(" if is_open else "["
        end = "infinity)" if high == math.inf else f"{high:g}]"
        raise ValueError(f"{name} is {setting}, but must lie in {side}{low:g}, {end}")


def derive_seed(*key: int | str) -> int:
    """Return a 63-bit seed that depends on the whole key, such as (seed of the population, "order", group, epoch)."""
    text = "\0".join(map(str, key))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
