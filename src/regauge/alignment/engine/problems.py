"""Coordinate ascent over families that share tensors, for many small problems at once, from two starts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regauge.alignment.engine.batched import BatchAscent, Solve
from regauge.core.element import Element
from regauge.core.families import Family, Tensors

ROUNDS = 20
"""Most rounds of coordinate ascent."""


def solved(families: Sequence[Family], a: Tensors, b: Tensors, solve: Solve) -> tuple[Element, Tensor]:
    """One element for each problem, and what it gains over the identity; it loses nowhere.

    It ascends from the identity and from the barycentre and keeps the better end of each problem.

    Args:
        families: They share tensors, so that the best of one depends on the others.
        a: First networks, `[problem, ...]`.
        b: Second networks.
        solve: Solves a family in which something is nested while the others stay.
    """
    a, b = ({key: tensor.cpu() for key, tensor in tensors.items()} for tensors in (a, b))
    ends = [BatchAscent(families, a, b, solve), BatchAscent(families, a, b, solve)]
    before = ends[0].stacks.objectives()
    ends[1].start_from_barycentre()
    gains = []
    for end in ends:
        rows = torch.arange(end.pairs)
        for _ in range(ROUNDS):
            rows = rows[end.sweep(rows)]
            if not len(rows):
                break
        gains.append(end.stacks.objectives() - before)
    is_better = gains[1] > gains[0]
    return ends[1].stacks.element.where(is_better, ends[0].stacks.element), torch.maximum(*gains)
