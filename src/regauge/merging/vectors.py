"""Rules for task vectors, the differences of networks from a base: what is kept of each, and how they are added."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regauge.core.interpolation import shares_of
from regauge.merging.means import as_given, equal_shares, require_scale
from regauge.merging.rule import Rule, Target, weighted_sum
from regauge.merging.settings import Number, Numbers, require_numbers

LEAST_SUM = 1e-8
"""Weights whose sum is smaller cannot be normalized."""
LEAST_SHARE = 1e-6
"""Weights of opposite signs cancel where their sum is a smaller share of the largest one; it may be rounding alone."""


class VectorRule(Rule):
    """A rule that needs a base; already one task vector makes sense."""

    base, least, has_shares = "needed", 1, False


@dataclass(frozen=True)
class TaskArithmetic(VectorRule):
    """The base plus the weighted sum of the task vectors: `base + scale * sum_k w_k (network_k - base)`.

    The weights are one unless given. Negative ones take away what a network has learned.

    Attributes:
        scale: Factor of the sum.
        is_normalized: Whether the weights are divided by their sum.

    References:
        Ilharco et al. (2023), Editing models with task arithmetic, section 2.
    """

    scale: Number = 1.0
    is_normalized: bool = False

    def __post_init__(self) -> None:
        require_scale(self.scale)

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """The weights as they are, or divided by their sum."""
        given = as_given(weights, count)
        if not self.is_normalized:
            return given
        if abs(sum(given)) < LEAST_SUM:
            raise ValueError(f"the weights {list(given)} sum to {sum(given)} and cannot be normalized; change them")
        return tuple(w / sum(given) for w in given)

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """The weighted sum."""
        scale = target.number(self.scale)
        return weighted_sum(tensors, [scale * factor for factor in factors])


@dataclass(frozen=True)
class ElectedMean(VectorRule):
    """Elect a sign for each entry of the task vectors, and average those that agree with it.

    An entry's sign is that of the weighted sum over networks. The result is `base + scale * mean`, where the weighted
    mean is over those networks whose entry, times its weight, has this sign; it is zero where there are none, and where
    the sum is zero. Where negative weights make the weights of those networks cancel, their sum stays undivided.

    Attributes:
        scale: Factor of the mean.
        is_normalized: Whether what agrees is averaged; else it is summed with the weights as they are.

    References:
        Yadav et al. (2023), TIES-Merging, section 4, steps 2 and 3.
    """

    scale: Number = 1.0
    is_normalized: bool = True

    def __post_init__(self) -> None:
        require_scale(self.scale)

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Shares for a mean; for a sum, and where one is negative, the weights as they are."""
        given = as_given(weights, count)
        if min(given) < 0:
            return given
        shares = shares_of(weights, count)
        return shares if self.is_normalized else given

    def held(self, count: int) -> int:
        """Tensors held at once: all task vectors, their signs, sums and masses."""
        return count + 5

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """The mean of the entries that agree, or their sum."""
        vectors = list(tensors)
        signs = weighted_sum((vector.clone() for vector in vectors), factors).sign_()
        sums, masses = sum_agreeing(vectors, factors, signs)
        if self.is_normalized:
            least = LEAST_SHARE * max(abs(factor) for factor in factors)
            sums /= masses.masked_fill_(masses.abs() <= least, 1.0)
        return sums.mul_(target.number(self.scale))


@dataclass(frozen=True)
class ModelStock(VectorRule):
    """The base plus a share of the mean task vector that follows from the angle between the task vectors.

    For each tensor and n networks, with the mean of the cosines of all pairs,

        base + t * mean_k (network_k - base),  t = n cos / (1 + (n - 1) cos)

    Networks that agree are averaged (t is one for a cosine of one); those at right angles say nothing, and the base
    stays. So it does at obtuse angles, where the formula would lead away from the networks: t is never below zero.

    Attributes:
        by_rows: Whether each row of a tensor, what has one index along its first axis, has an angle of its own.

    References:
        Jang et al. (2024), Model Stock, section 4, equation 2 for two networks and appendix for n.
    """

    by_rows: bool = False

    least = 2

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Equal shares."""
        return equal_shares(self, weights, count)

    def splits(self, shape: Sequence[int]) -> bool:
        """The angle is that of whole tensors or rows."""
        return self.by_rows and len(shape) > 1

    def held(self, count: int) -> int:
        """Tensors held at once: all task vectors, and the product of two."""
        return count + 2

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """The share of the mean."""
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


class SparseRule(VectorRule):
    """A rule that keeps a part of each task vector, and leaves to another rule how these are combined.

    Attributes:
        rule: The rule that combines them.
    """

    rule: VectorRule

    @abstractmethod
    def sparsify(self, vector: Tensor, k: int, count: int, target: Target) -> Tensor:
        """The sparsified task vector of network k of `count`, or of a piece of it."""

    @property
    def is_random(self) -> bool:
        """Whether one of both draws random numbers."""
        return self.rule.is_random

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """The factors of the rule that combines."""
        return self.rule.factors(weights, count)

    def check(self, target: Target, count: int) -> None:
        """Check the rule that combines."""
        self.rule.check(target, count)

    def splits(self, shape: Sequence[int]) -> bool:
        """Whether the rule that combines takes pieces; magnitudes are compared in whole tensors."""
        return False

    def held(self, count: int) -> int:
        """Tensors held at once: those of the combining rule, magnitudes, and two more to find the entries that stay."""
        return self.rule.held(count) + 3

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Combine the sparsified task vectors by the other rule."""
        count = len(factors)
        kept = (self.sparsify(vector, k, count, target) for k, vector in enumerate(tensors))
        return self.rule.combine(kept, factors, target)


