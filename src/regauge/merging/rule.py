"""The base class of merge rules. A rule computes each tensor of the result from the same tensor of all networks."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import ClassVar, Literal

import torch
from torch import Tensor

from regauge.core.interpolation import shares_of
from regauge.core.params import Params
from regauge.core.task import Task
from regauge.merging.settings import Number, Numbers, Setting

PIECE = 1 << 20
"""The size in bytes, as float32, of the chunks in which tensors are combined. Chunks of this size fit in the
processor's cache."""


class Target:
    """The tensor of the result that is being made: its name, its depth and its random numbers.

    The random numbers depend only on the seed, the tensor's name and the network. Networks in memory, streamed networks
    and resumed runs therefore use the same random numbers, for any chunks and any order of tensors.

    Args:
        name: The name of the tensor. For a tied tensor, the first of its names.
        depth: The relative depth of the tensor; see `find_depths`.
        seed: The seed of random numbers; None for rules without random numbers.
    """

    def __init__(self, name: str, depth: float = 0.0, seed: int | None = None) -> None:
        self.name, self.depth, self._seed = name, depth, seed
        self._generators: dict[int, torch.Generator] = {}

    def number(self, setting: Number) -> float:
        """Return the value of a setting for the tensor of the result."""
        return setting.at(self.name, self.depth) if isinstance(setting, Setting) else float(setting)

    def numbers(self, setting: Numbers, count: int) -> list[float]:
        """Return the values of a setting for the tensor of the result, one for each of `count` networks."""
        if not isinstance(setting, tuple):
            return [self.number(setting)] * count
        if len(setting) != count:
            raise ValueError(f"there are {len(setting)} settings for {count} networks; give one for all, or one each")
        return [self.number(one) for one in setting]

    def draw(self, k: int, like: Tensor) -> Tensor:
        """Return random numbers in [0, 1) for the next entries of network k, in float64."""
        if k not in self._generators:
            key = f"{self._seed}/{k}/{self.name}".encode()
            seed = int.from_bytes(blake2b(key, digest_size=8).digest()) >> 1
            self._generators[k] = torch.Generator().manual_seed(seed)
        noise = torch.rand(like.shape, generator=self._generators[k], dtype=torch.float64)
        return noise.to(like.device)


