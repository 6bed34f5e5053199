"""The settings of a population, which determine all of its networks."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from regauge.storage.architecture import Architecture
from regauge.training.initialization import Initialization
from regauge.training.settings import Setting, bounds, derive_seed, draw, require_setting
from regauge.training.training_configs import DescentConfig
from regauge.zoo.training.examples import Examples


@dataclass(frozen=True)
class Fraction:
    """A rule that trains every group of networks on a random share of the examples.

    Attributes:
        share: The share in (0, 1]. The share may be a distribution, from which each group samples its share.
    """

    share: Setting

    def __post_init__(self) -> None:
        require_setting("the share of the examples", self.share, 0, 1, is_open=True)

    def describe(self, seed: int, group: int) -> dict[str, float]:
        """Return the row columns that describe the subset."""
        return {"share": draw(self.share, seed, "share", group)}

    def choose(self, examples: Examples, seed: int, group: int) -> Tensor:
        """Return the indices of a group's examples."""
        count = len(examples.inputs)
        order = torch.randperm(count, generator=generator_of(seed, "subset", group))
        return order[: max(1, round(count * self.describe(seed, group)["share"]))]

    def count(self, examples: Examples) -> float:
        """Return the smallest possible number of examples of a group."""
        return max(1, round(len(examples.inputs) * bounds(self.share)[0]))


