"""Families that share tensors, solved together for many small problems: two climbs, and the better end of each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regauge.alignment.engine.ascent import Ascent, Solve
from regauge.core.element import Element
from regauge.core.families import Family, Tensors

MAX_SWEEPS = 20
"""Most sweeps of each climb."""


def climb_from_two_starts(families: Sequence[Family], a: Tensors, b: Tensors, solve: Solve) -> tuple[Element, Tensor]:
    """Find one element for each problem by ascent from the identity and from the barycenter.

    Args:
        families: They share tensors, so that the best of one depends on the others.
        a: First networks, `[problem, ...]`.
        b: Second networks.
        solve: Solves a family in which something is nested while the others stay.

    Returns:
        The better end of each problem, and what it gains over the identity, which is never negative.
    """
    ends = [Ascent(families, a, b, solve), Ascent(families, a, b, solve)]
    before = ends[0].objectives()
    ends[1].start_from_barycenter()
    for end in ends:
        end.climb(torch.arange(end.pairs), MAX_SWEEPS)
    gains = [end.objectives() - before for end in ends]
    return ends[1].networks.element.where(gains[1] > gains[0], ends[0].networks.element), torch.maximum(*gains)
