"""Task arithmetic: the weighted sum of task vectors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from regauge.merging.rule import Target, VectorRule, as_given, weighted_sum
from regauge.merging.settings import Number, require_scale

LEAST_SUM = 1e-8
"""The smallest sum by which weights are divided to normalize them."""


@dataclass(frozen=True)
class TaskArithmetic(VectorRule):
    """The base plus the weighted sum of the task vectors: `base + scale * sum_k w_k (network_k - base)`.

    The weights are one by default. Negative weights remove what a network has learned.

    Attributes:
        scale: The factor of the sum.
        is_normalized: Whether the weights are divided by their sum.

    References:
        Ilharco et al. (2023), Editing models with task arithmetic, section 2.
    """

    scale: Number = 1.0
    is_normalized: bool = False

    def __post_init__(self) -> None:
        require_scale(self.scale)

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Return the given weights, or the weights divided by their sum."""
        given = as_given(weights, count)
        if not self.is_normalized:
            return given
        if abs(sum(given)) < LEAST_SUM:
            raise ValueError(f"the weights {list(given)} sum to {sum(given)} and cannot be normalized; change them")
        return tuple(w / sum(given) for w in given)

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the weighted sum of the networks, or of the task vectors if a base is given."""
        scale = target.number(self.scale)
        return weighted_sum(tensors, [scale * factor for factor in factors])
