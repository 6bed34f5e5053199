"""Correspondence between the parameters of networks with different numbers of units."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from regauge.core.symmetry import Symmetry
from regauge.flow.space import Space
from regauge.flow.value_orbits import unit_indices


def find_places(before: Space, after: Space) -> Int[Tensor, " values"]:
    """Return, for each coordinate of resized networks, a corresponding coordinate of `before`.

    All coordinates that permutations exchange are equivalent. Therefore the first two units of every group represent
    all units.

    Raises:
        ValueError: The networks differ in more than the numbers of units.
    """
    numbers = {name: torch.arange(start, start + count) for name, start, count in _pieces(before)}
    blank = torch.full((after.dim,), -1)
    for name, start, _ in _pieces(after):
        old, new = before.symmetry.shapes[name], after.symmetry.shapes[name]
        axes = [_matches(before.symmetry, after.symmetry, name, axis) for axis in range(len(new))]
        if len(old) != len(new):
            raise ValueError(
                f"{name!r} has {len(new)} axes in these networks, but had {len(old)}; give networks that differ only "
                "in widths"
            )
        there = torch.cartesian_prod(*(one[0] for one in axes)).reshape(-1, len(new))
        here = torch.cartesian_prod(*(one[1] for one in axes)).reshape(-1, len(new))
        blank[start + _flat_index(here, new)] = numbers[name][_flat_index(there, old)]
    known = torch.full((int(after.exchanged.max()) + 1,), -1)
    places = blank[after.order]
    found = torch.argsort(before.order)[places.clamp_min(0)]
    known[after.exchanged[places >= 0]] = found[places >= 0]
    if bool((known < 0).any()):
        raise ValueError(
            "these networks have values that correspond to no value of the earlier networks; give networks that differ "
            "only in widths"
        )
    return known[after.exchanged]


def _pieces(space: Space) -> list[tuple[str, int, int]]:
    """Return the name, the first flat index and the number of entries of each tensor."""
    counts = [torch.Size(space.symmetry.shapes[name]).numel() for name in space.names]
    return list(zip(space.names, np.cumsum([0, *counts]).tolist(), counts, strict=False))


def _matches(before: Symmetry, after: Symmetry, name: str, axis: int) -> tuple[Tensor, Tensor]:
    """Return corresponding indices of an axis before and after the change of sizes, for the first two units of each
    group.
    """
    pairs = [
        (first, second, min(2, one.size, other.size))
        for one, other in zip(before.groups, after.groups, strict=True)
        for first, second in zip(one.placements, other.placements, strict=True)
        if (first.parameter, first.axis) == (name, axis)
    ]
    if not pairs:
        size = before.shapes[name][axis]
        if after.shapes[name][axis] != size:
            raise ValueError(
                f"axis {axis} of {name!r} has {after.shapes[name][axis]} values, but had {size}; give networks that "
                "differ only in widths"
            )
        return torch.arange(size), torch.arange(size)
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for pair in pairs:
        if [size for size, _ in pair[0].repeats] != [size for size, _ in pair[1].repeats]:
            raise ValueError(
                f"the units on axis {axis} of {name!r} have other sizes; only their number may differ: give such "
                "networks"
            )
        for side, placement in zip(sides, pair[:2], strict=True):
            side.append(unit_indices(placement, pair[2]).flatten())
    return torch.cat(sides[0]), torch.cat(sides[1])


def _flat_index(index: Tensor, shape: Sequence[int]) -> Tensor:
    """Return multi-indices converted to indices in a flat tensor."""
    strides = torch.tensor([torch.Size(shape[k + 1 :]).numel() for k in range(len(shape))])
    return (index * strides).sum(1)
