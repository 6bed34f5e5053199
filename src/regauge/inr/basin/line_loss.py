"""The loss along a line with one end that is learned."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from regauge.alignment.descent import repeated
from regauge.connect.points import combine
from regauge.core.task import Batch, Task


def line_loss(
    task: Task,
    params_a: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    batch: Batch,
    *,
    segments: int,
    generator: torch.Generator,
) -> Tensor:
    """The mean loss of `params` and of one point in each of so many equal parts of the line to it.

        (loss(p) + sum_i loss((1 - l_i) a + l_i p)) / (segments + 1)

    with l_i uniform in [i / segments, (i + 1) / segments).

    Args:
        task: Runs and judges networks; its `prepare` is applied to those between the ends.
        params_a: The end that stays.
        params: The end that is learned.
        batch: Inputs and targets.
        segments: Parts of the line.
        generator: Draws the points on it.

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
    """The task's batches over and over; of each so many examples, drawn anew with replacement.

    Args:
        task: Its inputs and targets have one row for each example.
        examples: In each minibatch; the batches as they are if None.
        generator: Which examples.

    Raises:
        ValueError: There are no batches, or tensors of a batch have different numbers of rows.
    """
    for batch in repeated(task):
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

        def picked(leaf: Any, index: Tensor = index) -> Any:
            return leaf.index_select(0, index.to(leaf.device)) if isinstance(leaf, Tensor) else leaf

        yield tree_map(picked, batch)
