"""The training of one end of a line, by its weights themselves or by what makes them."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.core.task import Task
from regauge.inr.basin.line_loss import line_loss, minibatches


@dataclass(frozen=True)
class LineTraining:
    """How one end of a line is trained until the line is flat.

    Attributes:
        steps: Of AdamW.
        lr: Largest learning rate of the one-cycle schedule, 25 times the first one.
        weight_decay: Of AdamW.
        examples: Drawn from a batch of the task in each step; whole batches if None.
        segments: Parts of the line, in each of which one point is evaluated in each step.
        points: On the lines that are measured before and after.

    References:
        Paper 003, section 3.4, for loss, optimizer and schedule.
    """

    steps: int
    lr: float
    weight_decay: float = 1e-2
    examples: int | None = None
    segments: int = 4
    points: int = 25

    def __post_init__(self) -> None:
        positive = (self.steps, self.lr, self.segments, 1 if self.examples is None else self.examples)
        if min(positive) <= 0 or self.weight_decay < 0 or self.points < 3:
            raise ValueError(
                f"{self} cannot train: steps, lr, segments and examples must be positive, weight_decay not negative, "
                "and a line has at least three points"
            )


def train_end(
    parameters: Iterable[Tensor],
    end: Callable[[], Mapping[str, Tensor]],
    first: Mapping[str, Tensor],
    task: Task,
    config: LineTraining,
    *,
    generator: torch.Generator,
    on_step: Callable[[float], object],
) -> Tensor:
    """Train parameters in place; what every step minimized, `[steps]`.

    Args:
        parameters: What is trained.
        end: The network that they make.
        first: The end that stays.
        task: Module, batches, loss.
        config: Steps, learning rate, minibatches.
        generator: Draws examples and points on the line.
        on_step: Is told the loss of every step.

    Raises:
        ValueError: There are no batches, or the loss is not finite.
    """
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=config.lr, total_steps=config.steps)
    losses = torch.empty(config.steps)
    for step, batch in zip(range(config.steps), minibatches(task, config.examples, generator), strict=False):
        loss = line_loss(task, first, end(), batch, segments=config.segments, generator=generator)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ValueError(f"the loss is {value} in step {step}; try a smaller lr than {config.lr:g}")
        losses[step] = value
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        on_step(value)
    return losses


def trained_names(task: Task, params: Mapping[str, Tensor]) -> list[str]:
    """Names of the parameters of the task's module, tied ones once.

    Raises:
        ValueError: The network lacks one.
    """
    names = [name for name, _ in task.module.named_parameters()]
    missing = [name for name in names if name not in params]
    if missing:
        raise ValueError(
            f"the networks lack {missing[:5]}, which the task's module has; they must be of its architecture"
        )
    return names
