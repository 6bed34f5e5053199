"""The base class of rules that keep some entries of each task vector, and functions that these rules share."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from regauge.merging.rule import Target, VectorRule
from regauge.merging.settings import Numbers, require_numbers


class SparseRule(VectorRule):
    """A rule that keeps some entries of each task vector, and then combines the task vectors by another rule.

    Attributes:
        rule: The rule that combines the task vectors.
    """

    rule: VectorRule

    @abstractmethod
    def sparsify(self, vector: Tensor, k: int, count: int, target: Target) -> Tensor:
        """Return the sparsified task vector of network k among `count` networks, or a chunk of it."""

    @property
    def is_random(self) -> bool:
        """Whether this rule or the combining rule uses random numbers."""
        return self.rule.is_random

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Return the factors of the combining rule."""
        return self.rule.factors(weights, count)

    def check(self, target: Target, count: int) -> None:
        """Check the settings of the combining rule."""
        self.rule.check(target, count)

    def splits(self, shape: Sequence[int]) -> bool:
        """Return False, because magnitudes are compared within whole tensors."""
        return False

    def held(self, count: int) -> int:
        """Return the number of tensors held at once, including the tensors that the combining rule holds."""
        return self.rule.held(count) + 3

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Combine the sparsified task vectors by the combining rule."""
        count = len(factors)
        kept = (self.sparsify(vector, k, count, target) for k, vector in enumerate(tensors))
        return self.rule.combine(kept, factors, target)


def keep_magnitudes(vector: Tensor, density: float, gamma: float) -> Tensor:
    """Return a vector in which all entries are zero except the largest ones after outliers are removed.

    `density` is the share of kept entries, and `gamma` is the share of the largest entries, which are outliers.
    """
    magnitudes = vector.abs()
    flat, count = magnitudes.flatten(), vector.numel()
    kept = max(1, round(density * count))
    largest = min(round(gamma * count), count - kept)
    if kept == count:
        return vector
    least = flat.kthvalue(count - largest - kept + 1).values
    result = torch.where(magnitudes >= least, vector, 0.0)
    if not largest:
        return result
    return result.masked_fill_(magnitudes > flat.kthvalue(count - largest).values, 0.0)


def restore_norm(kept: Tensor, vector: Tensor, order: float | None) -> Tensor:
    """Rescale a task vector with dropped entries to the norm (of order 1, 2 or infinity) of the whole vector.

    If the order is None, the vector is returned unchanged.
    """
    if order is None or kept is vector:
        return kept
    before, after = (float(torch.linalg.vector_norm(one, order, dtype=torch.float64)) for one in (vector, kept))
    return kept.mul_(before / after) if after else kept


def require_norm(order: float | None) -> None:
    """Raise a ValueError unless the order of a norm is 1, 2, infinity or None."""
    if order not in (None, 1, 2, math.inf):
        raise ValueError(f"keeps_norm is {order}; it is the order of a norm, 1, 2 or math.inf, or None; choose one")


def require_certain(rule: VectorRule) -> None:
    """Raise a ValueError if the combining rule of a random rule is also random."""
    if rule.is_random:
        raise ValueError(f"{rule} drops entries at random, and so does its inner rule; drop entries only once")


def require_density(density: Numbers) -> None:
    """Raise a ValueError unless the share of kept entries is above zero and at most one."""
    require_numbers("density", density, lambda x: 0 < x <= 1, "the share of entries that are kept, in (0, 1]")
