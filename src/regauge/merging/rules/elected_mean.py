"""The mean of task vectors that agree with an elected sign."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.core.interpolation import shares_of
from regauge.merging.rule import Target, VectorRule, as_given, weighted_sum
from regauge.merging.settings import Number, require_scale

LEAST_SHARE = 1e-6
"""A threshold. If the sum of weights is a smaller share of the largest weight, weights of opposite signs cancel, and
the sum may be a rounding error."""


@dataclass(frozen=True)
class ElectedMean(VectorRule):
    """The entrywise mean of the task vectors that agree with an elected sign.

    The elected sign of an entry is the sign of the weighted sum over networks. A network agrees if the product of its
    entry and its weight has the elected sign. The result is `base + scale * mean`, where `mean` is the weighted mean
    over the networks that agree. The mean is zero if no network agrees or the weighted sum is zero. If some weights are
    negative and the weights of the agreeing networks sum to zero, their weighted sum is used instead of the mean.

    Attributes:
        scale: The factor of the mean.
        is_normalized: Whether the agreeing entries are averaged; otherwise they are summed with the given weights.

    References:
        Yadav et al. (2023), TIES-Merging, section 4, steps 2 and 3.
    """

    scale: Number = 1.0
    is_normalized: bool = True

    def __post_init__(self) -> None:
        require_scale(self.scale)

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Return shares if entries are averaged. For a sum, or if a weight is negative, return the given weights."""
        given = as_given(weights, count)
        if min(given) < 0:
            return given
        shares = shares_of(weights, count)
        return shares if self.is_normalized else given

    def held(self, count: int) -> int:
        """Return the number of tensors held at once: all task vectors, their signs, and two sums."""
        return count + 5

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the mean, or the sum, of the entries that agree with the elected sign."""
        vectors = list(tensors)
        signs = weighted_sum((vector.clone() for vector in vectors), factors).sign_()
        sums, masses = sum_agreeing(vectors, factors, signs)
        if self.is_normalized:
            least = LEAST_SHARE * max(abs(factor) for factor in factors)
            sums /= masses.masked_fill_(masses.abs() <= least, 1.0)
        return sums.mul_(target.number(self.scale))


def sum_agreeing(vectors: Sequence[Tensor], factors: Sequence[float], signs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the entries that agree with the elected signs, and the sum of their factors."""
    sums, masses = torch.zeros_like(signs), torch.zeros_like(signs)
    for vector, factor in zip(vectors, factors, strict=True):
        agrees = (vector.sign().mul_(math.copysign(1, factor)) == signs) & (signs != 0)
        sums += torch.where(agrees, vector, 0.0).mul_(factor)
        masses += agrees.to(masses).mul_(factor)
    return sums, masses
