"""Losses of drawn networks on a task, and the networks with the least."""

import torch
from jaxtyping import Float64
from torch import Tensor

from regauge.core.params import Params, select
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.flow.answers import find_metrics


def require_fit(task: Task, symmetry: Symmetry) -> None:
    """Raise a ValueError unless a task runs networks of a symmetry with every size known."""
    own = {name: tuple(tensor.shape) for name, tensor in task.module.state_dict().items()}
    for name, shape in symmetry.shapes.items():
        if name in symmetry.sites and own.get(name) != tuple(shape):
            found = f"{name!r} of shape {own[name]}" if name in own else f"no {name!r}"
            raise ValueError(
                f"the module of the task has {found}, but the networks have the shape {tuple(shape)} there; give a "
                "task with a module of their architecture"
            )


def finite_losses(task: Task, params: Params) -> Float64[Tensor, " models"]:
    """The losses of networks on a task; the largest finite number of float32 where a loss is not finite.

    Raises:
        ValueError: No loss is finite.
    """
    losses, _ = find_metrics(task, params)
    if not bool(losses.isfinite().any()):
        raise ValueError("no drawn network has a finite loss on the task; look for NaN or Inf in its examples")
    largest = torch.finfo(torch.float32).max
    return losses.nan_to_num(nan=largest, posinf=largest)


class Best:
    """The networks with the least loss of all that are added; without a task all of them.

    Args:
        count: The number of networks that are kept.
        task: Tells their losses.
    """

    def __init__(self, count: int, task: Task | None) -> None:
        self._count, self._task = count, task
        self._parts: list[Params] = []
        self._losses = torch.zeros(0, dtype=torch.float64)

    def add(self, params: Params) -> None:
        """Take networks with a leading model axis into account."""
        if self._task is None:
            self._parts.append(params)
            return
        losses = finite_losses(self._task, params)
        self._losses = torch.cat([self._losses.to(losses.device), losses])
        kept = self._losses.argsort(stable=True)[: self._count].sort().values
        self._losses = self._losses[kept]
        self._parts = [select(_join([*self._parts, params]), kept)]

    def networks(self) -> Params:
        """The kept networks, in the order in which they were added."""
        return _join(self._parts)


def _join(parts: list[Params]) -> Params:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
