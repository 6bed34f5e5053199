"""Nearswap: a base takes the entries of a network that are near its own."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from regauge.merging.rule import Target, VectorRule, equal_shares
from regauge.merging.settings import Number, require_numbers

LEAST_DISTANCE = 1e-6
"""Entries that are nearer count as so far apart."""


@dataclass(frozen=True)
class NearSwap(VectorRule):
    """The base, with the entries of another network where they are at most `reach` apart.

    Entries that are farther apart move by `reach` towards the network: for a difference d the base moves by

        min(1, reach / max(|d|, 1e-6)) d

    Attributes:
        reach: The largest move of an entry, not negative.

    References:
        Alchemonaut (2024), QuartetAnemoi-70B; mergekit's `nearswap`, where reach is called t.
    """

    reach: Number = 1e-4

    most = 1

    def __post_init__(self) -> None:
        meaning = "how far an entry moves at most, finite and not negative"
        require_numbers("reach", self.reach, lambda x: 0 <= x < math.inf, meaning)

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Return one for the only network."""
        return equal_shares(self, weights, count)

    def held(self, count: int) -> int:
        """Return tensors held at once: the difference, and the share of it."""
        return 2

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the share of the difference."""
        (vector,) = tensors
        share = vector.abs().clamp_(min=LEAST_DISTANCE).reciprocal_().mul_(target.number(self.reach)).clamp_(max=1)
        return share.mul_(vector)
