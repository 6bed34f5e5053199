"""Training of one end of a line until the loss along the line is flat."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from regauge.connect.line import Curve, line
from regauge.core.interpolation import combine, distance
from regauge.core.params import Params
from regauge.core.progress import Progress
from regauge.core.task import Batch, Task
from regauge.training import Descent, Minimum, OneCycle, Schedule, differentiate, minimize
from regauge.training.descent import cycle


@dataclass(frozen=True, kw_only=True)
class LineTraining(Descent):
    """Settings for training one end of a line until the line is flat.

    A batch is drawn from a batch of the task, with replacement; `batch=None` takes the task's batches whole.

    Attributes:
        segments: Equal parts of the line; each step evaluates one random point in each.
        points: Points of the lines that are measured before and after training.

    References:
        Paper 003, section 3.4, for loss, optimizer and schedule.
    """

    schedule: Schedule = field(default_factory=lambda: OneCycle(momentum=(0.85, 0.95)))
    segments: int = 4
    points: int = 25

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None or self.segments < 1 or self.points < 3:
            raise ValueError(
                f"{self} cannot train: it needs steps, and not epochs, at least one segment, and a line has at least "
                "three points"
            )


@dataclass(frozen=True)
class FlatLine:
    """A network that was trained until the loss on the line from another network is small.

    Unlike an aligned network it computes another function than the network that training started from.

    Attributes:
        params: The trained network.
        before: The line from the first network to the second one, before training.
        after: The line from the first network to `params`.
        moved: Euclidean distance between the second network and `params`.
        distance: Euclidean distance between the first network and `params`.
        distance_before: Euclidean distance between the first and the second network.
        losses: The training loss in every step, `[steps]`.
    """

    params: Params
    before: Curve
    after: Curve
    moved: float
    distance: float
    distance_before: float
    losses: Tensor

    @property
    def approach(self) -> float:
        """Relative decrease of the distance to the first network: 1 is a collapse onto it, 0 no change."""
        return 1 - self.distance / self.distance_before if self.distance_before else 0.0

    def __str__(self) -> str:
        return (
            f"barrier {self.before.barrier:.4g} -> {self.after.barrier:.4g}, end loss "
            f"{self.before.table[-1]['loss']:.4g} -> {self.after.table[-1]['loss']:.4g}, moved {self.moved:.4g}, "
            f"distance {self.distance_before:.4g} -> {self.distance:.4g}"
        )


def train_end(
    start: Mapping[str, Tensor],
    end: Callable[[Params], Mapping[str, Tensor]],
    first: Mapping[str, Tensor],
    task: Task,
    config: LineTraining,
    *,
    generator: torch.Generator,
    progress: Progress,
) -> Minimum:
    """Train parameters until the line from a network to the one that they make is flat.

    Args:
        start: The trained parameters at the start, unchanged.
        end: Makes a network from them.
        first: The network at the fixed end of the line.
        task: Module, batches, loss.
        config: Steps, optimizer, minibatches.
        generator: Draws examples and points on the line.
        progress: Shows the steps and their losses.

    Raises:
        ValueError: There are no batches, or the loss is not finite.
    """

    def loss(params: Params, batch: Batch) -> Tensor:
        return line_loss(task, first, end(params), batch, segments=config.segments, generator=generator)

    assert config.steps is not None
    return minimize(
        differentiate(loss),
        start,
        minibatches(task, config.batch, generator),
        steps=config.steps,
        optimizer=config.optimizer,
        schedule=config.schedule,
        progress=progress,
    )


def trained_names(task: Task, params: Mapping[str, Tensor]) -> list[str]:
    """Names of the parameters of the task's module, once for tied ones.

    Raises:
        ValueError: The network lacks one of them.
    """
    names = [name for name, _ in task.module.named_parameters()]
    missing = [name for name in names if name not in params]
    if missing:
        raise ValueError(
            f"the networks lack {missing[:5]}, which the task's module has; they must be of its architecture"
        )
    return names


def line_loss(
    task: Task,
    params_a: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    batch: Batch,
    *,
    segments: int,
    generator: torch.Generator,
) -> Tensor:
    """Mean loss at `params` and at one random point in each of `segments` equal parts of the line to it.

        (loss(p) + sum_i loss((1 - l_i) a + l_i p)) / (segments + 1)

    with l_i uniform in [i / segments, (i + 1) / segments).

    Args:
        task: Runs and judges networks; its `prepare` is applied to those between the ends.
        params_a: The fixed end of the line.
        params: The trained end.
        batch: Inputs and targets.
        segments: Number of parts of the line.
        generator: Draws the points on the line.

    References:
        Paper 003, section 3.4, with four parts.
    """
    offsets = torch.rand(segments, generator=generator, dtype=torch.float64)
    total = task.loss(params, batch)
    for k in range(segments):
        t = (k + float(offsets[k])) / segments
        between = combine((params_a, params), (1 - t, t))
        total = total + task.loss(between if task.prepare is None else task.prepare(between), batch)
    return total / (segments + 1)


def minibatches(task: Task, examples: int | None, generator: torch.Generator) -> Iterator[Batch]:
    """Repeat the task's batches forever, each reduced to random examples drawn with replacement.

    Args:
        task: A task whose inputs and targets have one row for each example.
        examples: Size of each minibatch; whole batches if None.
        generator: Draws the examples.

    Raises:
        ValueError: There are no batches, or tensors of a batch have different numbers of rows.
    """
    for batch in cycle(task):
        if examples is None:
            yield batch
            continue
        counts = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
        if len(counts) != 1:
            raise ValueError(
                f"the tensors of a batch have {sorted(counts)} rows, so its examples cannot be told apart; give "
                "examples=None to use whole batches"
            )
        index = torch.randint(counts.pop(), (examples,), generator=generator)

        def select(leaf: Any, index: Tensor = index) -> Any:
            return leaf.index_select(0, index.to(leaf.device)) if isinstance(leaf, Tensor) else leaf

        yield tree_map(select, batch)


def measure_line(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    params: Params,
    task: Task,
    losses: Tensor,
    points: int,
) -> FlatLine:
    """Compare the line to the trained network with the line to the network that training started from."""
    before, after = (line(params_a, end, task, points, prepare=task.prepare) for end in (params_b, params))
    return FlatLine(
        params,
        before,
        after,
        moved=distance(params_b, params),
        distance=distance(params_a, params),
        distance_before=distance(params_a, params_b),
        losses=losses,
    )
