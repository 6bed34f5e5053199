"""What methods that descend on the loss of a task share: the batches over and over, and whether elements differ."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from regauge.core.element import Element
from regauge.core.task import Batch, Task


def repeated(task: Task) -> Iterator[Batch]:
    """The batches of a task over and over.

    Raises:
        ValueError: There are none.
    """
    batches = iter(task.batches)
    first = next(batches, None)
    if first is None:
        raise ValueError("the task has no batches to optimize on")
    yield from itertools.chain([first], batches)
    while True:
        yield from task.batches


def are_alike(x: Element, y: Element) -> Tensor:
    """Where two batches of elements have the same order and the same signs, bool `[*batch]`."""
    same = torch.ones(x.batch, dtype=torch.bool)
    for name in x:
        for left, right in ((x[name].perm, y[name].perm), (x[name].sign, y[name].sign)):
            if left is not None and right is not None:
                same = same & (left == right).flatten(len(x.batch)).all(-1)
    return same
