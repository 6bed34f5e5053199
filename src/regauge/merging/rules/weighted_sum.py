"""The sum of networks with weights that are not normalized."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from regauge.merging.rule import Rule, Target, as_given, weighted_sum


@dataclass(frozen=True)
class WeightedSum(Rule):
    """The sum of all networks with weights of any sign and any sum, one by default.

    The rule is mergekit's `linear` without normalization.
    """

    has_shares = False

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Return the given weights."""
        return as_given(weights, count)

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the weighted sum of the task vectors."""
        return weighted_sum(tensors, factors)
