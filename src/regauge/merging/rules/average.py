"""The weighted mean of networks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from regauge.merging.rule import Rule, Target, weighted_sum


@dataclass(frozen=True)
class Average(Rule):
    """The weighted mean of all networks, which is the uniform soup if the weights are equal.

    References:
        Wortsman et al. (2022), Model soups, section 2; Ainsworth et al. (2023), Git Re-Basin.
    """

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the weighted mean."""
        return weighted_sum(tensors, factors)
