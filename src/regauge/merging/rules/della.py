"""DELLA: random entries of the task vectors are dropped, small entries with larger probability."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regauge.merging.rule import Target, VectorRule
from regauge.merging.rules.elected_mean import ElectedMean
from regauge.merging.rules.sparse_rule import SparseRule, require_certain, require_density
from regauge.merging.settings import Numbers, require_numbers


@dataclass(frozen=True)
class Della(SparseRule):
    """Task vectors whose random entries are dropped, small ones more often. The kept entries are enlarged.

    A row of a tensor consists of the entries with one index along the first axis. The entries of each row are ranked by
    magnitude. The probability of keeping an entry rises linearly with the rank. The probability is `density - epsilon`
    for the smallest entry and `density + epsilon` for the largest. Kept entries are divided by their probability of
    being kept, which preserves the expectation of every entry. After entries are dropped, another rule combines the
    task vectors.

    Attributes:
        density: The mean probability of keeping an entry, above zero and at most one, as one number or one for each
            network. If the density is one, no entry is dropped.
        epsilon: The largest difference between the probabilities and the density. `density - epsilon` must be above
            zero, and `density + epsilon` at most one. As in mergekit, epsilon is half of the paper's window.
        rule: The rule that combines the task vectors after entries are dropped: `ElectedMean()`, which averages entries
            that agree with an elected sign, or the sum.
        is_rescaled: Whether the kept entries are enlarged. If False, the expectation of the task vectors shrinks.

    References:
        Deep et al. (2024), DELLA-Merging, section 3 (MagPrune, elect, fuse).
    """

    density: Numbers = 0.5
    epsilon: Numbers = 0.15
    rule: VectorRule = field(default_factory=ElectedMean)
    is_rescaled: bool = True

    def __post_init__(self) -> None:
        require_density(self.density)
        meaning = "how far probabilities differ from the density, and cannot be negative"
        require_numbers("epsilon", self.epsilon, lambda x: 0 <= x < math.inf, meaning)
        require_certain(self.rule)

    @property
    def is_random(self) -> bool:
        """Whether entries are dropped at random."""
        return self.density != 1

    def check(self, target: Target, count: int) -> None:
        """Raise a ValueError unless all probabilities are above zero and at most one."""
        densities, ranges = target.numbers(self.density, count), target.numbers(self.epsilon, count)
        for density, epsilon in zip(densities, ranges, strict=True):
            if density < 1 and not (epsilon < density and density + epsilon <= 1):
                raise ValueError(
                    f"the density {density:g} with the epsilon {epsilon:g} makes probabilities from "
                    f"{density - epsilon:g} to {density + epsilon:g} at {target.name!r}; keep both above 0 and at most "
                    "1: choose a smaller epsilon"
                )
        self.rule.check(target, count)

    def splits(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor has rows, which are ranked independently, and the combining rule accepts chunks."""
        return len(shape) > 1 and self.rule.splits(shape)

    def held(self, count: int) -> int:
        """Return the number of tensors held at once, including magnitudes, ranks, probabilities and noise."""
        return self.rule.held(count) + 8

    def sparsify(self, vector: Tensor, k: int, count: int, target: Target) -> Tensor:
        """Return the task vector with dropped entries set to zero."""
        density, epsilon = (target.numbers(x, count)[k] for x in (self.density, self.epsilon))
        if density == 1:
            return vector
        rows = vector.reshape(vector.shape[0] if vector.ndim > 1 else 1, -1)
        width = rows.shape[1]
        order = rows.abs().argsort(dim=1, stable=True)
        middle = torch.full((1,), density, dtype=rows.dtype)
        rising = torch.linspace(density - epsilon, density + epsilon, width, dtype=rows.dtype) if width > 1 else middle
        keep = torch.empty_like(rows).scatter_(1, order, rising.to(rows.device).expand_as(rows))
        enlarged = rows / keep if self.is_rescaled else rows
        return torch.where(target.draw(k, rows) < keep, enlarged, 0.0).reshape(vector.shape)
