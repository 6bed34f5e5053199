"""Train the weights of a network until the line from another network is flat."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regauge.connect.line_training import FlatLine, LineTraining, measure_line, train_end, trained_names
from regauge.core.params import Params, require_finite, require_same_shapes
from regauge.core.progress import Progress, no_progress
from regauge.core.task import Task
from regauge.training import AdamW, Optimizer


@dataclass(frozen=True, kw_only=True)
class Straighten(LineTraining):
    """Settings of `straighten`; see `LineTraining`.

    The default learning rate, 3e-4, suits networks 64 to 512 wide; up to 128, 1e-3 gets further in as many steps.
    """

    steps: int | None = 200
    batch: int | None = 2_000
    optimizer: Optimizer = field(default_factory=lambda: AdamW(lr=3e-4))


def straighten(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    task: Task,
    config: Straighten | None = None,
    *,
    generator: torch.Generator,
    progress: Progress = no_progress,
) -> FlatLine:
    """Train the second network until the loss on the line from the first network is small.

    This is the loss of `hyper_match` without its network, which for a single pair only parametrizes the result anew.
    Align the second network first, so that it has little left to move. Nothing ties the result to its start, and the
    first network itself is a minimum too: `FlatLine.approach` tells how far the result collapsed onto it.

    Parameters are trained, buffers are kept. Any model and loss will do.

    Args:
        params_a: The network at the fixed end, unchanged.
        params_b: The start of training, unchanged.
        task: Module, batches, loss.
        config: Steps, optimizer, minibatches.
        generator: Draws examples and points on the line.
        progress: Shows the steps and their losses.

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
    learned = {name: params_b[name].detach() for name in trained_names(task, params_b)}
    rest = {name: t for name, t in params_b.items() if name not in learned and name not in _further_names(task)}
    first = {name: params_a[name].detach() for name in (*learned, *rest)}
    found = train_end(
        learned, lambda params: {**rest, **params}, first, task, config, generator=generator, progress=progress
    )
    further = _further_names(task)
    moved: Params = {}
    for name, tensor in params_b.items():
        source = further.get(name, name)
        moved[name] = found.params.get(source, tensor)
    return measure_line(params_a, params_b, moved, task, found.losses, config.points)


def _further_names(task: Task) -> dict[str, str]:
    """Further names of tied parameters, each with the first name."""
    first = {id(parameter): name for name, parameter in reversed(list(task.module.named_parameters()))}
    every = task.module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if name != first[id(parameter)]}
