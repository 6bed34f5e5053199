"""Drawn networks, of which those with the least loss are kept."""

import torch

from regauge.core.params import Params, select
from regauge.core.task import Task
from regauge.flow.answers import RUN_AT_ONCE


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
        count = len(next(iter(params.values())))
        losses = [
            self._task.evaluate_each(select(params, slice(k, k + RUN_AT_ONCE)))["loss"]
            for k in range(0, count, RUN_AT_ONCE)
        ]
        self._losses = torch.cat([self._losses, *losses]).nan_to_num(nan=torch.inf)
        kept = self._losses.argsort(stable=True)[: self._count].sort().values
        self._losses = self._losses[kept]
        self._parts = [select(_join([*self._parts, params]), kept)]

    def networks(self) -> Params:
        """The kept networks, in the order in which they were added."""
        return _join(self._parts)


def _join(parts: list[Params]) -> Params:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
