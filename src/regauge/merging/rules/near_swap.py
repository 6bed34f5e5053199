"""Nearswap, in which a base gets the entries of a network that are close to its own."""

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
    """The base, moved entry by entry towards another network by at most `reach`.

    If two entries differ by at most `reach`, the result has the entry of the network. Otherwise the base moves by
    `reach` towards the network. For a difference d, the base moves by

        min(1, reach / max(|d|, 1e-6)) d

    Attributes:
        reach: The largest move of an entry, which may not be negative.

    References:
        Alchemonaut (2024), QuartetAnemoi-70B; mergekit's `nearswap`, which calls reach t.
    """

    reach: Number = 1e-4

    most = 1

    def __post_init__(self) -> None:
        meaning = "how far an entry moves at most, finite and not negative"
        require_numbers("reach", self.reach, lambda x: 0 <= x < math.inf, meaning)

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Return the factor one for the only network."""
        return equal_shares(self, weights, count)

    def held(self, count: int) -> int:
        """Return the number of tensors held at once: the difference, and the share of the difference."""
        return 2

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the difference times the share by which the base moves."""
        (vector,) = tensors
        share = vector.abs().clamp_(min=LEAST_DISTANCE).reciprocal_().mul_(target.number(self.reach)).clamp_(max=1)
        return share.mul_(vector)
