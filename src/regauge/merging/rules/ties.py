"""TIES: the mean of the largest entries of task vectors that agree in sign."""

from dataclasses import dataclass

from torch import Tensor

from regauge.merging.rule import Target
from regauge.merging.rules.elected_mean import ElectedMean
from regauge.merging.rules.sparse_rule import SparseRule, keep_magnitudes, require_density, require_norm, restore_norm
from regauge.merging.settings import Number, Numbers, require_scale


@dataclass(frozen=True)
class Ties(SparseRule):
    """The mean of the largest entries of the task vectors that agree with an elected sign.

    In each tensor, every task vector keeps the share `density` of its entries: the entries of largest magnitude. At
    least one entry is kept. Ties with the smallest kept magnitude are also kept. Next, `ElectedMean` elects a sign for
    each entry and combines the task vectors.

    Attributes:
        density: The share of kept entries, above zero and at most one, as one number or one for each network.
        scale: The factor of the mean.
        is_normalized: Whether the agreeing entries are averaged; otherwise they are summed with the given weights.
        keeps_norm: The order (1, 2 or `math.inf`) of a norm. The kept entries are multiplied by one factor, which gives
            them the same norm as the whole task vector. None for no factor.

    References:
        Yadav et al. (2023), TIES-Merging, section 4 and algorithm 1. The paper keeps the largest entries of the whole
        network. `Ties` instead keeps the largest entries of each tensor, because the paper's rule may drop all entries
        of layers with small weights.
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
        """The rule that averages the entries that agree with the elected sign."""
        return ElectedMean(self.scale, self.is_normalized)

    def check(self, target: Target, count: int) -> None:
        """Raise a ValueError unless there is one density, or one for each network."""
        target.numbers(self.density, count)

    def sparsify(self, vector: Tensor, k: int, count: int, target: Target) -> Tensor:
        """Return the task vector with only its entries of largest magnitude."""
        kept = keep_magnitudes(vector, target.numbers(self.density, count)[k], 0.0)
        return restore_norm(kept, vector, self.keeps_norm)
