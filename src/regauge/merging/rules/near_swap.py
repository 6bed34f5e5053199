"""Nearswap: an entry of a base is replaced by the entry of another network if both entries are close."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from regauge.merging.rule import Target, VectorRule, equal_shares
from regauge.merging.settings import Number, require_numbers

LEAST_DISTANCE = 1e-6
"""The smallest distance of two entries by which a number is divided, to avoid division by zero."""


@dataclass(frozen=True)
class NearSwap(VectorRule):
    """The base, changed entry by entry towards another network by at most `reach`.

    If two entries differ by at most `reach`, the result has the entry of the network. If two entries differ by more
    than `reach`, the base's entry is changed by `reach` towards the network. Let d be the difference between the
    network's entry and the base's entry. The base's entry is changed by

        min(1, reach / max(|d|, 1e-6)) d

    Attributes:
        reach: The largest change of an entry, which may not be negative.

    References:
        Alchemonaut (2024), QuartetAnemoi-70B; mergekit's `nearswap`, which calls reach t.
    """

    reach: Number = 1e-4

    most = 1

    def __post_init__(self) -> None:
        meaning = "how far an entry moves at most, finite and not negative"
        require_numbers("reach", self.reach, lambda x: 0 <= x < math.inf, meaning)

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Return the factor of each network other than the base: one, because there is only one such network."""
        return equal_shares(self, weights, count)

    def held(self, count: int) -> int:
        """Return the number of tensors held at once: the difference, and the fraction of the difference."""
        return 2

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the difference times the fraction by which the base is changed."""
        (vector,) = tensors
        share = vector.abs().clamp_(min=LEAST_DISTANCE).reciprocal_().mul_(target.number(self.reach)).clamp_(max=1)
        return share.mul_(vector)
