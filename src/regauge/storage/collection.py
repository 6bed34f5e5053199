"""Collections of networks of one or several architectures. Indices run consecutively through all populations."""

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regauge.checkpoints.formats.headers import TensorSpec
from regauge.checkpoints.writing import bytes_of
from regauge.core.params import Params, count_models, select
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.storage.store.columns import Array
from regauge.storage.store.listing import resolve
from regauge.storage.store.rows import Indices
from regauge.storage.store.store import Store

Networks = Store | Mapping[str, Tensor]
"""A store, which is read batch by batch, or a population in memory: parameters with a leading model axis."""
Kept = Literal["last", "all"]
"""The checkpoints of each training run in a store that are read."""


def _parse_conditions(texts: Iterable[str]) -> dict[str, Any]:
    """Return the columns and values of conditions such as "step=86". Numbers and booleans are converted.

    Raises:
        ValueError: A string is not a condition.
    """
    conditions: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"`where={text}` is not a condition; write COLUMN=VALUE, for example step=86")
        try:
            conditions[name] = json.loads(value)
        except json.JSONDecodeError:
            conditions[name] = value
    return conditions


class Collection:
    """One or several stores and populations, whose networks are indexed consecutively through all members.

    Members with the same tensors and the same symmetry have the same layout. Networks with the same layout can be
    stacked.

    Args:
        networks: A store or a population, or a list of stores and populations.
        symmetry: One symmetry for all members, or a list with one symmetry for each member. Default: the symmetry
            recorded in each store.

    Attributes:
        members: The stores and populations.
        symmetries: The symmetry of each member; None for unknown symmetries.
        layouts: The index of each member's layout. Layouts are indexed from 0 in the order of their first members.
        starts: The index of the first network of each member, followed by the total number of networks.

    Raises:
        ValueError: The collection has no members, or the number of symmetries differs from the number of members.
    """

    def __init__(
        self,
        networks: "Networks | Sequence[Networks] | Collection",
        symmetry: Symmetry | Sequence[Symmetry | None] | None = None,
    ) -> None:
        if isinstance(networks, Collection):
            symmetry = networks.symmetries if symmetry is None else symmetry
            networks = networks.members
        self.members: tuple[Networks, ...] = (networks,) if isinstance(networks, Store | Mapping) else tuple(networks)
        given = (
            (symmetry,) * len(self.members) if symmetry is None or isinstance(symmetry, Symmetry) else tuple(symmetry)
        )
        if not self.members or len(given) != len(self.members):
            raise ValueError(
                f"there are {len(self.members)} stores or populations and {len(given)} symmetries; give at least one, "
                "and one symmetry for all or one for each"
            )
        self.symmetries: tuple[Symmetry | None, ...] = tuple(
            one.symmetry if known is None and isinstance(one, Store) else known
            for one, known in zip(self.members, given, strict=True)
        )
        keys = [_layout_key(*pair) for pair in zip(self.members, self.symmetries, strict=True)]
        self._firsts = [keys.index(key) for key in dict.fromkeys(keys)]
        self.layouts = tuple([keys[first] for first in self._firsts].index(key) for key in keys)
        self.starts = np.cumsum([0, *(_count(one) for one in self.members)])

    @classmethod
    def open(cls, folders: Iterable[str | Path], *, progress: Progress = no_progress) -> "Collection":
        """Open the stores in some folders as a collection."""
        return cls([Store.open(folder, progress=progress) for folder in folders])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __repr__(self) -> str:
        return f"Collection({len(self)} networks of {len(self.members)} members, {len(self._firsts)} layouts)"

    @cached_property
    def key(self) -> str:
        """A string that identifies the networks of the collection. Computing the key reads all tensors of populations
        in memory.
        """
        digest = blake2b(digest_size=16)
        for one, count in zip(self.members, np.diff(self.starts).tolist(), strict=True):
            digest.update(f"{one.key if isinstance(one, Store) else [*tensors_of(one)]} {count}\n".encode())
            for tensor in () if isinstance(one, Store) else one.values():
                digest.update(bytes_of(tensor.detach()))
        return digest.hexdigest()

    def first(self, layout: int) -> int:
        """Return the index of the first member with a layout."""
        return self._firsts[layout]

    def symmetry(self, layout: int) -> Symmetry:
        """Return the symmetry of a layout.

        Raises:
            ValueError: The symmetry is not known.
        """
        first = self.first(layout)
        found, member = self.symmetries[first], self.members[first]
        if found is not None:
            return found
        if isinstance(member, Store):
            return member.require_symmetry()
        raise ValueError("the symmetry of a population in memory is not known; give `symmetry`")

    def choose(self, indices: Iterable[int] | slice | Array | None, checkpoints: Kept) -> Indices:
        """Return the indices of the chosen networks: `indices` if given, otherwise the checkpoints of each run that
        `checkpoints` selects.

        Args:
            indices: See `resolve`.
            checkpoints: "last": the last checkpoint of each run that was not discarded. "all": all checkpoints. For a
                population in memory, all networks are chosen.

        Raises:
            IndexError: An index is out of range.
            ValueError: `checkpoints` is neither "last" nor "all".
        """
        if checkpoints not in get_args(Kept):
            raise ValueError(f"checkpoints={checkpoints!r}: give 'last', the last one of each run of a store, or 'all'")
        if indices is not None or checkpoints == "all":
            return self.resolve(indices)
        pieces = [
            start + (one.rows.final() if isinstance(one, Store) else np.arange(_count(one)))
            for one, start in zip(self.members, self.starts.tolist(), strict=False)
        ]
        return np.concatenate(pieces)

    def find(self, conditions: Mapping[str, Any] | Iterable[str], checkpoints: Kept = "last") -> Indices:
        """Return the indices of the networks in the stores that satisfy the conditions.

        Args:
            conditions: Columns with their values, as in `Rows.where`, or strings such as "step=86".
            checkpoints: "last": the last matching checkpoint of each run; "all": all matching checkpoints.

        Raises:
            KeyError: A store has no column with the given name.
            ValueError: A string is not a condition.
        """
        conditions = conditions if isinstance(conditions, Mapping) else _parse_conditions(conditions)
        pieces = []
        for store, start in zip(self.stores, self.starts.tolist(), strict=False):
            own = store.rows.where(**conditions)
            pieces.append(start + (store.rows.final(own) if checkpoints == "last" else own))
        return np.concatenate(pieces)

    def resolve(self, indices: Iterable[int] | slice | Array | None) -> Indices:
        """Return the indices of networks, given indices, a slice or a mask. By default, return the indices of all
        networks.

        Raises:
            IndexError: An index is out of range.
        """
        what = "the store" if isinstance(self.members[0], Store) else "the population"
        return resolve(slice(None) if indices is None else indices, len(self), self._what(what))

    def locate(self, numbers: Indices) -> tuple[Indices, Indices]:
        """Return the index of each network's store or population, and the network's index within this store or
        population. The two results have shape `[networks]`.
        """
        member = np.searchsorted(self.starts, numbers, side="right") - 1
        return member, numbers - self.starts[member]

    def layout_of(self, numbers: Indices) -> Indices:
        """Return the index of each network's layout, `[networks]`."""
        return np.asarray(self.layouts, np.int64)[self.locate(numbers)[0]]

    def read(self, numbers: Indices) -> Params:
        """Return some networks of one layout, stacked in the given order.

        Raises:
            ValueError: The networks have several layouts.
        """
        if len(self.members) == 1:
            return _read(self.members[0], numbers)
        member, there = self.locate(numbers)
        found = np.unique(member)
        if len({self.layouts[k] for k in found}) > 1:
            raise ValueError("networks of several layouts cannot be stacked; read those of one layout at a time")
        if len(found) == 1:
            return _read(self.members[found[0]], there)
        pieces = [_read(self.members[k], there[member == k]) for k in found]
        back = torch.from_numpy(np.argsort(np.argsort(member, kind="stable"), kind="stable"))
        return {name: torch.cat([piece[name] for piece in pieces]).index_select(0, back) for name in pieces[0]}

    def column(self, name: str) -> Array:
        """Return a column of all stores as a masked array. Networks without a value are masked.

        Raises:
            KeyError: A store has no column with the given name.
            ValueError: A member is not a store, or the types of the columns cannot be combined.
        """
        columns = []
        for one in self.members:
            if not isinstance(one, Store):
                raise ValueError(f"{name!r} names a column, but a population in memory has no columns; give values")
            columns.append(one.rows[name])
        kinds = {column.dtype.kind for column in columns}
        if len(columns) == 1:
            return columns[0]
        if len(kinds) > 1 and not kinds <= set("iuf"):
            raise ValueError(f"the column {name!r} has numbers in one store and other values in another; rename one")
        is_masked = any(isinstance(column, np.ma.MaskedArray) for column in columns)
        joined: Array = np.concatenate([np.ma.getdata(column) for column in columns])
        if is_masked:
            joined = np.ma.MaskedArray(joined, np.concatenate([np.ma.getmaskarray(column) for column in columns]))
        return joined

    def has_column(self, name: str) -> bool:
        """Return whether all members are stores with a column of a given name."""
        return all(isinstance(one, Store) and name in one.rows.names for one in self.members)

    @cached_property
    def stores(self) -> tuple[Store, ...]:
        """The members that are stores."""
        return tuple(one for one in self.members if isinstance(one, Store))

    @property
    def first_stores(self) -> tuple[Store, ...]:
        """The first store of each layout."""
        firsts = (self.members[first] for first in self._firsts)
        return tuple(one for one in firsts if isinstance(one, Store))

    def _what(self, one: str) -> str:
        return one if len(self.members) == 1 else "the collection"


def tensors_of(networks: Networks) -> tuple[TensorSpec, ...]:
    """Return the specifications of the tensors of one network."""
    if isinstance(networks, Store):
        return networks.architecture.layout
    return tuple(TensorSpec(name, tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in networks.items())


def _layout_key(networks: Networks, symmetry: Symmetry | None) -> Hashable:
    return tensors_of(networks), None if symmetry is None else symmetry.groups


def _count(networks: Networks) -> int:
    return len(networks) if isinstance(networks, Store) else count_models(networks)


def _read(networks: Networks, indices: NDArray[Any]) -> Params:
    return networks.read(indices) if isinstance(networks, Store) else select(networks, torch.from_numpy(indices))