@dataclass(frozen=True)
class Ties(SparseRule):
    """Keep the largest entries of the task vectors, elect a sign for each entry, and average what agrees with it.

    For each tensor: every task vector keeps the share `density` of its entries, those of the largest magnitude
    (one entry at least; all that are as large as the smallest that is kept). Then `ElectedMean` combines them.

    Attributes:
        density: Share of entries that are kept, above zero and at most one; one number for each network, too.
        scale: Factor of the mean.
        is_normalized: Whether what agrees is averaged; else it is summed with the weights as they are.
        keeps_sum: Whether what is kept is enlarged until its magnitudes have the sum that they had.

    References:
        Yadav et al. (2023), TIES-Merging, section 4 and algorithm 1; there the largest entries of the whole network
        are kept, here of each tensor, so that layers of small weights take part.
    """

    density: Numbers = 0.2
    scale: Number = 1.0
    is_normalized: bool = True
    keeps_sum: bool = False

    def __post_init__(self) -> None:
        require_scale(self.scale)
        require_density(self.density)

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
        return restore_sum(kept, vector) if self.keeps_sum else kept


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
        keeps_sum: Whether what is kept is enlarged until its magnitudes have the sum that they had.

    References:
        Davari and Belilovsky (2024), Model breadcrumbs, section 3: masks of each layer between two quantiles of the
        magnitudes. The share that is kept is given here as in mergekit, not the share of the smallest.
    """

    density: Numbers = 0.1
    gamma: Numbers = 0.01
    rule: VectorRule = field(default_factory=TaskArithmetic)
    keeps_sum: bool = False

    def __post_init__(self) -> None:
        require_density(self.density)
        require_numbers("gamma", self.gamma, lambda x: 0 <= x < 1, "the share of the largest entries, in [0, 1)")

    def check(self, target: Target, count: int) -> None:
        """Densities and shares of outliers are as many as the networks, or one."""
        target.numbers(self.density, count)
        target.numbers(self.gamma, count)
        self.rule.check(target, count)

    def sparsify(self, vector: Tensor, k: int, count: int, target: Target) -> Tensor:
        """Keep the entries below the outliers and above the small ones."""
        kept = keep_magnitudes(vector, *(target.numbers(x, count)[k] for x in (self.density, self.gamma)))
        return restore_sum(kept, vector) if self.keeps_sum else kept


@dataclass(frozen=True)
class Dare(SparseRule):
    """Drop entries of the task vectors at random and enlarge the others, so that their expectation stays.

    Each entry is dropped with probability `drop`, else divided by `1 - drop`; then another rule combines what is
    left. With `TaskArithmetic` the result is unbiased: its expectation is that of no drop at all.

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
        """The entries that are not dropped."""
        drop = target.numbers(self.drop, count)[k]
        if not drop:
            return vector
        enlarged = vector.div_(1 - drop) if self.is_rescaled else vector
        return torch.where(target.draw(k, vector) < drop, 0.0, enlarged)


@dataclass(frozen=True)
class Della(SparseRule):
    """Drop entries of the task vectors at random, small ones more often, and enlarge the others.

    In each row of a tensor, what has one index along its first axis, the entries are ranked by magnitude. The
    probability to be kept rises evenly with the rank from `density - epsilon` for the smallest to `density + epsilon`
    for the largest; what is kept is divided by it, so that the expectation of every entry stays. Then another rule
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
        """Tensors held at once: those of the combining rule, magnitudes, integer ranks twice, probabilities, noise."""
        return self.rule.held(count) + 8

    def sparsify(self, vector: Tensor, k: int, count: int, target: Target) -> Tensor:
        """The entries that are not dropped."""
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


def keep_magnitudes(vector: Tensor, density: float, gamma: float) -> Tensor:
    """The share `density` of the largest entries after the share `gamma` of the very largest; zeros elsewhere."""
    magnitudes = vector.abs()
    flat, count = magnitudes.flatten(), vector.numel()
    kept = max(1, round(density * count))
    largest = min(round(gamma * count), count - kept)
    if kept == count:
        return vector
    least = flat.kthvalue(count - largest - kept + 1).values
    result = torch.where(magnitudes >= least, vector, 0.0)
    if not largest:
        return result
    return result.masked_fill_(magnitudes > flat.kthvalue(count - largest).values, 0.0)


def restore_sum(kept: Tensor, vector: Tensor) -> Tensor:
    """Rescale a sparsified task vector so that its magnitudes sum to those of the whole vector."""
    before, after = (float(torch.linalg.vector_norm(one, 1, dtype=torch.float64)) for one in (vector, kept))
    return kept.mul_(before / after) if after and kept is not vector else kept


def sum_agreeing(vectors: Sequence[Tensor], factors: Sequence[float], signs: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the entries that have an elected sign, with factors, and the sum of their factors."""
    sums, masses = torch.zeros_like(signs), torch.zeros_like(signs)
    for vector, factor in zip(vectors, factors, strict=True):
        agrees = (vector.sign().mul_(math.copysign(1, factor)) == signs) & (signs != 0)
        sums += torch.where(agrees, vector, 0.0).mul_(factor)
        masses += agrees.to(masses).mul_(factor)
    return sums, masses


def require_certain(rule: VectorRule) -> None:
    """Raise a ValueError if a rule that combines what was kept at random is random itself."""
    if rule.is_random:
        raise ValueError(f"{rule} drops entries at random, as the rule does that it is to follow; drop them once")


def require_density(density: Numbers) -> None:
    """Raise a ValueError unless a share of entries is above zero and at most one."""
    require_numbers("density", density, lambda x: 0 < x <= 1, "the share of entries that are kept, in (0, 1]")
