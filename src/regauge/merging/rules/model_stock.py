"""Model Stock: the base plus a fraction of the mean task vector. The angles between task vectors set the fraction."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.merging.rule import Target, VectorRule, equal_shares, weighted_sum


@dataclass(frozen=True)
class ModelStock(VectorRule):
    """The base plus a fraction of the mean task vector. The angles between the task vectors determine the fraction.

    Let `cos` be the mean of the cosines over all pairs of task vectors. For each tensor of n networks, the result is

        base + t * mean_k (network_k - base),  t = n cos / (1 + (n - 1) cos)

    If the task vectors are parallel, t is one, and the result is the mean of the networks. If the task vectors are
    orthogonal, t is zero, and the result is the base. At obtuse angles t is also set to zero, because the formula would
    lead away from the networks.

    Attributes:
        by_rows: Whether t is computed for each row of a tensor (one index along the first axis) instead of for whole
            tensors.

    References:
        Jang et al. (2024), Model Stock, section 4, equation 2 for two networks and appendix for n.
    """

    by_rows: bool = False

    least = 2

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Return equal shares."""
        return equal_shares(self, weights, count)

    def splits(self, shape: Sequence[int]) -> bool:
        """Return whether each row of a tensor has its own t."""
        return self.by_rows and len(shape) > 1

    def held(self, count: int) -> int:
        """Return the number of tensors held at once: all task vectors, and the product of two task vectors."""
        return count + 2

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the mean task vector times t."""
        vectors = list(tensors)
        rows = vectors[0].shape[0] if self.by_rows and vectors[0].ndim > 1 else 1
        norms = [torch.linalg.vector_norm(v.reshape(rows, -1), dim=1, dtype=torch.float64) for v in vectors]
        cosines = []
        for i, one in enumerate(vectors):
            for j in range(i + 1, len(vectors)):
                products = (one * vectors[j]).reshape(rows, -1).sum(1, dtype=torch.float64)
                scales = norms[i] * norms[j]
                cosines.append(torch.where(scales > 0, products / scales.masked_fill(scales == 0, 1.0), 0.0))
        cosine, count = torch.stack(cosines).mean(0).clamp(0, 1), len(vectors)
        share = count * cosine / (1 + (count - 1) * cosine)
        mean = weighted_sum(iter(vectors), factors)
        return mean.mul_(share.to(mean).reshape(-1, *[1] * (mean.ndim - 1)) if rows > 1 else float(share[0]))
