"""The shards that a reader has listed, and the indices of the networks in each shard."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from regauge.storage.store.columns import Array, Column, concatenate
from regauge.storage.store.packing import Segment
from regauge.storage.store.rows import Indices, Rows
from regauge.storage.store.shard_file import Shard

FINITE = "is_finite"
"""The column that marks networks with NaN or Inf."""
ALWAYS = ("id", "step", FINITE)
"""Columns that every store has, even if it is empty."""
PIECES_AT_ONCE = 512
"""The number of memory pieces that are copied together."""


class Place(NamedTuple):
    """The location of a network in a store: the shard's name, and the row in the shard."""

    shard: str
    row: int


@dataclass(frozen=True)
class Listing:
    """Shards in the order of the networks' indices, and a function that returns the bytes of a shard."""

    shards: tuple[Shard, ...]
    map: Callable[[Shard], Array]
    _starts: dict[str, Indices] = field(default_factory=dict, init=False)

    @cached_property
    def starts(self) -> Indices:
        """The index of the first network of each shard, followed by the total number of networks."""
        return np.concatenate([[0], np.cumsum([shard.count for shard in self.shards], dtype=np.int64)])

    @cached_property
    def rows(self) -> Rows:
        """The metadata table, with one row per network."""
        names = dict.fromkeys([*ALWAYS, *(name for shard in self.shards for name in shard.columns)])
        return Rows(len(self), names, self._load)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def locate(self, numbers: Indices) -> tuple[Indices, Indices]:
        """Return the index of each network's shard, and the network's row in the shard. The two results have shape
        `[networks]`.
        """
        shard = np.searchsorted(self.starts, numbers, side="right") - 1
        return shard, numbers - self.starts[shard]

    def places(self, numbers: Indices) -> list[Place]:
        """Return the locations of some networks."""
        shards, rows = self.locate(numbers)
        return [Place(self.shards[k].path.stem, row) for k, row in zip(shards.tolist(), rows.tolist(), strict=True)]

    def numbers(self, places: Iterable[Place]) -> Indices:
        """Return the indices of the networks at some locations; raise a KeyError if a shard is not listed."""
        first = {shard.path.stem: int(start) for shard, start in zip(self.shards, self.starts[:-1], strict=True)}
        return np.array([first[shard] + row for shard, row in places], np.int64)

    def read(self, numbers: Indices, segment: Segment, target: Array) -> None:
        """Copy one segment of some networks into memory, `segment.width` bytes for each."""
        if not len(numbers):
            return
        shards, rows = self.locate(numbers)
        starts = self._segment_starts(segment)[shards] + rows * segment.width
        ends = starts + segment.width
        # Consecutive rows of one shard form one piece.
        is_next = (starts[1:] == ends[:-1]) & (numbers[1:] == numbers[:-1] + 1)
        bounds: Sequence[int] = range(len(numbers) + 1)
        if is_next.any():
            first = np.concatenate([[True], ~is_next])
            shards, starts, ends = shards[first], starts[first], ends[np.append(~is_next, True)]
            bounds = [*np.flatnonzero(first).tolist(), len(numbers)]
        pieces = list(zip(shards.tolist(), starts.tolist(), ends.tolist(), strict=True))
        for first_piece in range(0, len(pieces), PIECES_AT_ONCE):  # as many shards are mapped at a time
            part = pieces[first_piece : first_piece + PIECES_AT_ONCE]
            content = {k: self.map(self.shards[k]) for k in {k for k, _, _ in part}}
            here = target[bounds[first_piece] * segment.width : bounds[first_piece + len(part)] * segment.width]
            np.concatenate([content[k][start:end] for k, start, end in part], out=here)

    def _segment_starts(self, segment: Segment) -> Indices:
        """Return the offset of a segment's first byte in each shard."""
        if segment.name not in self._starts:
            self._starts[segment.name] = np.array([shard.places[segment.name].start for shard in self.shards], np.int64)
        return self._starts[segment.name]

    def _load(self, name: str) -> Column:
        return concatenate([(shard.column(name, self.map(shard)), shard.count) for shard in self.shards])


def resolve(indices: Iterable[int] | slice | Array, count: int, what: str = "the store") -> Indices:
    """Return the indices of networks, `[networks]`, given indices, a slice, or a boolean mask of length `count`.

    Raises:
        IndexError: An index is out of range or not an integer, or a mask has another length.
    """
    if isinstance(indices, slice):
        indices = range(*indices.indices(count))
    wanted = np.asarray(indices if isinstance(indices, np.ndarray | range) else list(indices)).reshape(-1)
    if isinstance(indices, np.ma.MaskedArray) and wanted.dtype == bool:
        wanted = indices.filled(False).reshape(-1)
    if wanted.dtype == bool:
        if len(wanted) != count:
            raise IndexError(
                f"a mask of {len(wanted)} truth values does not fit {what}'s {count} networks; give one for each"
            )
        return np.flatnonzero(wanted)
    if len(wanted) and wanted.dtype.kind not in "iu":
        raise IndexError(f"networks are numbered by integers, but {wanted.dtype} values were given; convert them")
    if len(wanted) and not 0 <= wanted.min() <= wanted.max() < count:
        strange = wanted[(wanted < 0) | (wanted >= count)][0]
        raise IndexError(f"{what} has the networks 0 to {count - 1}, but {strange} was asked for")
    return wanted.astype(np.int64)
