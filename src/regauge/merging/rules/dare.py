"""DARE: task vectors without entries dropped at random."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regauge.merging.rule import Target, VectorRule
from regauge.merging.rules.sparse_rule import SparseRule, require_certain
from regauge.merging.rules.task_arithmetic import TaskArithmetic
from regauge.merging.settings import Numbers, require_numbers


@dataclass(frozen=True)
class Dare(SparseRule):
    """Drop entries of the task vectors at random and enlarge the others, which keeps their expectation.

    Each entry is dropped with probability `drop`, else divided by `1 - drop`; then another rule combines the task
    vectors. With `TaskArithmetic` the result is unbiased: its expectation is that of no drop at all.

    Attributes:
        drop: Probability, in [0, 1); one number for each network, too.
        rule: Combines the task vectors afterwards. `ElectedMean()` elects signs; `Ties(density)` trims before.
        is_rescaled: Whether what is kept is enlarged; else the expectation shrinks.

    References:
        Yu et al. (2024), Language models are super Mario, section 3.
    """

    drop: Numbers = 0.5
    rule: VectorRule = field(default_factory=TaskArithmetic)
    is_rescaled: bool = True

    def __post_init__(self) -> None:
        meaning = "the probability of an entry to be dropped, in [0, 1)"
        require_numbers("drop", self.drop, lambda x: 0 <= x < 1, meaning)
        require_certain(self.rule)

    @property
    def is_random(self) -> bool:
        """Entries are drawn unless none is dropped."""
        return self.drop != 0

    def check(self, target: Target, count: int) -> None:
        """The probabilities are as many as the networks, or one."""
        target.numbers(self.drop, count)
        self.rule.check(target, count)

    def splits(self, shape: Sequence[int]) -> bool:
        """Entries are dropped one by one."""
        return self.rule.splits(shape)

    def sparsify(self, vector: Tensor, k: int, count: int, target: Target) -> Tensor:
        """Return the entries that are not dropped."""
        drop = target.numbers(self.drop, count)[k]
        if not drop:
            return vector
        enlarged = vector.div_(1 - drop) if self.is_rescaled else vector
        return torch.where(target.draw(k, vector) < drop, 0.0, enlarged)