@dataclass(frozen=True)
class ClassHalves:
    """A rule that trains groups with even indices on one subset of the examples, and groups with odd indices on a
    second subset.

    Attributes:
        share: For each class in the first half of the classes, the share of its examples that the first subset
            contains. For each class in the second half, the first subset contains one minus this share. The second
            subset contains the examples that are not in the first subset.

    References:
        Navon et al. (2024), section 6, disjoint data sets with 95% and 5%.
    """

    share: float = 0.95

    def __post_init__(self) -> None:
        require_setting("the share of a class in its half", self.share, 0, 1)

    def describe(self, seed: int, group: int) -> dict[str, int]:
        """Return the row columns that describe the subset."""
        return {"half": group % 2}

    def choose(self, examples: Examples, seed: int, group: int) -> Tensor:
        """Return the indices of a group's examples."""
        if not examples.is_classification:
            raise ValueError(f"{examples.name!r} has no classes to be halved; use another subset")
        # All groups are split in the same way, so the halves have no example in common.
        order = torch.randperm(len(examples.inputs), generator=generator_of(seed, "halves"))
        targets = examples.targets.cpu()[order]
        classes = int(targets.max()) + 1
        chosen = []
        for c in range(classes):
            own = order[targets == c]
            cut = round(len(own) * (self.share if c < classes // 2 else 1 - self.share))
            chosen.append(own[:cut] if group % 2 == 0 else own[cut:])
        return torch.cat(chosen)

    def count(self, examples: Examples) -> float:
        """Return the approximate number of examples in a group."""
        return len(examples.inputs) / 2


Subset = Fraction | ClassHalves


@dataclass(frozen=True)
class Checkpoints:
    """The steps after which `train` yields a checkpoint of the networks, in addition to the last step.

    Attributes:
        every: The number of steps from one checkpoint to the next.
        warmup: The number of steps before the first checkpoint. If `warmup` is 0, the first checkpoint is the
            initialization.
    """

    every: int
    warmup: int = 0

    def __post_init__(self) -> None:
        if self.every < 1 or self.warmup < 0:
            raise ValueError(f"{self} never happens; every must be at least 1 and warmup not negative")

    def steps(self, total: int) -> set[int]:
        """Return the steps of all checkpoints except the last one, for training with `total` steps."""
        return set(range(self.warmup, total, self.every))


@dataclass(frozen=True)
class Discard:
    """A rule that stops the training of networks with large validation losses, and marks their rows.

    Attributes:
        step: The number of steps after which networks are stopped.
        worst: The share of networks in every group that are stopped: the networks with the largest validation losses.
            The share includes networks that were stopped before.
        above: Networks whose validation loss (in nats or squared error) exceeds this number are stopped.
    """

    step: int
    worst: float | None = None
    above: float | None = None

    def __post_init__(self) -> None:
        if self.step < 0 or (self.worst is None) == (self.above is None):
            raise ValueError(f"{self} does not define which networks to discard: give a step and either worst or above")
        if self.worst is not None and not 0 < self.worst < 1:
            raise ValueError(f"the worst share is {self.worst}, but must lie in (0, 1)")


@dataclass(frozen=True)
class PopulationConfig(DescentConfig):
    """Settings of a population. Network i depends only on the settings and on i.

    Network i does not depend on the networks that are trained at the same time, up to rounding in each step. `train`
    describes the effect of rounding on long training runs.

    Consecutive ids form a group: network i belongs to group `i // group`. The networks of a group read the same batches
    in the same order, from the same subset of the data. All other random choices are independent for each network. With
    `group=1`, each network has its own batches and its own subset, and training takes up to three times as long.

    Steps, epochs, batches, optimizer and schedule are those of `DescentConfig`. Batches follow one another without
    gaps, so the last batch of one epoch may contain the beginning of the next. Optimizer settings may be distributions,
    from which each network samples a value.

    Attributes:
        architecture: The architecture of all networks.
        data: The training data: a name in `regauge.zoo.training.SETS`, or `package.module:function` for a function that
            returns the same Examples in every process. If examples are passed to `train`, `data` is their name.
        count: The number of networks; their ids are 0 to count - 1.
        seed: Seed of the population. All random numbers depend only on this seed and on the ids.
        initialization: Initialization of the parameters of the networks.
        subset: Rule for the subset of the examples on which a network is trained; all examples if None.
        copies: Number of networks for every signal, if networks represent signals. Network i learns signal `i //
            copies`, counted cyclically.
        group: Number of networks with consecutive ids that are trained on the same batches.
        checkpoints: Steps after which checkpoints are stored, in addition to the last step.
        discards: Rules by which the training of bad networks is stopped.

    Raises:
        ValueError: A value is invalid.
    """

    architecture: Architecture
    data: str
    count: int
    seed: int = 0
    initialization: Initialization = field(default_factory=Initialization)
    subset: Subset | None = None
    copies: int = 1
    group: int = 32
    checkpoints: Checkpoints | None = None
    discards: tuple[Discard, ...] = ()

    def __post_init__(self) -> None:
        for name in ("count", "copies", "group"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        super().__post_init__()
        if self.epochs is not None and isinstance(self.subset, Fraction) and len(set(bounds(self.subset.share))) > 1:
            raise ValueError("networks with different shares of the examples have different epochs; give steps instead")
        if len({discard.step for discard in self.discards}) < len(self.discards):
            raise ValueError(f"two of {self.discards} are at the same step; discard once")

    def total_steps(self, examples: Examples) -> int:
        """Return the number of steps of every network."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        count = float(len(examples.inputs)) if self.subset is None else self.subset.count(examples)
        return max(1, round(self.epochs * count / self.batch_of(count)))

    def count_checkpoints(self, examples: Examples) -> int:
        """Return the number of checkpoints, including the last one, of every network whose training is not stopped."""
        total = self.total_steps(examples)
        return len({total} | (set() if self.checkpoints is None else self.checkpoints.steps(total)))

    def batch_of(self, count: float) -> float:
        """Return the number of examples in a step, given the total number of examples."""
        return count if self.batch is None else min(self.batch, count)

    def reads_everything(self, examples: Examples) -> bool:
        """Return whether every step reads all examples, which makes groups irrelevant."""
        return self.subset is None and self.batch_of(len(examples.inputs)) == len(examples.inputs)


def generator_of(*key: int | str) -> torch.Generator:
    """Return the random generator for a key; the key alone determines the random numbers."""
    return torch.Generator().manual_seed(derive_seed(*key))
