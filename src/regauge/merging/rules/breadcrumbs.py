"""Task vectors without their largest and smallest entries."""

from dataclasses import dataclass, field

from torch import Tensor

from regauge.merging.rule import Target, VectorRule
from regauge.merging.rules.sparse_rule import SparseRule, keep_magnitudes, require_density, require_norm, restore_norm
from regauge.merging.rules.task_arithmetic import TaskArithmetic
from regauge.merging.settings import Numbers, require_numbers


@dataclass(frozen=True)
class Breadcrumbs(SparseRule):
    """Drop the largest and the smallest entries of the task vectors, and add what is between.

    For each tensor: of the n entries of a task vector the `gamma n` of the largest magnitude are dropped as outliers,
    and of the others the `density n` largest are kept. Where both do not fit, fewer outliers are dropped. One entry is
    kept at least, and all that are as large as the largest or the smallest that is kept.

    Attributes:
        density: Share of entries that are kept, above zero and at most one; one number for each network, too.
        gamma: Share of entries that are dropped as outliers, in [0, 1); one number for each network, too.
        rule: The rule that combines the task vectors afterwards: the sum, or `ElectedMean()`.
        keeps_norm: The norm (1, 2 or `math.inf`) that what is kept gets back, by a factor; None for no factor.

    References:
        Davari and Belilovsky (2024), Model breadcrumbs, section 3: masks of each layer between two quantiles of the
        magnitudes. The share that is kept is given here as in mergekit, not the share of the smallest.
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
        """Densities and shares of outliers are as many as the networks, or one."""
        target.numbers(self.density, count)
        target.numbers(self.gamma, count)
        self.rule.check(target, count)

    def sparsify(self, vector: Tensor, k: int, count: int, target: Target) -> Tensor:
        """Keep the entries below the outliers and above the small ones."""
        kept = keep_magnitudes(vector, *(target.numbers(x, count)[k] for x in (self.density, self.gamma)))
        return restore_norm(kept, vector, self.keeps_norm)
