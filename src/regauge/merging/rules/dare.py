"""DARE: random entries of the task vectors are dropped."""

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
    """Task vectors in which random entries are zero and all other entries are enlarged, which preserves the
    expectation.

    Each entry is dropped with probability `drop`, and otherwise divided by `1 - drop`. After entries are dropped,
    another rule combines the task vectors. If the other rule is `TaskArithmetic`, the result is unbiased: its
    expectation equals the result without dropped entries.

    Attributes:
        drop: The probability that an entry is dropped, in [0, 1), as one number or one for each network.
        rule: The rule that combines the task vectors after entries are dropped. `ElectedMean()` elects signs.
            `Ties(density)` keeps only the largest entries and then elects signs.
        is_rescaled: Whether the kept entries are enlarged. Without enlarging, the expectation of the task vectors
            shrinks.

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
        """Whether entries are dropped at random."""
        return self.drop != 0

    def check(self, target: Target, count: int) -> None:
        """Raise a ValueError unless there is one probability, or one for each network."""
        target.numbers(self.drop, count)
        self.rule.check(target, count)

    def splits(self, shape: Sequence[int]) -> bool:
        """Return whether the combining rule accepts chunks. Random dropping accepts chunks, because entries are
        independent.
        """
        return self.rule.splits(shape)

    def sparsify(self, vector: Tensor, k: int, count: int, target: Target) -> Tensor:
        """Return the task vector with dropped entries set to zero."""
        drop = target.numbers(self.drop, count)[k]
        if not drop:
            return vector
        enlarged = vector.div_(1 - drop) if self.is_rescaled else vector
        return torch.where(target.draw(k, vector) < drop, 0.0, enlarged)
