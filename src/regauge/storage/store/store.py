"""A store: a folder of immutable shards with the networks of one architecture, and what is known about each."""

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regauge.checkpoints.location import MANIFEST
from regauge.core.counted import brief
from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.storage.architecture import Architecture
from regauge.storage.store import shard_file
from regauge.storage.store.columns import Array, encode
from regauge.storage.store.listing import FINITE, Listing, Place, resolve
from regauge.storage.store.manifest import Manifest
from regauge.storage.store.packing import memory_of, pack, require_networks, segments_of
from regauge.storage.store.remote import copy_store, url_of
from regauge.storage.store.rows import Indices, Rows, split
from regauge.storage.store.shard_file import Shard, Verification, verify

MAPPED_SHARDS = 4096
"""Shards that a reader keeps mapped. No file stays open, but a process has 65,530 mappings on Linux."""


class Store:
    """Networks of one architecture on the disk, and what is known about each.

    Open one with `Store.create` or `Store.open`. The networks are numbered in the order of the shards' names; a store
    that is refreshed while others write keeps its numbers and adds the new networks at the end. Reading is safe in
    many threads and processes at once, with any number of writers.

    Attributes:
        folder: Its folder.
        architecture: The architecture of all its networks.
        symmetry: The symmetry of the architecture, if it is known.
        storage: Name of the dtype in which floating-point values are kept; None for that of the architecture.
        about: Plain JSON that was given when the store was created, such as the settings of the training.
        key: A text that no other store has, and that it keeps wherever it is moved.

    References:
        docs/store.md specifies the files.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.architecture = manifest.architecture
        self.symmetry = manifest.symmetry
        self.storage = manifest.storage
        self.about = manifest.about
        self.key = manifest.key
        self._manifest = manifest
        self._segments = segments_of(manifest.architecture.layout, manifest.storage)
        self._writer = (-1, "", count())
        self._map = lru_cache(MAPPED_SHARDS)(Shard.map)
        self._listed: Listing | None = None
        self._url: str | None = None

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
        """Return a new store, or the one that is there already if it was created with the same arguments.

        Args:
            folder: The folder of the store, which is made if it does not exist.
            architecture: The architecture of all networks.
            symmetry: The symmetry of the architecture.
            storage: "float16" or "bfloat16" keeps floating-point values in half the bytes, rounded; as they are by
                default.
            about: Anything else to keep, as plain JSON.

        Raises:
            FileExistsError: The folder holds another store, or other files.
            ValueError: The storage is unknown, `about` is not plain JSON, or the folder is a URL.
        """
        if url_of(folder) is not None:
            raise ValueError(
                f"a store cannot be written to {str(folder)!r}; write it to a folder, and upload the folder"
            )
        Manifest(architecture, symmetry, storage, about or {}).write(Path(folder))
        return cls.open(folder)

    @classmethod
    def open(cls, folder: str | Path, *, progress: Progress = no_progress) -> "Store":
        """Return the store in a folder.

        Args:
            folder: Its folder, or the URL of one on object storage, such as "s3://bucket/mlps": any protocol of fsspec.
                Shards that are not there yet are copied to the cache; such a store can be read alone.
            progress: Shows the copying.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It, or one of its shards, is damaged or of another version; or the URL cannot be opened.
            OSError: The object storage cannot be reached.
        """
        url = url_of(folder)
        local = Path(folder) if url is None else copy_store(url, progress)
        store = cls(local, Manifest.read(local))
        store._url = url
        return store

    @classmethod
    def find(cls, folder: str | Path) -> "Store | None":
        """Return the store in a folder, or None without one."""
        if url_of(folder) is None:
            return cls.open(folder) if (Path(folder) / MANIFEST).exists() else None
        try:
            return cls.open(folder)
        except FileNotFoundError:
            return None

    def tell(self, about: Mapping[str, Any]) -> None:
        """Replace `about`, for readers that open the store from now on.

        Raises:
            ValueError: `about` is not plain JSON.
        """
        self._require_here()
        self._manifest.tell(self.folder, about)

    def __len__(self) -> int:
        return len(self._now)

    def __repr__(self) -> str:
        return f"Store({self._url or str(self.folder)!r}: {len(self)} networks of {self.architecture.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        names = None if self._listed is None else tuple(shard.path.stem for shard in self._listed.shards)
        return (_open, (self.folder, names))

    @property
    def rows(self) -> Rows:
        """A row of facts about each network."""
        return self._now.rows

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards in the order of the networks' numbers."""
        return self._now.shards

    @property
    def made_by(self) -> str:
        """The settings in `about` on one line, as Python writes objects."""
        return brief(self.about)

    def count_runs(self) -> int:
        """Return the number of networks of whose training checkpoints are stored."""
        return len(np.unique(self.rows.column("id").values)) if len(self) else 0

    def require_symmetry(self) -> Symmetry:
        """Return the symmetry of the architecture.

        Raises:
            ValueError: It is not known.
        """
        if self.symmetry is None:
            raise ValueError(
                f"the symmetry of the store {str(self.folder)!r} is not known; create it with one, or import it with "
                "`input_shape=`"
            )
        return self.symmetry

    def verify(self) -> Verification:
        """Read every byte of the store on the disk and compare the checksums; see `regauge.storage.store.verify`."""
        return verify(self.folder)

    def refresh(self) -> int:
        """Take in the shards that were written since, at the end; returns how many networks they hold.

        Raises:
            ValueError: A new shard is damaged or of another architecture.
        """
        before = () if self._listed is None else self._listed.shards
        if self._url is not None and self._listed is not None:
            copy_store(self._url)
        known = {shard.path.name for shard in before}
        new = self._headers(path for path in shard_file.list_shards(self.folder) if path.name not in known)
        if new or self._listed is None:
            self._listed = Listing(before + new, self._map)
        return sum(shard.count for shard in new)

    def append(
        self, params: Mapping[str, Tensor], rows: Sequence[Mapping[str, Any]], *, name: str | None = None
    ) -> Path:
        """Write networks as one new shard, whole or not at all.

        When this returns, the shard is on the disk, for this reader after `refresh()` and for every new one; a process
        killed before leaves nothing that a reader sees.

        Args:
            params: The networks, with one leading model axis on every tensor.
            rows: For each network plain JSON values by name, among them "id" (an integer: the trajectory) and
                "step" (an integer: how far it was trained). The column "is_finite" is added.
            name: Name of the shard; one that no other writer uses by default.

        Returns:
            The new file.

        Raises:
            FileExistsError: There is a shard of that name already; shards never change.
            ValueError: The tensors are not those of the architecture, the rows are malformed or not one per network,
                or a value does not fit into the storage dtype.
        """
        self._require_here()
        if name is not None and self.has(name):
            raise FileExistsError(
                f"{str(self.folder)!r} has a shard {name!r}, and shards never change; give another name, or none"
            )
        require_networks(self.architecture, params, rows)
        tensors, finite = pack(params, rows, self._segments, self.storage)
        marked = [{**row, FINITE: fine} for row, fine in zip(rows, finite, strict=True)]
        path = self.path_of(self._next_name() if name is None else name)
        return shard_file.write(path, tensors, encode(marked), len(rows))

    def has(self, name: str) -> bool:
        """Return whether a shard of that name is on the disk."""
        return self.path_of(name).exists()

    def part(self, names: Iterable[str]) -> "Store":
        """Return the networks of some shards alone, numbered from 0 in this order; no other shard is looked at.

        Raises:
            FileNotFoundError: There is no shard of that name.
        """
        part = Store(self.folder, self._manifest)
        part._url = self._url
        part._listed = Listing(self._headers(map(self.path_of, names)), part._map)
        return part

    def places(self, indices: Iterable[int] | Array) -> list[Place]:
        """Return the places of some networks, which never change, while their numbers may differ between readers."""
        return self._now.places(resolve(indices, len(self)))

    def numbers(self, places: Iterable[Place]) -> Indices:
        """Return the numbers that networks have here; the opposite of `places`.

        Raises:
            KeyError: This reader has not listed the shard of one of them.
        """
        return self._now.numbers(places)

    def path_of(self, name: str) -> Path:
        """Return the file of the shard of that name, whether or not it is there.

        Raises:
            ValueError: The name is not usable in a file's name.
        """
        return shard_file.path_of(self.folder, name)

    def read(self, indices: Iterable[int] | slice | Array, *, out: Params | None = None) -> Params:
        """Return some networks, stacked in the order of their numbers in `indices`.

        The shards are mapped into memory: the system reads the pages of these networks and nothing else.

        Args:
            indices: Numbers from 0 to `len(self) - 1`, in any order and repeated if wanted; a slice; or a mask with a
                truth value for every network.
            out: The result of an earlier call for as many networks that is no longer needed: its memory is used again,
                which takes half the time where a batch has tens of megabytes. Values must be stored as they are.

        Returns:
            Parameters and buffers with a leading model axis and the dtypes of the architecture. Tensors of one dtype
            are views of one block of memory.

        Raises:
            IndexError: There is no network of that number, a number is not an integer, or a mask is of another length.
            ValueError: `out` is of another number of networks, or values are not stored as they are.
        """
        listing = self._now
        wanted = resolve(indices, len(listing))
        params: Params = {}
        for segment in self._segments:
            total = len(wanted) * segment.width
            # numpy asks the system for huge pages: half the time of torch.empty for a batch of tens of megabytes.
            buffer = np.empty(total, np.uint8) if out is None else memory_of(out[segment.specs[0].name], total)
            listing.read(wanted, segment, buffer)
            params |= segment.unpack(torch.from_numpy(buffer).view(len(wanted), segment.width).view(segment.dtype))
        return {spec.name: params[spec.name] for spec in self.architecture.layout}

    def split(self, fractions: Mapping[str, float] | None = None, *, salt: str = "") -> dict[str, Indices]:
        """Return numbers of the networks of each part: a fixed function of salt and trajectory, never of the
        checkpoint.

        Args:
            fractions: Expected shares of the trajectories by name; 80% "train", 10% "validation" and 10% "test"
                by default.
            salt: Another salt gives another split.

        Raises:
            ValueError: The fractions do not add up to one.
        """
        return split(self.rows.column("id").values, fractions, salt=salt)

    @property
    def _now(self) -> Listing:
        if self._listed is None:
            self.refresh()
        assert self._listed is not None
        return self._listed

    def _require_here(self) -> None:
        if self._url is not None:
            raise ValueError(
                f"the store at {self._url!r} can be read alone; write to one in a folder, and upload the folder"
            )

    def _headers(self, paths: Iterable[Path]) -> tuple[Shard, ...]:
        """Return the headers of shards of this store."""
        return tuple(Shard.open(path).require_segments(self._segments) for path in paths)

    def _next_name(self) -> str:
        """Return a name that no other writer uses, in the order of this one's; a forked process is another writer."""
        writer = self._writer
        if writer[0] != os.getpid():
            writer = self._writer = (os.getpid(), uuid.uuid4().hex[:12], count())
        return f"{writer[1]}-{next(writer[2]):06d}"


def _open(folder: Path, names: tuple[str, ...] | None) -> Store:
    """Return a store as another process sees it: the same numbers for the same networks, whatever was written since."""
    store = Store.open(folder)
    return store if names is None else store.part(names)
