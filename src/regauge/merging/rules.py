"""How aligned networks are combined: means and soups, and sums of task vectors relative to a base network."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regauge.core.interpolation import mean, shares_of
from regauge.core.task import Task


class WeightedRule:
    """How aligned networks are combined."""

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """One factor for each network, or an error about the weights: shares that sum to one, equal unless given."""
        return shares_of(weights, count)


class MeanRule(WeightedRule):
    """A rule whose result is a weighted mean of the networks."""

    def choose(
        self, networks: Sequence[Mapping[str, Tensor]], shares: tuple[float, ...], task: Task | None
    ) -> tuple[float, ...]:
        """The shares of the aligned networks in the mean, from those that were asked for."""
        return shares


class VectorRule(WeightedRule, ABC):
    """A rule for task vectors, the differences of networks from their base, one tensor at a time."""

    @abstractmethod
    def combine(self, vectors: Tensor, factors: Sequence[float], generator: torch.Generator | None) -> Tensor:
        """Combine task vectors `[networks, ...]` in float64 into the change of the base `[...]`."""


Rule = MeanRule | VectorRule


@dataclass(frozen=True)
class Average(MeanRule):
    """The weighted mean of all networks; with equal weights the uniform soup.

    References:
        Wortsman et al. (2022), Model soups, section 2; Ainsworth et al. (2023), Git Re-Basin.
    """


@dataclass(frozen=True)
class GreedySoup(MeanRule):
    """The mean of those networks that help one another, chosen by the loss of a task.

    The networks are visited from the smallest loss to the largest. The first one is in; each other one joins if
    the loss of the mean does not rise. So the result is never worse on the task than the best network, where the
    task has no `prepare`: that is applied to means, and not to single networks.

    References:
        Wortsman et al. (2022), Model soups, algorithm 1.
    """

    def choose(
        self, networks: Sequence[Mapping[str, Tensor]], shares: tuple[float, ...], task: Task | None
    ) -> tuple[float, ...]:
        """The shares of those that are in, normalized; zero for the others.

        Raises:
            ValueError: There is no task, or a network whose loss is NaN.
        """
        if task is None:
            raise ValueError(
                "GreedySoup chooses by the loss of a task; give `task=regauge.Task(module, batches, criterion)`, or "
                "use Average"
            )
        losses = [task.evaluate(network)["loss"] for network in networks]
        if any(math.isnan(loss) for loss in losses):
            raise ValueError(
                f"the losses of the networks are {losses}; leave out the networks whose loss is NaN, or correct the "
                "task"
            )
        order = sorted((k for k in range(len(networks)) if shares[k] > 0), key=lambda k: losses[k])
        chosen, best = order[:1], losses[order[0]]
        for k in order[1:]:
            tried = [*chosen, k]
            soup = mean([networks[j] for j in tried], shares_of([shares[j] for j in tried], len(tried)))
            loss = task.evaluate_average(soup)["loss"]
            if loss <= best:
                chosen, best = tried, loss
        return shares_of([share if k in chosen else 0.0 for k, share in enumerate(shares)], len(networks))


@dataclass(frozen=True)
class TaskArithmetic(VectorRule):
    """The base plus the weighted sum of the task vectors: `base + scale * sum_k w_k (network_k - base)`.

    The weights are not normalized; they are one unless given. Negative ones take away what a network has learned.

    Attributes:
        scale: Factor of the sum.

    References:
        Ilharco et al. (2023), Editing models with task arithmetic, section 2.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        _require_finite_scale(self.scale)

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """The weights as they are."""
        given = (1.0,) * count if weights is None else tuple(float(w) for w in weights)
        if len(given) != count or not all(math.isfinite(w) for w in given):
            raise ValueError(f"weights are {list(given)} for {count} networks; give one finite weight for each")
        return given

    def combine(self, vectors: Tensor, factors: Sequence[float], generator: torch.Generator | None) -> Tensor:
        """The weighted sum."""
        return self.scale * _weigh(vectors, factors).sum(0)


