"""DELLA: task vectors without entries dropped at random, small ones more often."""

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
    """Drop entries of the task vectors at random, small ones more often, and enlarge the others.

    In each row of a tensor, what has one index along its first axis, the entries are ranked by magnitude. The
    probability to be kept rises evenly with the rank from `density - epsilon` for the smallest to `density + epsilon`
    for the largest; kept entries are divided by it, which keeps the expectation of every entry. Then another rule
    combines them.

    Attributes:
        density: Mean probability of an entry to be kept, above zero and at most one, where nothing is dropped; one
            number for each network, too.
        epsilon: Largest difference of the probabilities from it; `density` minus and plus it are above zero and at most
            one. It is half of the window of the paper, as in mergekit.
        rule: The rule that combines the task vectors afterwards: what agrees with an elected sign, or the sum.
        is_rescaled: Whether what is kept is enlarged; else the expectation shrinks.

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
        """Entries are drawn unless all are kept."""
        return self.density != 1

    def check(self, target: Target, count: int) -> None:
        """All probabilities are above zero and at most one."""
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
        """Rows are ranked one by one."""
        return len(shape) > 1 and self.rule.splits(shape)

    def held(self, count: int) -> int:
        """Return tensors held at once: those of the combining rule, magnitudes, integer ranks twice, probabilities,
        noise."""
        return self.rule.held(count) + 8

    def sparsify(self, vector: Tensor, k: int, count: int, target: Target) -> Tensor:
        """Return the entries that are not dropped."""
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
