"""Rearrangements of entries between tensors of any size, described exactly by boxes (blocks of entries with strides).

A tensor that consists of rearranged entries of other tensors is represented by a list of boxes. Entry `i` of a box lies
at `start + i . strides` in the flattened tensor, and at `there + i . theirs` in the flattened source tensor. Reshaping
does not change the boxes. If axes are permuted, or tensors are sliced or concatenated, the result is again a list of
boxes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MOST_BOXES = 100_000
"""The largest number of boxes of one tensor. More boxes mean that entries are not rearranged along axes."""


@dataclass(frozen=True)
class Box:
    """A strided box of entries that a tensor copies from the tensor named `source`; the largest stride comes first."""

    source: str
    start: int
    there: int
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    theirs: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """The number of entries."""
        return math.prod(self.sizes)

    @property
    def end(self) -> int:
        """One more than the last index in the flat tensor."""
        return self.start + _reach(self.sizes, self.strides) + 1

    @property
    def end_there(self) -> int:
        """One more than the last index in the flat source."""
        return self.there + _reach(self.sizes, self.theirs) + 1

    def copy(self, source: Tensor, target: Tensor, *, skipped_there: int = 0, skipped: int = 0) -> None:
        """Copy the entries of the box from a flat source to a flat target; source and target may lack some of the first
        entries.
        """
        self._own(target, skipped).copy_(self._theirs(source, skipped_there))

    def copy_back(self, target: Tensor, source: Tensor) -> None:
        """Copy the entries of the box from the flat tensor back to the flat source."""
        self._theirs(source, 0).copy_(self._own(target, 0))

    def _own(self, flat: Tensor, skipped: int) -> Tensor:
        return torch.as_strided(flat, self.sizes, self.strides, flat.storage_offset() + self.start - skipped)

    def _theirs(self, flat: Tensor, skipped: int) -> Tensor:
        return torch.as_strided(flat, self.sizes, self.theirs, flat.storage_offset() + self.there - skipped)

    def _fix(self, dim: int, index: int) -> "Box":
        """Return the box of the entries at one index of a dimension."""
        start, there = self.start + index * self.strides[dim], self.there + index * self.theirs[dim]
        sizes, strides, theirs = (
            values[:dim] + values[dim + 1 :] for values in (self.sizes, self.strides, self.theirs)
        )
        return Box(self.source, start, there, sizes, strides, theirs)

    def _narrow(self, dim: int, first: int, length: int) -> "Box":
        """Return the box of the entries in a range of indices of a dimension."""
        start, there = self.start + first * self.strides[dim], self.there + first * self.theirs[dim]
        return replace(self, start=start, there=there, sizes=(*self.sizes[:dim], length, *self.sizes[dim + 1 :]))

    def _unfold(self, dim: int, length: int) -> "Box":
        """Split a dimension into two: the index of a block of the given length, and the index within the block."""
        size, stride, their = self.sizes[dim], self.strides[dim], self.theirs[dim]
        return Box(
            self.source,
            self.start,
            self.there,
            (*self.sizes[:dim], size // length, length, *self.sizes[dim + 1 :]),
            (*self.strides[:dim], stride * length, stride, *self.strides[dim + 1 :]),
            (*self.theirs[:dim], their * length, their, *self.theirs[dim + 1 :]),
        )


Boxes = tuple[Box, ...]


def whole(source: str, numel: int) -> Boxes:
    """Return one box (block of entries with strides) with all entries of a tensor, in their original order."""
    return (Box(source, 0, 0, (numel,), (1,), (1,)),) if numel else ()


def is_whole(boxes: Boxes, numel: int) -> bool:
    """Return whether a tensor consists of all entries of one source tensor, in their original order."""
    return len(boxes) == 1 and boxes[0] == whole(boxes[0].source, numel)[0]


def cut(boxes: Iterable[Box], first: int, end: int) -> Boxes:
    """Return the boxes, or parts of boxes, with indices from `first` to `end` (excluded) in the flat tensor."""
    return tuple(part for box in boxes for part in _cut(box, first, end))


def select(boxes: Boxes, shape: Sequence[int], axis: int, first: int, end: int) -> Boxes:
    """Return the boxes of a tensor of the given shape after it is sliced along an axis."""
    inner = math.prod(shape[axis + 1 :])
    before, after = shape[axis] * inner, (end - first) * inner
    result: list[Box] = []
    for box in _split_all(boxes, before):
        block, place = divmod(box.start, before)
        for part in _cut(replace(box, start=place), first * inner, end * inner, before):
            strides = tuple(s // before * after if s % before == 0 else s for s in part.strides)
            result.append(_tidy(replace(part, start=block * after + part.start - first * inner, strides=strides)))
    return _limited(result)


def permute(boxes: Boxes, shape: Sequence[int], order: Sequence[int]) -> Boxes:
    """Return the boxes of a tensor of the given shape after its axes are permuted as by `torch.permute`."""
    old, new = _strides(shape), _strides([shape[axis] for axis in order])
    moved = {axis: new[k] for k, axis in enumerate(order)}
    for stride in sorted({s for s in old if s > 1}, reverse=True):
        boxes = _limited(_split_all(boxes, stride))
    result = []
    for box in boxes:
        start = sum(box.start // old[axis] % shape[axis] * moved[axis] for axis in range(len(shape)))
        axes = [next((a for a in range(len(shape)) if shape[a] > 1 and old[a] <= s), 0) for s in box.strides]
        strides = tuple(s // old[a] * moved[a] for s, a in zip(box.strides, axes, strict=True))
        result.append(_tidy(replace(box, start=start, strides=strides)))
    return _limited(result)


def concatenate(parts: Sequence[tuple[Boxes, Sequence[int]]], axis: int) -> Boxes:
    """Return the boxes of the concatenation along an axis of tensors, each given by its boxes and its shape."""
    after = sum(shape[axis] for _, shape in parts) * math.prod(parts[0][1][axis + 1 :])
    result, offset = [], 0
    for boxes, shape in (part for part in parts if part[0]):
        before = math.prod(shape[axis:])
        for box in _split_all(boxes, before):
            block, place = divmod(box.start, before)
            strides = tuple(s // before * after if s % before == 0 else s for s in box.strides)
            result.append(_tidy(replace(box, start=block * after + place + offset, strides=strides)))
        offset += before
    return _limited(result)


def _split_all(boxes: Iterable[Box], length: int) -> Iterator[Box]:
    """Yield boxes in which every dimension either runs within a block of the given length or steps from block
    to block.
    """
    for box in boxes:
        yield from _split(box, length)


def _split(box: Box, length: int) -> Iterator[Box]:
    inside = [k for k, stride in enumerate(box.strides) if stride % length]
    place = box.start % length
    if place + sum((box.sizes[k] - 1) * box.strides[k] for k in inside) < length:
        yield box
        return
    dim = max(inside, key=lambda k: box.strides[k])
    size, stride = box.sizes[dim], box.strides[dim]
    rest = sum((box.sizes[k] - 1) * box.strides[k] for k in inside if k != dim)
    if length % stride or place % stride + rest >= stride:
        for index in range(size):
            yield from _split(box._fix(dim, index), length)
        return
    count, passed = length // stride, place // stride
    if passed and count - passed < size:
        yield from _split(box._narrow(dim, 0, count - passed), length)
        yield from _split(box._narrow(dim, count - passed, size - count + passed), length)
    else:
        full = size // count * count
        yield from _split(box._narrow(dim, 0, full)._unfold(dim, count), length)
        if full < size:
            yield from _split(box._narrow(dim, full, size - full), length)


def _cut(box: Box, first: int, end: int, length: int | None = None) -> Iterator[Box]:
    """Yield the part of a box with indices in a range. With a length, indices count within blocks of this length."""
    dims = [k for k, stride in enumerate(box.strides) if length is None or stride % length]
    last = box.start + sum((box.sizes[k] - 1) * box.strides[k] for k in dims)
    if last < first or box.start >= end:
        return
    if box.start >= first and last < end:
        yield box
        return
    dim = max(dims, key=lambda k: box.strides[k])
    size, stride = box.sizes[dim], box.strides[dim]
    rest = last - box.start - (size - 1) * stride
    touched = range(max(0, -(-(first - rest - box.start) // stride)), min(size, -(-(end - box.start) // stride)))
    within = range(max(0, -(-(first - box.start) // stride)), min(size, -(-(end - rest - box.start) // stride)))
    if len(within) > 0:
        yield box._narrow(dim, within.start, len(within))
    for index in touched:
        if index not in within:
            yield from _cut(box._fix(dim, index), first, end, length)


def _tidy(box: Box) -> Box:
    """Merge dimensions of a box until as few as possible remain, and sort them by decreasing stride."""
    dims: list[tuple[int, int, int]] = []
    for stride, their, size in sorted(zip(box.strides, box.theirs, box.sizes, strict=True), reverse=True):
        if size == 1:
            continue
        if dims and dims[-1][0] == size * stride and dims[-1][1] == size * their:
            dims[-1] = (stride, their, dims[-1][2] * size)
        else:
            dims.append((stride, their, size))
    strides, theirs, sizes = (tuple(dim[k] for dim in dims) for k in range(3))
    if not dims:
        strides, theirs, sizes = (1,), (1,), (1,)
    return Box(box.source, box.start, box.there, sizes, strides, theirs)


def _limited(boxes: Iterable[Box]) -> Boxes:
    result = []
    for box in boxes:
        result.append(box)
        if len(result) > MOST_BOXES:
            raise ValueError(
                f"entries of {box.source!r} are re-arranged in more than {MOST_BOXES} pieces; align without "
                "transformers' names"
            )
    return tuple(result)


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
