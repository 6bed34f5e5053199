"""A store: a folder of immutable shards with the networks of one architecture, and what is known about each."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.storage.architecture import Architecture
from regauge.storage.checkpoints.writing import save_text
from regauge.storage.store import shard as shards
from regauge.storage.store.columns import Array, Column, concatenate, encode
from regauge.storage.store.files import OpenFiles, ShardNames
from regauge.storage.store.fitting import require_fitting, require_layout, require_range
from regauge.storage.store.packing import STORAGE, are_finite, memory_of, name_of, parts_of, runs_of, unpacked
from regauge.storage.store.rows import Indices, Rows
from regauge.storage.store.shard import FOLDER, MANIFEST, SUFFIX, Shard
from regauge.storage.store.splits import split
from regauge.storage.store.verification import Verification, verify

FORMAT = "regauge.store"
VERSION = 1
FINITE = "is_finite"
"""The column in which a network with NaN or Inf is marked."""
ALWAYS = ("id", "step", FINITE)
"""Columns of every store, of an empty one too."""


class Store:
    """Networks of one architecture on the disk, and what is known about each.

    Open one with `Store.create` or `Store.open`. The networks are numbered in the order of the shards' names; a store
    that is refreshed while others write keeps its numbers and adds the new networks at the end. Reading is safe in
    many threads and processes at once, beside any number of writers.

    Attributes:
        folder: Where it is.
        architecture: Of all its networks.
        symmetry: Of the architecture, if it is known.
        storage: Name of the dtype in which floating-point values are kept; None for that of the architecture.
        about: What else was said when the store was created: plain JSON, such as the settings of the training.
        key: What tells this store from all others, wherever it is moved.

    References:
        docs/store.md specifies the files.
    """

    def __init__(
        self,
        folder: Path,
        architecture: Architecture,
        symmetry: Symmetry | None,
        storage: str | None,
        about: Mapping[str, Any],
        key: str,
    ) -> None:
        self.folder = folder
        self.architecture = architecture
        self.symmetry = symmetry
        self.storage = storage
        self.about = about
        self.key = key
        self._parts = parts_of(architecture.layout, storage)
        self._names = ShardNames()
        self._files = OpenFiles()
        self._table: _Table | None = None

    @classmethod
    def create(
        cls,
        folder: str | Path,
        architecture: Architecture,
        symmetry: Symmetry | None = None,
        *,
        storage: str | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> "Store":
        """A new store, or the one that is there already if it was created with the same arguments.

        Args:
            folder: Is made if it does not exist.
            architecture: Of all networks.
            symmetry: Of the architecture.
            storage: "float16" or "bfloat16" keeps floating-point values in half the bytes, rounded; as they are unless
                given.
            about: Anything else to remember, as plain JSON.

        Raises:
            FileExistsError: The folder holds another store, or other files.
            ValueError: The storage is unknown, or `about` is not plain JSON.
        """
        folder = Path(folder)
        if storage is not None and storage not in STORAGE:
            raise ValueError(f"values can be stored as {' or '.join(STORAGE)}, or as they are (None), not {storage!r}")
        document = {
            "format": FORMAT,
            "version": VERSION,
            "architecture": json.loads(architecture.to_json()),
            "symmetry": None if symmetry is None else json.loads(symmetry.to_json()),
            "storage": storage,
            "about": json.loads(json.dumps(dict(about or {}), allow_nan=False)),
            "key": uuid.uuid4().hex,
        }
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        manifest = folder / MANIFEST
        if manifest.exists():
            store = cls.open(folder)
            is_same = {
                "architecture": store.architecture == architecture,
                "storage": store.storage == storage,
                "symmetry": _groups(store.symmetry) == _groups(symmetry),
            }
            other = [name for name, same in is_same.items() if not same]
            other += _differences(store.about, document["about"])
            if other:
                raise FileExistsError(
                    f"{str(folder)!r} holds a store of other networks or settings ({', '.join(other[:5])}); open it, "
                    "or choose another folder"
                )
            return store
        own = (FOLDER, MANIFEST)  # another process may be creating the same store right now
        if folder.exists() and any(not name.startswith(".") for name in os.listdir(folder) if name not in own):
            raise FileExistsError(f"{str(folder)!r} holds other files; choose a new or empty folder for a store")
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        try:
            save_text(text, manifest, is_new=True)
        except FileExistsError:  # another process was first
            return cls.create(folder, architecture, symmetry, storage=storage, about=about)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: str | Path) -> "Store":
        """The store in a folder.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It, or one of its shards, is damaged or of another version.
        """
        folder = Path(folder)
        manifest = folder / MANIFEST
        if not manifest.is_file():
            raise FileNotFoundError(f"there is no store in {str(folder)!r}: it has no {MANIFEST}; check the path")
        try:
            text = manifest.read_text(encoding="utf-8")
            document = json.loads(text)
            if document["format"] != FORMAT:
                raise ValueError(f"its format is {document['format']!r}, not {FORMAT!r}")
            if document["version"] != VERSION:
                raise ValueError(f"it has version {document['version']}, but this regauge reads version {VERSION}")
            symmetry = document["symmetry"]
            return cls(
                folder,
                Architecture.from_json(json.dumps(document["architecture"])),
                None if symmetry is None else Symmetry.from_json(json.dumps(symmetry)),
                document["storage"],
                document["about"],
                document.get("key", hashlib.sha256(text.encode()).hexdigest()),
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{str(manifest)!r} does not describe a store ({type(error).__name__}: {error}); restore it from a copy"
            ) from error

    def __len__(self) -> int:
        return int(self._now.starts[-1])

    def __repr__(self) -> str:
        return f"Store({str(self.folder)!r}: {len(self)} networks of {self.architecture.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        names = None if self._table is None else tuple(shard.path.stem for shard in self._table.shards)
        return (_opened, (self.folder, names))

    @property
    def rows(self) -> Rows:
        """What is known about each network."""
        return self._now.rows

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards in the order of the networks' numbers."""
        return self._now.shards

    def verify(self) -> Verification:
        """Read every byte of the store on the disk and compare the checksums; see `regauge.storage.store.verify`."""
        return verify(self.folder)

    def refresh(self) -> int:
        """Take in the shards that were written since, at the end; returns how many networks they hold.

        Raises:
            ValueError: A new shard is damaged or of another architecture.
        """
        before = () if self._table is None else self._table.shards
        known = {shard.path.name for shard in before}
        with os.scandir(self.folder / FOLDER) as entries:
            names = sorted(e.name for e in entries if e.name.endswith(SUFFIX) and not e.name.startswith("."))
        new = tuple(shards.read_header(self.folder / FOLDER / name) for name in names if name not in known)
        for shard in new:
            require_fitting(shard, self._parts)
        if new or self._table is None:
            self._table = self._listed(before + new)
        return sum(shard.count for shard in new)

    def append(
        self, params: Mapping[str, Tensor], rows: Sequence[Mapping[str, Any]], *, name: str | None = None
    ) -> Path:
        """Write networks as one new shard, whole or not at all.

        When this returns, the shard is on the disk, for this reader after `refresh()` and for every new one; a process
        killed before leaves nothing that a reader sees.

        Args:
            params: The networks, with one leading model axis on every tensor.
            rows: What is known about each: plain JSON values by name, among them "id" (an integer: the trajectory) and
                "step" (an integer: how far it was trained). The column "is_finite" is added.
            name: Of the shard; one that no other writer uses unless given.

        Returns:
            The new file.

        Raises:
            FileExistsError: There is a shard of that name already; shards never change.
            ValueError: The tensors are not those of the architecture, the rows are malformed or not one per network,
                or a value does not fit into the storage dtype.
        """
        if name is not None and self.has(name):
            raise FileExistsError(
                f"{str(self.folder)!r} has a shard {name!r}, and shards never change; give another name, or none"
            )
        count = len(rows)
        require_layout(self.architecture, params, count)
        for k, row in enumerate(rows):
            for key in ("id", "step"):
                if not isinstance(row.get(key), int | np.integer) or isinstance(row[key], bool):
                    raise ValueError(f"row {k} has {key}={row.get(key)!r}; each row needs an integer 'id' and 'step'")
        weights, finite = {}, torch.ones(count, dtype=torch.bool)
        for dtype, specs in self._parts.items():
            flat = torch.cat(
                [params[spec.name].detach().reshape(count, spec.size).to(dtype).cpu() for spec in specs], dim=1
            )
            if dtype.is_floating_point:
                finite &= are_finite(flat)
            weights[name_of(dtype)] = flat.contiguous()
        if self.storage is not None:
            require_range(self.storage, params, finite, rows)
        marked = [{**row, FINITE: bool(fine)} for row, fine in zip(rows, finite.tolist(), strict=True)]
        path = self.path_of(self._names.next() if name is None else name)
        return shards.write(path, weights, encode(marked), count)

    def has(self, name: str) -> bool:
        """Whether a shard of that name is on the disk."""
        return self.path_of(name).exists()

    def part(self, names: Iterable[str]) -> "Store":
        """The networks of some shards alone, numbered from 0 in this order; no other shard is looked at.

        Raises:
            FileNotFoundError: There is no shard of that name.
        """
        part = Store(self.folder, self.architecture, self.symmetry, self.storage, self.about, self.key)
        listed = tuple(shards.read_header(self.path_of(name)) for name in names)
        for shard in listed:
            require_fitting(shard, self._parts)
        part._table = part._listed(listed)
        return part

    def places(self, indices: Iterable[int] | Array) -> list["Place"]:
        """Where some networks are, which stays so for good: their numbers may differ between readers."""
        table = self._now
        wanted = self._numbers(indices)
        found = np.searchsorted(table.starts, wanted, side="right") - 1
        rows = wanted - table.starts[found]
        return [Place(table.shards[k].path.stem, row) for k, row in zip(found.tolist(), rows.tolist(), strict=True)]

    def numbers(self, places: Iterable["Place"]) -> Indices:
        """The numbers that networks have here; the opposite of `places`.

        Raises:
            KeyError: This reader has not listed the shard of one of them.
        """
        table = self._now
        first = {shard.path.stem: int(start) for shard, start in zip(table.shards, table.starts[:-1], strict=True)}
        return np.array([first[shard] + row for shard, row in places], np.int64)

    def path_of(self, name: str) -> Path:
        """The file of the shard of that name, whether or not it is there.

        Raises:
            ValueError: The name is not usable in a file's name.
        """
        return shards.path_of(self.folder, name)

    def read(self, indices: Iterable[int] | slice | Array, *, out: Params | None = None) -> Params:
        """Some networks, stacked in the order of their numbers in `indices`.

        Their values are read at once by position, in the order of the files, and nothing else is.

        Args:
            indices: Numbers from 0 to `len(self) - 1`, in any order and repeated if wanted; a slice; or a mask with a
                truth value for every network.
            out: What an earlier call returned for as many networks and is no longer needed: its memory is used again,
                which takes half the time where a batch has tens of megabytes. Values must be stored as they are.

        Returns:
            Parameters and buffers with a leading model axis and the dtypes of the architecture. Tensors of one dtype
            are views of one block of memory.

        Raises:
            IndexError: There is no network of that number, a number is not an integer, or a mask is of another length.
            ValueError: `out` is of another number of networks, or values are not stored as they are.
        """
        table = self._now
        wanted = self._numbers(indices)
        order = np.argsort(wanted, kind="stable")
        runs = runs_of(wanted, order, table.starts)
        params: Params = {}
        for dtype, specs in self._parts.items():
            size = sum(spec.size for spec in specs)
            width, name = size * dtype.itemsize, name_of(dtype)
            # numpy asks the system for huge pages: half the time of torch.empty for a batch of tens of megabytes.
            total = len(wanted) * width
            buffer = np.empty(total, np.uint8) if out is None else memory_of(out[specs[0].name], total)
            for number, row, target, length in runs:
                shard = table.shards[number]
                start = shard.places[f"weights/{name}"].start + row * width
                file = self._files.get(shard.path)  # which stays open while it is held
                shards.read_into(file.descriptor, buffer[target * width : (target + length) * width], start)
            params |= unpacked(torch.from_numpy(buffer).view(len(wanted), width).view(dtype), specs)
        return {spec.name: params[spec.name] for spec in self.architecture.layout}

    def split(self, fractions: Mapping[str, float] | None = None, *, salt: str = "") -> dict[str, Indices]:
        """Numbers of the networks of each part: a fixed function of salt and trajectory, never of the checkpoint.

        Args:
            fractions: Expected shares of the trajectories by name; 80% "train", 10% "validation" and 10% "test"
                unless given.
            salt: Another salt gives another split.

        Raises:
            ValueError: The fractions do not add up to one.
        """
        return split(self.rows.column("id").values, fractions, salt=salt)

    @property
    def _now(self) -> "_Table":
        if self._table is None:
            self.refresh()
        assert self._table is not None
        return self._table

    def _listed(self, listed: tuple[Shard, ...]) -> "_Table":
        starts = np.concatenate([[0], np.cumsum([shard.count for shard in listed], dtype=np.int64)])
        names = dict.fromkeys([*ALWAYS, *(name for shard in listed for name in shard.columns)])

        def read(shard: Shard, name: str) -> Column | None:
            file = self._files.get(shard.path)  # which stays open while it is held
            return shards.read_column(shard, file.descriptor, name)

        def load(name: str) -> Column:
            return concatenate([(read(shard, name), shard.count) for shard in listed])

        return _Table(listed, starts, Rows(int(starts[-1]), names, load))

    def _numbers(self, indices: Iterable[int] | slice | Array) -> Indices:
        """Numbers of networks, checked, `[networks]`."""
        count = len(self)
        if isinstance(indices, slice):
            indices = range(*indices.indices(count))
        wanted = np.asarray(indices if isinstance(indices, np.ndarray | range) else list(indices)).reshape(-1)
        if isinstance(indices, np.ma.MaskedArray) and wanted.dtype == bool:
            wanted = indices.filled(False).reshape(-1)
        if wanted.dtype == bool:
            if len(wanted) != count:
                raise IndexError(f"a mask of {len(wanted)} truth values does not fit the store's {count} networks")
            return np.flatnonzero(wanted)
        if len(wanted) and wanted.dtype.kind not in "iu":
            raise IndexError(f"networks are numbered by integers, and {wanted.dtype} values were given")
        strange = wanted[(wanted < 0) | (wanted >= count)]
        if len(strange):
            raise IndexError(f"the store has the networks 0 to {count - 1}, but {strange[0]} was asked for")
        return wanted.astype(np.int64)


class Place(NamedTuple):
    """Where a network is in a store: name of the shard, and row in it."""

    shard: str
    row: int


def _opened(folder: Path, names: tuple[str, ...] | None) -> Store:
    """A store as another process sees it: the same numbers for the same networks, whatever was written since."""
    store = Store.open(folder)
    return store if names is None else store.part(names)


class _Table(NamedTuple):
    """What a reader has listed: shards, the number of the first network of each and of the end, and the rows."""

    shards: tuple[Shard, ...]
    starts: Array
    rows: Rows


def _differences(first: Any, second: Any, path: str = "") -> list[str]:
    """Where two JSON values differ, as paths of keys."""
    if isinstance(first, dict) and isinstance(second, dict):
        keys = dict.fromkeys((*first, *second))
        return [found for key in keys for found in _differences(first.get(key), second.get(key), f"{path}.{key}")]
    return [] if first == second else [path.removeprefix(".")]


def _groups(symmetry: Symmetry | None) -> Any:
    """What a symmetry does; its notes, such as the error with which it was verified, may differ."""
    return None if symmetry is None else symmetry.groups
