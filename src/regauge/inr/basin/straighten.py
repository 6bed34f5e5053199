"""Straightening: the weights of a network are trained until the line from another one is flat."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.core.params import Params, require_finite, require_same_shapes
from regauge.core.task import Task
from regauge.inr.basin.line_loss import line_loss, minibatches
from regauge.inr.basin.outcome import InBasin, outcome


@dataclass(frozen=True)
class Straighten:
    """How a network is trained onto a flat line.

    Attributes:
        steps: Of AdamW.
        lr: Largest learning rate; it rises and falls once over all steps. The default suits networks 64 to 512 wide;
            up to 128, 1e-3 gets further in as many steps.
        weight_decay: Of AdamW.
        examples: Drawn from a batch of the task in each step; whole batches if None.
        segments: Parts of the line, in each of which one point is evaluated in each step.
        points: On the lines that are measured before and after.

    References:
        Paper 003, section 3.4, for loss, optimizer and schedule.
    """

    steps: int = 200
    lr: float = 3e-4
    weight_decay: float = 1e-2
    examples: int | None = 2_000
    segments: int = 4
    points: int = 25

    def __post_init__(self) -> None:
        positive = (self.steps, self.lr, self.segments, 1 if self.examples is None else self.examples)
        if min(positive) <= 0 or self.weight_decay < 0 or self.points < 3:
            raise ValueError(
                f"{self} cannot train: steps, lr, segments and examples must be positive, weight_decay not negative, "
                "and a line has at least three points"
            )


def straighten(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    task: Task,
    config: Straighten | None = None,
    *,
    generator: torch.Generator,
    on_step: Callable[[float], object] = lambda loss: None,
) -> InBasin:
    """Train the second network, from where it is, until the loss on the line from the first one is small.

    This is the loss of `hyper_match` without its network, which for a single pair only parametrizes the result anew.
    Align the second network first: it then has little left to move. Nothing ties the result to where it began, and the
    first network itself is a minimum too; `approach` tells how much of the way to it is gone.

    Parameters are trained, buffers stay. Works for any model and loss, not only for INRs.

    Args:
        params_a: The network that stays, unchanged.
        params_b: Where training starts, unchanged.
        task: Module, batches, loss.
        config: Steps, learning rate, minibatches.
        generator: Draws examples and points on the line.
        on_step: Is told the loss of every step.

    Raises:
        ValueError: The networks have different parameters, lack one of the task's module, or hold NaN or Inf; there are
            no batches, or the loss is not finite.

    References:
        Paper 003, section 3.4, whose method this is without encoder and hypernetwork.
    """
    config = config or Straighten()
    require_same_shapes(params_a, params_b)
    for label, params in (("first network", params_a), ("second network", params_b)):
        require_finite(params, f"the {label}")
    learned = {name: params_b[name].detach().clone().requires_grad_() for name in trained_names(task, params_b)}
    rest = {name: t for name, t in params_b.items() if name not in learned and name not in _further_names(task)}
    first = {name: params_a[name].detach() for name in (*learned, *rest)}
    optimizer = torch.optim.AdamW(learned.values(), lr=config.lr, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=config.lr, total_steps=config.steps)
    losses = torch.empty(config.steps)
    for step, batch in zip(range(config.steps), minibatches(task, config.examples, generator), strict=False):
        loss = line_loss(task, first, {**rest, **learned}, batch, segments=config.segments, generator=generator)
        losses[step] = require_finite_loss(loss, step, config.lr)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        on_step(float(losses[step]))
    further = _further_names(task)
    moved: Params = {}
    for name, tensor in params_b.items():
        source = further.get(name, name)
        moved[name] = learned[source].detach() if source in learned else tensor
    return outcome(params_a, params_b, moved, task, losses, config.points)


def require_finite_loss(loss: Tensor, step: int, lr: float) -> float:
    """The loss as a number.

    Raises:
        ValueError: It is NaN or Inf.
    """
    value = float(loss.detach())
    if not math.isfinite(value):
        raise ValueError(f"the loss is {value} in step {step}; try a smaller lr than {lr:g}")
    return value


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


def _further_names(task: Task) -> dict[str, str]:
    """Further names of tied parameters, each with the first."""
    first = {id(parameter): name for name, parameter in reversed(list(task.module.named_parameters()))}
    every = task.module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if name != first[id(parameter)]}
