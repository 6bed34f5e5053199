"""Fibers of tensors, that is, the vectors along one axis, and the search for equal fibers in other tensors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import KDTree
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PROJECTIONS = 6
"""The number of random projections of a fiber.

The length of a fiber and its projections together distinguish millions of fibers.
"""
LOOSE = 8.0
"""The largest distance between projections of equal fibers, relative to their root mean square times the precision of
the format."""
TIGHT = 4.0
"""Two entries count as equal up to this difference, in units of the precision of the format times the largest entry of
their fiber (vector along one axis)."""
NEIGHBORS = 4
"""The number of candidates for each fiber (the vectors along one axis of a tensor).

Several tensors may contain equal fibers, for example a tied head and its embedding.
"""
CHUNK = 1 << 24
"""The number of entries that are projected at once."""


def fibers_of(tensor: Tensor, axis: int) -> Tensor:
    """Return the vectors along one axis of a tensor, as rows in the order of its remaining axes."""
    return tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis])


@dataclass(frozen=True)
class Marks:
    """Features of fibers (vectors along one axis), by which equal fibers are found in other tensors.

    Attributes:
        ordered: Random projections of each fiber, followed by its root mean square: `[fibers, PROJECTIONS + 1]`.
        unordered: Features of each fiber that do not depend on the order of its entries, followed by its root mean
            square.
    """

    ordered: Floats
    unordered: Floats

    @classmethod
    def of(cls, tensor: Tensor, axis: int) -> "Marks":
        """Compute the features of a tensor's fibers (vectors along one axis) in float64, in chunks."""
        rows = fibers_of(tensor, axis)
        plan = _projections(rows.shape[1])
        parts = [_marks(part.double(), plan) for part in torch.split(rows, max(1, CHUNK // rows.shape[1]))]
        ordered, unordered = (torch.cat(one).numpy() for one in zip(*parts, strict=True))
        return cls(ordered, unordered)


@lru_cache(maxsize=64)
def _projections(length: int) -> Tensor:
    chance = torch.Generator().manual_seed(length)
    plan = torch.randn(length, PROJECTIONS, generator=chance, dtype=torch.float64)
    return plan / math.sqrt(length)


def _marks(rows: Tensor, plan: Tensor) -> tuple[Tensor, Tensor]:
    size = rows.square().mean(1).sqrt()
    cubes = rows.pow(3).mean(1)
    unordered = torch.stack(
        (rows.mean(1), rows.abs().mean(1), cubes.sign() * cubes.abs().pow(1 / 3), rows.amax(1), rows.amin(1), size), 1
    )
    return torch.cat((rows @ plan, size[:, None]), 1), unordered


@dataclass(frozen=True)
class Owners:
    """All fibers (vectors along an axis) of one length in a network, each with its tensor and axis.

    Attributes:
        keys: The name of each tensor, with the axis of its fibers.
        marks: The features of all fibers, with one row for each fiber.
        key: For each fiber, the index of its tensor in `keys`.
        index: For each fiber, its index within the tensor.
    """

    keys: tuple[tuple[str, int], ...]
    marks: Floats
    key: Ints
    index: Ints

    @classmethod
    def of(cls, marks: Sequence[tuple[tuple[str, int], Floats]]) -> "Owners":
        """Return the features of several tensors' fibers, concatenated."""
        counts = [len(one) for _, one in marks]
        return cls(
            tuple(key for key, _ in marks),
            np.concatenate([one for _, one in marks]),
            np.repeat(np.arange(len(marks)), counts),
            np.concatenate([np.arange(count) for count in counts]),
        )

    def tree(self, *, scaled: bool) -> KDTree:
        """Return a search tree for the nearest fibers (vectors along one axis). If `scaled`, fibers are divided by
        their root mean squares.
        """
        return KDTree(unit(self.marks) if scaled else self.marks)


def unit(marks: Floats) -> Floats:
    """Return the features of fibers (vectors along one axis), divided by the root mean squares of the fibers. Fibers of
    zeros are unchanged.
    """
    size = marks[:, -1:]
    return np.divide(marks, size, out=marks.copy(), where=size > 0)


def nearest(
    marks: Floats, owners: Owners, tree: KDTree, precision: float
) -> Iterator[tuple[tuple[str, int], Ints, Ints]]:
    """Yield the tensors that contain fibers (vectors along one axis) similar to the given fibers.

    The tensor with the most similar fibers comes first.

    Yields:
        A tensor and its axis, the indices of those given fibers that the tensor may contain, and their indices within
        the tensor.
    """
    count = min(NEIGHBORS, len(owners.marks))
    distance, places = tree.query(marks, k=[*range(1, count + 1)])
    found = np.asarray(places, dtype=np.int64)
    near = distance <= LOOSE * precision * np.maximum(marks[:, -1:], 1e-300)
    key = np.where(near, owners.key[found], -1)
    for owner in sorted(set(key[near].tolist()), key=lambda one: -int((key == one).any(1).sum())):
        mine = key == owner
        rows = np.flatnonzero(mine.any(1))
        yield owners.keys[owner], rows, owners.index[found[rows, mine[rows].argmax(1)]]


def equal_fibers(b: Tensor, made: Tensor, precision: float) -> Tensor:
    """Return, for each pair of rows, whether all entries are equal up to rounding."""
    largest = torch.maximum(b.abs().amax(1), made.abs().amax(1))
    return (b - made).abs().amax(1) <= TIGHT * precision * largest
