"""SCE: the mean of the entries that differ most between networks, weighted by the size of task vectors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.merging.rule import Target, VectorRule, equal_shares
from regauge.merging.rules.elected_mean import sum_agreeing
from regauge.merging.rules.sparse_rule import require_density
from regauge.merging.settings import Number

LEAST_SQUARES = 1e-6
"""A threshold. If the sum of the task vectors' mean squares is smaller, all networks get equal weights."""
LEAST_MASS = 1e-6
"""The smallest sum of weights by which agreeing entries are divided."""


@dataclass(frozen=True)
class Sce(VectorRule):
    """The weighted mean of the entries that vary most between networks and agree with an elected sign.

    In each tensor, let n be the number of entries on which the task vectors differ. The `density n` entries with the
    largest variance over networks are kept in all task vectors. The weight of a network is the mean square of its kept
    entries. The elected sign of an entry is the sign of the unweighted sum over networks. The result is `base + mean`,
    where `mean` is the weighted mean over the networks whose entry has the elected sign. The mean is zero if no
    network's entry has the elected sign.

    Attributes:
        density: The share of kept entries, among the entries on which networks differ; above zero and at most one. If
            the density is one, entries on which the networks agree are also kept.

    References:
        Wan et al. (2024), FuseChat, on SCE (select, calculate, erase). As in mergekit, networks have equal weights if
        the sum of their mean squares is below 1e-6. As in mergekit, the divisor of a mean is at least 1e-6.
    """

    density: Number = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.density, tuple):
            raise ValueError(f"density is {self.density}, but Sce selects the same entries of all networks; give one")
        require_density(self.density)

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Return equal shares."""
        return equal_shares(self, weights, count)

    def splits(self, shape: Sequence[int]) -> bool:
        """Return False, because mean squares and variance ranks are computed over whole tensors."""
        return False

    def held(self, count: int) -> int:
        """Return the number of tensors held at once, including all task vectors."""
        return count + 6

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the weighted mean of the kept entries that agree with the elected sign."""
        vectors, density = list(tensors), target.number(self.density)
        if density < 1:
            is_dropped = find_dropped(vectors, density)
            vectors = [vector.masked_fill_(is_dropped, 0.0) for vector in vectors]
        size = max(1, vectors[0].numel())
        squares = [float(torch.linalg.vector_norm(v, dtype=torch.float64)) ** 2 / size for v in vectors]
        total = sum(squares)
        weights = [one / total for one in squares] if total >= LEAST_SQUARES else factors
        signs = vectors[0].clone()
        for vector in vectors[1:]:
            signs += vector
        sums, masses = sum_agreeing(vectors, weights, signs.sign_())
        return sums.div_(masses.clamp_(min=LEAST_MASS))


def find_dropped(vectors: Sequence[Tensor], density: float) -> Tensor:
    """Return a mask of the entries whose variance over networks is not among the largest."""
    mean = vectors[0].clone()
    for vector in vectors[1:]:
        mean += vector
    mean /= len(vectors)
    variance, differs = torch.zeros_like(mean), torch.zeros_like(mean, dtype=torch.bool)
    for vector in vectors:
        variance += (vector - mean).square_()
        differs |= vector != vectors[0]
    kept = int(int(differs.sum()) * density)
    if not kept:
        return torch.ones_like(differs)
    variance.masked_fill_(~differs, -1.0)  # rounding makes the variance of equal entries nonzero
    return variance < variance.flatten().kthvalue(variance.numel() - kept + 1).values
