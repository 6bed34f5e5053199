"""The division of tensors into pieces. All entries of a piece are transformed by the same groups.

A piece is a complete grid of units.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Int, Num
from torch import Tensor

from regauge.core.act import Site
from regauge.weightspace.layout.blocks import Label


@dataclass(frozen=True, eq=False)
class Piece:
    """Some entries of a tensor, arranged as a grid `[*labels, *fixed]`.

    Attributes:
        parameter: The name of the tensor.
        labels: The axes of the grid on which groups act.
        bases: For each label, the labels of the groups within which it is repeated, outermost first.
        sizes: The length of each label.
        fixed: For each axis of the tensor, the number of indices that belong to the same units.
        start: The flat index of the first value.
        strides: The strides of the flat index along labels and then fixed axes, or None if they are not constant.
        index: The flat index of every entry, or None if `strides` describes the piece.
    """

    parameter: str
    labels: tuple[Label, ...]
    bases: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    fixed: tuple[int, ...]
    start: int
    strides: tuple[int, ...] | None
    index: Int[Tensor, "*shape"] | None

    @property
    def channels(self) -> int:
        """The number of values for each combination of units."""
        return math.prod(self.fixed)

    def read(self, tensor: Num[Tensor, "models *shape"]) -> Num[Tensor, "models *labels channels"]:
        """Return the entries of this piece in the tensors of several networks."""
        flat = tensor.reshape(len(tensor), -1)
        shape = (len(tensor), *self.sizes, *self.fixed)
        if self.strides is None:
            assert self.index is not None
            values = flat[:, self.index.to(tensor.device)]
        else:
            flat = flat.contiguous()
            start = flat.storage_offset() + self.start
            values = flat.as_strided(shape, (flat.stride(0), *self.strides), start)
        return values.reshape(len(tensor), *self.sizes, self.channels)

    def flat_index(self) -> Int[Tensor, "*labels channels"]:
        """Return the flat index of every entry."""
        if self.strides is None:
            assert self.index is not None
            return self.index.reshape(*self.sizes, self.channels)
        shape = (*self.sizes, *self.fixed)
        index = torch.full((), self.start)
        for axis, (size, step) in enumerate(zip(shape, self.strides, strict=True)):
            index = index + (torch.arange(size) * step).reshape([-1 if k == axis else 1 for k in range(len(shape))])
        return index.reshape(*self.sizes, self.channels)


@dataclass(frozen=True)
class _Segment:
    """Indices of one axis on which the same groups act, arranged as `[*units of each group, rest]`."""

    sites: tuple[Site, ...]
    index: Int[Tensor, "*units rest"]


def cut(name: str, shape: tuple[int, ...], sites: Sequence[Site], read: Collection[int] = frozenset()) -> list[Piece]:
    """Return the pieces of one tensor, which together contain every entry once.

    Along the axes in `read`, a layer sums over units.
    """
    per_axis = [list(_segments(axis, size, sites)) for axis, size in enumerate(shape)]
    return [_piece(name, shape, choice, read) for choice in product(*per_axis)]


def _segments(axis: int, size: int, sites: Sequence[Site]) -> Iterator[_Segment]:
    """Yield the segments of an axis, in the order of their first index."""
    here = [site for site in sites if site.placement.axis == axis]
    owners = torch.full((len(here) + 1, size), -1)  # the last row gives fixed axes a key too
    for row, site in zip(owners, here, strict=False):
        row[site.positions] = site.units
    keys, which = torch.unique(owners >= 0, dim=1, return_inverse=True)
    order = sorted(range(keys.shape[1]), key=lambda k: int((which == k).nonzero()[0]))
    for k in order:
        positions = (which == k).nonzero().flatten()
        rows = keys[:, k].nonzero().flatten().tolist()
        chosen = sorted((here[row] for row in rows), key=lambda site: len(site.group.within))
        sizes = [site.group.size for site in chosen]
        place = torch.zeros(len(positions), dtype=torch.int64)
        for site in chosen:
            units = torch.full((size,), -1)
            units[site.positions] = site.units
            place = place * site.group.size + units[positions]
        grid = positions[place.argsort(stable=True)]
        counts = place.bincount(minlength=torch.Size(sizes).numel())
        if int(counts.min()) != int(counts.max()):
            raise ValueError(
                f"groups {[site.group.name for site in chosen]} own {int(counts.min())} to {int(counts.max())} indices "
                f"of axis {axis} of {chosen[0].placement.parameter!r} each, but every unit must own equally many; fix "
                "the placements of the symmetry"
            )
        yield _Segment(tuple(chosen), grid.reshape(*sizes, -1))


def _piece(name: str, shape: tuple[int, ...], choice: Sequence[_Segment], read: Collection[int]) -> Piece:
    labels: list[Label] = []
    known: dict[tuple[int, str], int] = {}
    owners: list[tuple[int, Site]] = []
    for axis, segment in enumerate(choice):
        for site in segment.sites:
            how = site.placement
            known[axis, site.group.name] = len(labels)
            owners.append((axis, site))
            reads = int(axis in read)
            labels.append(Label(site.group.name, how.scale, how.sign, how.parity, how.shift, how.is_inverse, reads))
    bases = tuple(
        tuple(
            known[axis if other is None else other, base]
            for base, (other, _) in zip(site.group.within, site.bases, strict=True)
        )
        for axis, site in owners
    )
    sizes = tuple(site.group.size for _, site in owners)
    fixed = tuple(segment.index.shape[-1] for segment in choice)
    steps = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        steps[axis] = steps[axis + 1] * shape[axis + 1]
    start = sum(int(segment.index.flatten()[0]) * step for segment, step in zip(choice, steps, strict=True))
    per_axis = [_strides_of(segment.index) for segment in choice]
    if all(strides is not None for strides in per_axis):
        scaled = [
            [stride * step for stride in strides] for strides, step in zip(per_axis, steps, strict=True) if strides
        ]
        strides = (*(s for own in scaled for s in own[:-1]), *(own[-1] for own in scaled))
        return Piece(name, tuple(labels), bases, sizes, fixed, start, strides, None)
    index, before = torch.zeros((), dtype=torch.int64), 0
    ndim = len(sizes) + len(fixed)
    for axis, (segment, step) in enumerate(zip(choice, steps, strict=True)):
        place = [1] * ndim
        units = segment.index.shape[:-1]
        place[before : before + len(units)] = units
        place[len(sizes) + axis] = fixed[axis]
        index = index + (segment.index * step).reshape(place)
        before += len(units)
    return Piece(name, tuple(labels), bases, sizes, fixed, start, None, index)


def _strides_of(index: Int[Tensor, "*shape"]) -> tuple[int, ...] | None:
    """Return the strides of an index array, or None if the strides along an axis are not constant."""
    start = int(index.flatten()[0])
    strides = []
    for axis, size in enumerate(index.shape):
        along = index[tuple(slice(None) if k == axis else 0 for k in range(index.ndim))]
        strides.append(int(along[1] - along[0]) if size > 1 else 0)
    even = torch.full((), start)
    for axis, (size, step) in enumerate(zip(index.shape, strides, strict=True)):
        even = even + (torch.arange(size) * step).reshape([-1 if k == axis else 1 for k in range(index.ndim)])
    return tuple(strides) if bool((even == index).all()) else None
