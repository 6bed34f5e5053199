"""Permutations of fibers (vectors along one axis), written as slices, reshapes, transposes and concatenations."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

RUNS = 6
"""The largest number of slices in one permutation, such as a permutation of the gates of a recurrent cell."""


@dataclass(frozen=True)
class Strided:
    """A list of positions that can be written as a reshape, a selection and a permutation of axes.

    Attributes:
        shape: The shape to which the source is reshaped.
        fixed: For each axis of the reshaped source, the index that is selected, or None for the whole axis.
        order: The remaining axes, in the order in which they are read.
        flipped: The axes that are read in reverse order.
    """

    shape: tuple[int, ...]
    fixed: tuple[int | None, ...]
    order: tuple[int, ...]
    flipped: tuple[int, ...]

    @classmethod
    def of(cls, index: Ints, size: int) -> "Strided | None":
        """Return an index into `size` positions as a `Strided`, or None if the index cannot be written in this form."""
        start, levels = int(index[0]), _levels(index)
        if levels is None:
            return None
        lowest = start + sum((length - 1) * stride for length, stride in levels if stride < 0)
        shape: list[int] = []
        fixed: list[int | None] = []
        axis_of: dict[int, int] = {}
        unit = 1
        for level in sorted(range(len(levels)), key=lambda one: abs(levels[one][1])):
            length, stride = levels[level][0], abs(levels[level][1])
            if stride == 0 or stride % unit:
                return None
            if stride > unit:
                shape.append(stride // unit)
                fixed.append(lowest // unit % (stride // unit))
            axis_of[level] = len(shape)
            shape.append(length)
            fixed.append(None)
            unit = stride * length
        if size % unit:
            return None
        if size > unit:
            shape.append(size // unit)
            fixed.append(lowest // unit)
        last = len(shape) - 1
        order = tuple(last - axis_of[level] for level in range(len(levels)))
        flipped = tuple(last - axis_of[level] for level in range(len(levels)) if levels[level][1] < 0)
        found = cls(tuple(reversed(shape)), tuple(reversed(fixed)), order, flipped)
        return found if np.array_equal(found.index(), index) else None

    def index(self) -> Ints:
        """Return the index that this strided form describes."""
        places = np.arange(prod(self.shape)).reshape(self.shape)
        for axis in self.flipped:
            places = np.flip(places, axis)
        taken = places[tuple(slice(None) if one is None else one for one in self.fixed)]
        kept = [axis for axis, one in enumerate(self.fixed) if one is None]
        return np.asarray(taken.transpose([kept.index(axis) for axis in self.order]).reshape(-1), dtype=np.int64)

    def write(self, source: str, tail: Sequence[int]) -> str:
        """Return the torch expression that selects given positions from a source, which has further axes `tail`.

        The positions lie along the first axes of the result. The result keeps its first axes separate, without
        flattening them into one axis.
        """
        text = source
        if len(self.shape) > 1:
            text += f".reshape({', '.join(map(str, (*self.shape, *tail)))})"
        if self.flipped:
            text += f".flip({', '.join(map(str, self.flipped))})"
        if any(one is not None for one in self.fixed):
            last = max(axis for axis, one in enumerate(self.fixed) if one is not None)
            text += f"[{', '.join(':' if one is None else str(one) for one in self.fixed[: last + 1])}]"
        kept = [axis for axis, one in enumerate(self.fixed) if one is None]
        order = [kept.index(axis) for axis in self.order]
        moved = [axis for axis, one in enumerate(order) if axis != one]
        if len(moved) == 2:
            text += f".transpose({moved[0]}, {moved[1]})"
        elif moved:
            text += f".permute({', '.join(map(str, (*order, *range(len(order), len(order) + len(tail)))))})"
        return text


def _levels(index: Ints) -> list[tuple[int, int]] | None:
    """Return the lengths and strides of the nested loops that produce an index, the outermost loop first."""
    levels: list[tuple[int, int]] = []
    while len(index) > 1:
        steps = np.diff(index)
        breaks = np.flatnonzero(steps != steps[0])
        length = int(breaks[0]) + 1 if len(breaks) else len(index)
        if len(index) % length:
            return None
        blocks = index.reshape(-1, length)
        if (np.diff(blocks, axis=1) != steps[0]).any():
            return None
        levels.append((length, int(steps[0])))
        index = blocks[:, 0]
    return levels[::-1]


def write_places(source: str, index: Ints, size: int, tail: Sequence[int]) -> str | None:
    """Return an expression that selects positions along the flattened first axis of a source, or None."""
    start, count = int(index[0]), len(index)
    if np.array_equal(index, np.arange(start, start + count)):
        end = start + count
        return source if count == size else f"{source}[{start if start else ''}:{'' if end == size else end}]"
    found = Strided.of(index, size)
    if found is None:
        runs = np.split(index, np.flatnonzero(np.diff(index) != 1) + 1)
        if len(runs) > RUNS:
            return None
        return f"torch.cat([{', '.join(str(write_places(source, one, size, tail)) for one in runs)}])"
    return f"{found.write(source, tail)}.reshape({', '.join(map(str, (count, *tail)))})"


def periods(owner: Ints) -> int | None:
    """Return the number of segments into which a list of sources can be divided if all segments must have the same
    sequence of sources. Return None if no division has this property.
    """
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    order = owner[starts]
    count = len(set(order.tolist()))
    if len(order) % count or len(owner) % (len(order) // count):
        return None
    groups = owner.reshape(len(order) // count, -1)
    is_once = len(set(order[:count].tolist())) == count
    return len(groups) if is_once and (groups == groups[0]).all() else None


def segments(owner: Ints) -> list[slice]:
    """Return consecutive slices of fibers (vectors along one axis) such that no source occurs in two slices."""
    last = {one: at for at, one in enumerate(owner.tolist())}
    found, start, end = [], 0, 0
    for at, one in enumerate(owner.tolist()):
        end = max(end, last[one])
        if at == end:
            found.append(slice(start, at + 1))
            start = at + 1
    return found