class Rule(ABC):
    """A rule that combines aligned networks, one tensor at a time.

    Attributes:
        base: Whether the rule combines task vectors, the differences of networks from a base: "needed", "none" or
            "optional". A rule with "optional" combines networks if there is no base, and task vectors if there is one.
        least: The smallest number of networks that the rule combines.
        most: The largest number of networks; None for no limit.
        needs_task: Whether the rule uses a task to choose among the networks. Rules that use a task require the
            networks in memory.
        has_shares: Whether factors are shares that sum to one. Running statistics are averaged with the shares, or with
            equal weights if a rule has no shares.
    """

    base: ClassVar[Literal["none", "needed", "optional"]] = "none"
    least: ClassVar[int] = 2
    most: ClassVar[int | None] = None
    needs_task: ClassVar[bool] = False
    has_shares: ClassVar[bool] = True

    @property
    def is_random(self) -> bool:
        """Return whether the rule uses random numbers."""
        return False

    def factors(self, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
        """Return the factor of each network in one tensor. By default, factors are equal shares."""
        return shares_of(weights, count)

    def choose(
        self, networks: Sequence[Mapping[str, Tensor]], soup: Callable[[Sequence[int]], Params], task: Task | None
    ) -> Sequence[int]:
        """Return the indices of the networks to combine: by default all, otherwise chosen by the loss of the task.

        To evaluate a choice, a subclass calls `soup`, which combines the networks with the given indices.
        """
        return range(len(networks))

    def check(self, target: Target, count: int) -> None:
        """Raise a ValueError if the settings for a tensor contradict one another or do not fit the networks."""
        return

    def splits(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor can be combined in chunks along its first axis with the same result."""
        return True

    def held(self, count: int) -> int:
        """Return the number of copies of a tensor, or of a chunk of a tensor, that `combine` holds at once."""
        return 2

    @abstractmethod
    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return one tensor of the result, or one chunk of it.

        Args:
            tensors: The tensor of each network, or its difference from the base, in float32 or float64. The rule may
                overwrite the tensors. Each tensor is read on access, so only one input tensor is in memory during a
                sum.
            factors: The factor of each tensor.
            target: The name, depth and random numbers of the tensor in the result.

        Returns:
            The tensor of the result, or its difference from the base.
        """


class VectorRule(Rule):
    """A rule that needs a base and accepts a single task vector."""

    base, least, has_shares = "needed", 1, False


def combine_from(
    start: Tensor | None, rule: Rule, tensors: Iterator[Tensor], factors: tuple[float, ...], target: Target
) -> Tensor:
    """Combine tensors by a rule.

    If `start` is given, the differences of the tensors from `start` are combined. The tensors may be overwritten.
    """
    if start is None:
        return rule.combine(tensors, factors, target)
    return rule.combine((tensor.sub_(start) for tensor in tensors), factors, target).add_(start)


@contextmanager
def small_piece(rows: tuple[int, int] | None) -> Iterator[None]:
    """Return a context in which torch uses one thread, because several threads would mostly wait for one another."""
    threads = torch.get_num_threads()
    if rows is not None:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def weighted_sum(tensors: Iterator[Tensor], factors: Sequence[float]) -> Tensor:
    """Return the weighted sum of tensors, reading one tensor at a time."""
    total: Tensor | None = None
    for tensor, factor in zip(tensors, factors, strict=True):
        weighed = tensor.mul_(factor)
        total = weighed if total is None else total.add_(weighed)
    assert total is not None
    return total


def require_networks(rule: Rule, count: int, *, has_base: bool) -> None:
    """Raise an error if a rule cannot combine a given number of networks, or does not fit a given or missing base.

    Raises:
        ValueError: The rule cannot combine the networks.
    """
    if has_base and rule.base == "none":
        raise ValueError(
            f"{rule} combines the networks themselves, without a base; leave the base out, put it among the networks, "
            "or use a rule for task vectors"
        )
    if not has_base and rule.base == "needed":
        raise ValueError(f"{rule} combines the differences of networks from a base; give it as `base`")
    if count < rule.least:
        wanted = "two networks" if rule.most == 2 else f"{rule.least} networks or more"
        given = "there is no network" if count == 0 else "there is only one network"
        raise ValueError(
            f"{given} to merge, but {rule} combines {wanted}; give more, or for one network and a base "
            "a rule for task vectors"
        )
    if rule.most is not None and count > rule.most:
        exactly = "one network" if rule.most == 1 else "two networks"
        raise ValueError(f"{rule} takes {exactly}, but there are {count}; leave some out, or choose another rule")


def draw_seed(rule: Rule, generator: torch.Generator | None) -> int | None:
    """Return the seed of a rule's random numbers; None for rules without random numbers.

    Raises:
        ValueError: The rule needs a generator, and none is given.
    """
    if not rule.is_random:
        return None
    if generator is None:
        raise ValueError(f"{rule} drops entries at random; give a torch.Generator as `generator`")
    return int(torch.randint(2**62, (1,), generator=generator, device=generator.device))


def as_given(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """Return weights without normalization, by default ones. Raise a ValueError for a wrong number, NaN or Inf."""
    given = (1.0,) * count if weights is None else tuple(float(w) for w in weights)
    if len(given) != count or not all(math.isfinite(w) for w in given):
        raise ValueError(f"weights are {list(given)} for {count} networks; give one finite weight for each")
    return given


def equal_shares(rule: Rule, weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """Return equal shares of networks for a rule without weights. Raise a ValueError if weights are given."""
    if weights is not None:
        raise ValueError(f"{type(rule).__name__} computes the shares of the networks; leave out the weights")
    return shares_of(None, count)
