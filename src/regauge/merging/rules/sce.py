"""SCE: entries on which networks differ most, summed by the sizes of task vectors where signs agree."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.merging.rule import Target, VectorRule, equal_shares
from regauge.merging.rules.elected_mean import sum_agreeing
from regauge.merging.rules.sparse_rule import require_density
from regauge.merging.settings import Number

LEAST_SQUARES = 1e-6
"""Task vectors whose mean squares have a smaller sum weigh alike."""
LEAST_MASS = 1e-6
"""The smallest divisor of agreeing entries."""


@dataclass(frozen=True)
class Sce(VectorRule):
    """Select the entries that vary most between networks, weigh networks by their size, and erase minority signs.

    For each tensor: of the n entries on which the task vectors differ, the `density n` with the largest variance over
    networks are kept in all of them. Each network weighs as the mean of the squares of what is kept. An entry's sign is
    that of the plain sum over networks; the result is `base + mean`, the weighted mean over those networks whose entry
    has this sign, and zero without such networks.

    Attributes:
        density: Share of the entries on which networks differ that is kept, above zero and at most one; with one the
            entries on which they agree are kept, too.

    References:
        Wan et al. (2024), FuseChat, on SCE (select, calculate, erase). As in mergekit, networks weigh alike where
        the sum of their mean squares is below 1e-6, and weights are divided by 1e-6 at least.
    """

    density: Number = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.density, tuple):
            raise ValueError(f"density is {self.density}, but Sce selects the same entries of all networks; give one")
        require_density(self.density)

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Equal shares."""
        return equal_shares(self, weights, count)

    def splits(self, shape: Sequence[int]) -> bool:
        """Squares and the order of variances are taken over whole tensors."""
        return False

    def held(self, count: int) -> int:
        """Return tensors held at once: all task vectors; mean, variance and copies to sort them, or signs, sums and
        masses."""
        return count + 6

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the mean of what is selected and agrees."""
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
    """Return whether the variance of an entry over networks is not among the largest; all are dropped where none is
    kept."""
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
    variance.masked_fill_(~differs, -1.0)  # rounding leaves equal entries a variance
    return variance < variance.flatten().kthvalue(variance.numel() - kept + 1).values
