"""TIES: the largest entries of task vectors, the mean of what agrees in sign."""

from dataclasses import dataclass

from torch import Tensor

from regauge.merging.rule import Target
from regauge.merging.rules.elected_mean import ElectedMean
from regauge.merging.rules.sparse_rule import SparseRule, keep_magnitudes, require_density, require_norm, restore_norm
from regauge.merging.settings import Number, Numbers, require_scale


@dataclass(frozen=True)
class Ties(SparseRule):
    """Keep the largest entries of the task vectors, elect a sign for each entry, and average what agrees with it.

    For each tensor: every task vector keeps the share `density` of its entries, those of the largest magnitude
    (one entry at least; all that are as large as the smallest that is kept). Then `ElectedMean` combines them.

    Attributes:
        density: Share of entries that are kept, above zero and at most one; one number for each network, too.
        scale: Factor of the mean.
        is_normalized: Whether what agrees is averaged; else it is summed with the weights as they are.
        keeps_norm: The norm (1, 2 or `math.inf`) that what is kept gets back, by a factor; None for no factor.

    References:
        Yadav et al. (2023), TIES-Merging, section 4 and algorithm 1; there the largest entries of the whole network
        are kept, here of each tensor, so that layers of small weights take part.
    """

    density: Numbers = 0.2
    scale: Number = 1.0
    is_normalized: bool = True
    keeps_norm: float | None = None

    def __post_init__(self) -> None:
        require_scale(self.scale)
        require_density(self.density)
        require_norm(self.keeps_norm)

    @property
    def rule(self) -> ElectedMean:  # type: ignore[override]
        """The mean of what agrees."""
        return ElectedMean(self.scale, self.is_normalized)

    def check(self, target: Target, count: int) -> None:
        """The densities are as many as the networks, or one."""
        target.numbers(self.density, count)

    def sparsify(self, vector: Tensor, k: int, count: int, target: Target) -> Tensor:
        """Keep the entries of largest magnitude."""
        kept = keep_magnitudes(vector, target.numbers(self.density, count)[k], 0.0)
        return restore_norm(kept, vector, self.keeps_norm)
