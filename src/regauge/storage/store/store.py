"""A store: a folder of immutable shards with networks of one architecture and metadata for each network."""

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
"""The number of shards that a reader keeps memory-mapped. Linux allows a process 65,530 mappings."""


class Store:
    """A store: networks of one architecture on the disk, with metadata for each network.

    Open a store with `Store.create` or `Store.open`. The indices of networks follow the order of the shards' names. If
    a reader calls `refresh` while others write, existing indices stay the same, and new networks are added at the end.
    Any number of threads and processes can read and write a store at the same time.

    Attributes:
        folder: The folder of the store.
        architecture: The architecture of all networks.
        symmetry: The symmetry of the architecture; None if it is not known.
        storage: The name of the dtype in which floating-point entries are stored; None for the dtype of the
            architecture.
        about: JSON that was given when the store was created, such as training settings.
        key: A unique string that identifies the store, even after the store is moved.

    References:
        The page "store" of the documentation specifies the files.
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
        """Return a new store, or the existing store if it was created with the same arguments.

        Args:
            folder: The folder of the store, which is created if it does not exist.
            architecture: The architecture of all networks.
            symmetry: The symmetry of the architecture.
            storage: "float16" or "bfloat16" for floating-point entries rounded to 16 bits. By default, entries are not
                rounded.
            about: Any additional information to store, as plain JSON.

        Raises:
            FileExistsError: The folder contains another store, or other files.
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
        """Open the store in a folder.

        Args:
            folder: The folder, or the URL of a folder on object storage, such as "s3://bucket/mlps", with any fsspec
                protocol. Missing shards are copied to the cache. A store at a URL is read-only.
            progress: Displays the progress of copying.

        Raises:
            FileNotFoundError: There is no store in the folder.
            ValueError: The store or a shard is damaged or has another version, or the URL cannot be opened.
            OSError: The object storage cannot be reached.
        """
        url = url_of(folder)
        local = Path(folder) if url is None else copy_store(url, progress)
        store = cls(local, Manifest.read(local))
        store._url = url
        return store

    @classmethod
    def find(cls, folder: str | Path) -> "Store | None":
        """Return the store in a folder, or None if there is no store."""
        if url_of(folder) is None:
            return cls.open(folder) if (Path(folder) / MANIFEST).exists() else None
        try:
            return cls.open(folder)
        except FileNotFoundError:
            return None

    def tell(self, about: Mapping[str, Any]) -> None:
        """Replace `about`. Readers that open the store afterwards read the new value.

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
        """The metadata table, with one row per network."""
        return self._now.rows

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards in the order of the networks' indices."""
        return self._now.shards

    @property
    def made_by(self) -> str:
        """The settings in `about`, formatted on one line like Python objects."""
        return brief(self.about)

    def count_runs(self) -> int:
        """Return the number of training runs that have checkpoints in the store."""
        return len(np.unique(self.rows.column("id").values)) if len(self) else 0

    def require_symmetry(self) -> Symmetry:
        """Return the symmetry of the architecture.

        Raises:
            ValueError: The symmetry is not known.
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
        """Add the shards that were written since the last refresh, and return the number of new networks.

        Raises:
            ValueError: A new shard is damaged or has another architecture.
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
        """Write networks atomically as one new shard.

        When this method returns, the shard is on the disk. New readers see the new shard at once, and this reader sees
        the shard after `refresh()`. If the process is killed earlier, no reader sees a partial shard.

        Args:
            params: The networks, with one leading model axis on every tensor.
            rows: For each network, plain JSON values by name. The values of a row include "id" (an integer that
                identifies the trajectory) and "step" (an integer that counts training steps). The column "is_finite" is
                added.
            name: The name of the shard. By default, a name that no other writer uses.

        Returns:
            The new file.

        Raises:
            FileExistsError: A shard with the given name already exists. Shards never change.
            ValueError: The tensors do not fit the architecture, the rows are malformed or not one per network, or an
                entry does not fit into the storage dtype.
        """
        self._require_here()
        if name is not None and self.has(name):
            raise FileExistsError(
                f"{str(self.folder)!r} already has a shard {name!r}, and shards never change; give another name, "
                "or none"
            )
        require_networks(self.architecture, params, rows)
        tensors, finite = pack(params, rows, self._segments, self.storage)
        marked = [{**row, FINITE: fine} for row, fine in zip(rows, finite, strict=True)]
        path = self.path_of(self._next_name() if name is None else name)
        return shard_file.write(path, tensors, encode(marked), len(rows))

    def has(self, name: str) -> bool:
        """Return whether a shard of a given name is on the disk."""
        return self.path_of(name).exists()

    def part(self, names: Iterable[str]) -> "Store":
        """Return a store with only the given shards, in the given order and with new indices from 0. All other shards
        are left unread.

        Raises:
            FileNotFoundError: The store has no shard with one of the given names.
        """
        part = Store(self.folder, self._manifest)
        part._url = self._url
        part._listed = Listing(self._headers(map(self.path_of, names)), part._map)
        return part

    def places(self, indices: Iterable[int] | Array) -> list[Place]:
        """Return the locations of some networks. Locations never change, but indices may differ between readers."""
        return self._now.places(resolve(indices, len(self)))

    def numbers(self, places: Iterable[Place]) -> Indices:
        """Return the indices of networks in this reader, given their locations. `numbers` is the inverse of `places`.

        Raises:
            KeyError: The store object has not listed the shard of a network.
        """
        return self._now.numbers(places)

    def path_of(self, name: str) -> Path:
        """Return the path of a shard by its name, whether or not the file exists.

        Raises:
            ValueError: The name cannot be used in a file name.
        """
        return shard_file.path_of(self.folder, name)

    def read(self, indices: Iterable[int] | slice | Array, *, out: Params | None = None) -> Params:
        """Return some networks, stacked in the order of `indices`.

        The shards are memory-mapped, so the system reads only the pages of the selected networks.

        Args:
            indices: Indices from 0 to `len(self) - 1`, in any order and with repetitions; a slice; or a boolean mask
                with one entry per network.
            out: The result of an earlier call for the same number of networks, whose memory is overwritten. Reuse
                halves the time for batches of tens of megabytes. Reuse requires that entries are stored in the dtype of
                the architecture.

        Returns:
            Parameters and buffers with a leading model axis and the dtypes of the architecture. Tensors of the same
            dtype are views of one block of memory.

        Raises:
            IndexError: An index is out of range or not an integer, or a mask has another length.
            ValueError: `out` has another number of networks, or entries are not stored in the dtype of the
                architecture.
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
        """Return the network indices of each split. All checkpoints of a trajectory are in the same split.

        Args:
            fractions: The expected share of trajectories in each split, by name. Default: 80% "train", 10% "validation"
                and 10% "test".
            salt: A string that determines the random assignment.

        Raises:
            ValueError: The fractions do not sum to one.
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
                f"the store at {self._url!r} can only be read; write to one in a folder, and upload the folder"
            )

    def _headers(self, paths: Iterable[Path]) -> tuple[Shard, ...]:
        """Return the headers of shards of this store."""
        return tuple(Shard.open(path).require_segments(self._segments) for path in paths)

    def _next_name(self) -> str:
        """Return a shard name that no other writer uses. The names of one writer ascend."""
        writer = self._writer
        if writer[0] != os.getpid():
            writer = self._writer = (os.getpid(), uuid.uuid4().hex[:12], count())
        return f"{writer[1]}-{next(writer[2]):06d}"


def _open(folder: Path, names: tuple[str, ...] | None) -> Store:
    """Return the store with exactly the given shards. Network indices are then the same as in another process."""
    store = Store.open(folder)
    return store if names is None else store.part(names)
