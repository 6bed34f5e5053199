"""Model breadcrumbs: task vectors without their largest and smallest entries."""

from dataclasses import dataclass, field

from torch import Tensor

from regauge.merging.rule import Target, VectorRule
from regauge.merging.rules.sparse_rule import SparseRule, keep_magnitudes, require_density, require_norm, restore_norm
from regauge.merging.rules.task_arithmetic import TaskArithmetic
from regauge.merging.settings import Numbers, require_numbers


@dataclass(frozen=True)
class Breadcrumbs(SparseRule):
    """Task vectors without their largest and smallest entries, added to the base.

    In each tensor, a task vector has n entries. The `gamma n` entries of largest magnitude are dropped as outliers. The
    `density n` largest entries after the outliers are kept. If gamma and density together exceed one, fewer outliers
    are dropped. At least one entry is kept. Entries as large as the largest or as the smallest kept entry are also
    kept.

    Attributes:
        density: The share of entries that are kept, above zero and at most one, as one number or one for each network.
        gamma: The share of entries that are dropped as outliers, in [0, 1), as one number or one for each network.
        rule: The rule that combines the reduced task vectors: the sum, or `ElectedMean()`.
        keeps_norm: The order (1, 2 or `math.inf`) of a norm. The kept entries are multiplied by one factor, which gives
            them the same norm as the whole task vector. None for no factor.

    References:
        Davari and Belilovsky (2024), Model breadcrumbs, section 3: masks of each layer between two quantiles of the
        magnitudes. As in mergekit, `density` is the share of kept entries, not the share of dropped small entries.
    """

    density: Numbers = 0.1
    gamma: Numbers = 0.01
    rule: VectorRule = field(default_factory=TaskArithmetic)
    keeps_norm: float | None = None

    def __post_init__(self) -> None:
        require_density(self.density)
        require_numbers("gamma", self.gamma, lambda x: 0 <= x < 1, "the share of the largest entries, in [0, 1)")
        require_norm(self.keeps_norm)

    def check(self, target: Target, count: int) -> None:
        """Raise a ValueError unless each setting has one number, or one for each network."""
        target.numbers(self.density, count)
        target.numbers(self.gamma, count)
        self.rule.check(target, count)

    def sparsify(self, vector: Tensor, k: int, count: int, target: Target) -> Tensor:
        """Return the task vector without the outliers and without the small entries."""
        kept = keep_magnitudes(vector, *(target.numbers(x, count)[k] for x in (self.density, self.gamma)))
        return restore_norm(kept, vector, self.keeps_norm)