@dataclass(frozen=True)
class Ties(VectorRule):
    """Trim the task vectors, elect a sign for each entry, and average what agrees with it.

    For each tensor: every task vector keeps the share `density` of its entries, those of the largest magnitude
    (one entry at least; all that are as large as the smallest that is kept). An entry's sign is that of the weighted
    sum over networks. The result is `base + scale * mean`, where the weighted mean is over those networks whose
    entry was kept and has this sign; it is zero where there are none, and where the sum is zero.

    Attributes:
        density: Share of entries that are kept, above zero and at most one.
        scale: Factor of the mean.

    References:
        Yadav et al. (2023), TIES-Merging, section 4 and algorithm 1; there the largest entries of the whole network
        are kept, here of each tensor, so that layers of small weights take part.
    """

    density: float = 0.2
    scale: float = 1.0

    def __post_init__(self) -> None:
        _require_finite_scale(self.scale)
        if not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density}; it is the share of entries that are kept, in (0, 1]")

    def combine(self, vectors: Tensor, factors: Sequence[float], generator: torch.Generator | None) -> Tensor:
        """The mean of the trimmed entries that agree."""
        trimmed = torch.stack([_trim(vector, self.density) for vector in vectors])
        signs = _weigh(trimmed, factors).sum(0).sign()
        agrees = (trimmed.sign() == signs) & (signs != 0)
        masses = _weigh(agrees.to(vectors.dtype), factors).sum(0)
        sums = _weigh(torch.where(agrees, trimmed, 0.0), factors).sum(0)
        return self.scale * torch.where(masses > 0, sums / masses.where(masses > 0, 1.0), 0.0)


@dataclass(frozen=True)
class Dare(VectorRule):
    """Drop entries of the task vectors at random and enlarge the others, so that their expectation stays.

    Each entry is dropped with probability `drop`, else divided by `1 - drop`; then another rule combines what is
    left. With `TaskArithmetic` the result is unbiased: its expectation is that of no drop at all.

    Attributes:
        drop: Probability, in [0, 1).
        rule: What combines the task vectors afterwards. For Ties, `Ties(density=1)` trims by chance alone.

    References:
        Yu et al. (2024), Language models are super Mario, section 3.
    """

    drop: float
    rule: TaskArithmetic | Ties = field(default_factory=TaskArithmetic)

    def __post_init__(self) -> None:
        if not 0 <= self.drop < 1:
            raise ValueError(f"drop is {self.drop}; it is the probability of an entry to be dropped, in [0, 1)")

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Those of the rule that combines."""
        return self.rule.factors(weights, count)

    def combine(self, vectors: Tensor, factors: Sequence[float], generator: torch.Generator | None) -> Tensor:
        """What the other rule makes of the entries that are left.

        Raises:
            ValueError: There is no generator.
        """
        if self.drop > 0:
            if generator is None:
                raise ValueError(f"{self} drops entries at random; give a torch.Generator as `generator`")
            noise = torch.rand(vectors.shape, generator=generator, device=generator.device, dtype=torch.float64)
            vectors = torch.where(noise.to(vectors.device) < self.drop, 0.0, vectors / (1 - self.drop))
        return self.rule.combine(vectors, factors, generator)


def require_base(rule: Rule, *, has_base: bool) -> None:
    """Refuse a mean with a base, and task vectors without one.

    Raises:
        ValueError: It is one of these.
    """
    if has_base and isinstance(rule, MeanRule):
        raise ValueError(
            f"{rule} is a mean of the networks and takes no base; leave it out, put it among the networks, or use a "
            "rule for task vectors: TaskArithmetic, Ties or Dare"
        )
    if not has_base and isinstance(rule, VectorRule):
        raise ValueError(
            f"{rule} combines what networks differ by from a base network and needs a base; give it as `base`"
        )


def _trim(vector: Tensor, density: float) -> Tensor:
    magnitudes = vector.abs().flatten()
    kept = max(1, round(density * magnitudes.numel()))
    if kept >= magnitudes.numel():
        return vector
    least = magnitudes.kthvalue(magnitudes.numel() - kept + 1).values
    return torch.where(vector.abs() >= least, vector, 0.0)


def _weigh(vectors: Tensor, factors: Sequence[float]) -> Tensor:
    return vectors * vectors.new_tensor(factors).reshape(-1, *[1] * (vectors.ndim - 1))


def _require_finite_scale(scale: float) -> None:
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be finite")
