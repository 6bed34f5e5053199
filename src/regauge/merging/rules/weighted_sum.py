"""The weighted sum of networks, whose weights are not normalized."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from regauge.merging.rule import Rule, Target, as_given, weighted_sum


@dataclass(frozen=True)
class WeightedSum(Rule):
    """The weighted sum of all networks. Weights may have any sign and any sum, and are one by default.

    The rule is equal to mergekit's `linear` without normalization.
    """

    has_shares = False

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Return the given weights."""
        return as_given(weights, count)

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the weighted sum of the networks, or of the task vectors if a base is given."""
        return weighted_sum(tensors, factors)
