"""Weighted means and sums of networks, soups, and one network as it is."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from regauge.core.interpolation import shares_of
from regauge.core.params import Params
from regauge.core.task import Task
from regauge.merging.rule import Rule, Target, weighted_sum
from regauge.merging.settings import Number, require_numbers


@dataclass(frozen=True)
class Average(Rule):
    """The weighted mean of all networks; with equal weights the uniform soup.

    References:
        Wortsman et al. (2022), Model soups, section 2; Ainsworth et al. (2023), Git Re-Basin.
    """

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """The weighted mean."""
        return weighted_sum(tensors, factors)


@dataclass(frozen=True)
class GreedySoup(Average):
    """The mean of those networks that help one another, chosen by the loss of a task.

    The networks are visited from the smallest loss to the largest. The first one is in; each other one joins if
    the loss of the mean does not rise. So the result is never worse on the task than the best network, where the
    task has no `prepare`: that is applied to means, and not to single networks.

    References:
        Wortsman et al. (2022), Model soups, algorithm 1.
    """

    needs_task = True

    def choose(
        self, networks: Sequence[Mapping[str, Tensor]], soup: Callable[[Sequence[int]], Params], task: Task | None
    ) -> Sequence[int]:
        """The numbers of those that are in.

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
        order = sorted(range(len(networks)), key=losses.__getitem__)
        chosen, best = order[:1], losses[order[0]]
        for k in order[1:]:
            tried = [*chosen, k]
            loss = task.evaluate_average(soup(tried))["loss"]
            if loss <= best:
                chosen, best = tried, loss
        return sorted(chosen)


@dataclass(frozen=True)
class WeightedSum(Rule):
    """The sum of all networks with weights as they are: one unless given, of any sign, and of any sum.

    It is mergekit's `linear` without normalization.
    """

    has_shares = False

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """The weights as they are."""
        return as_given(weights, count)

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """The weighted sum."""
        return weighted_sum(tensors, factors)


@dataclass(frozen=True)
class Passthrough(Rule):
    """One network as it is, or with its tensors multiplied.

    Attributes:
        scale: Factor; a setting with pieces of names multiplies some tensors alone.
    """

    scale: Number = 1.0

    least, most, has_shares = 1, 1, False

    def __post_init__(self) -> None:
        require_scale(self.scale)

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """The tensor of the only network, multiplied by the scale."""
        (tensor,) = tensors
        return tensor.mul_(target.number(self.scale))


def as_given(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """Weights that are not normalized, one unless given; a ValueError if they are not as many, or not finite."""
    given = (1.0,) * count if weights is None else tuple(float(w) for w in weights)
    if len(given) != count or not all(math.isfinite(w) for w in given):
        raise ValueError(f"weights are {list(given)} for {count} networks; give one finite weight for each")
    return given


def equal_shares(rule: Rule, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """Equal shares of networks for a rule that takes no weights; a ValueError where there are some."""
    if weights is not None:
        raise ValueError(f"{type(rule).__name__} finds the share of the networks by itself; leave out the weights")
    return shares_of(None, count)


def require_scale(scale: Number) -> None:
    """Raise a ValueError unless a factor of tensors is finite."""
    require_numbers("scale", scale, math.isfinite, "a factor and must be finite")
