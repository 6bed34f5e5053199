"""Align a population shard by shard, and compare it block by block."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regauge.alignment.align_pairs import align_pairs
from regauge.alignment.method import Method
from regauge.core.params import Params
from regauge.storage.checkpoints.checkpoint import load
from regauge.storage.checkpoints.writing import save_text, whole_file
from regauge.storage.store import Place, Store, path_of

Compare = Callable[[Params, Params], Tensor]
"""From two populations `[n, ...]` and `[m, ...]` to what relates each pair, `[n, m]`; picklable."""
MANIFEST = "matrix.json"


@dataclass(frozen=True)
class AlignShards:
    """Job `name` aligns the networks of that shard to a reference, and appends them to another store.

    Networks that are not finite are left out. Rows keep what was known and get "objective", what the method maximizes,
    "objective_before", the same before, and "is_converged" where the method knows it.

    Attributes:
        source: Folder of the store that is aligned; its symmetry must be known.
        target: Folder of the store for the aligned networks.
        reference: Checkpoint of the network that stays.
        method: As for `align_pairs`.
        seed: Where all chance comes from.
    """

    source: Path
    target: Path
    reference: Path
    method: Method | None = None
    seed: int = 0

    @property
    def keys(self) -> list[str]:
        """Names of the shards that are there now."""
        return [shard.path.stem for shard in Store.open(self.source).shards]

    def is_done(self, key: str) -> bool:
        """Whether the aligned shard is in the target."""
        return path_of(self.target, key).exists()

    def __call__(self, key: str) -> None:
        """Align one shard."""
        part = Store.open(self.source).part([key])
        if part.symmetry is None:
            raise ValueError(f"the symmetry of the store {str(self.source)!r} is not known; create it with one")
        indices = part.rows.where(is_finite=True)
        params, rows = part.read(indices), part.rows.dicts(indices)
        if rows:
            digest = hashlib.sha256(repr((self.seed, key)).encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            result = align_pairs(load(self.reference), params, part.symmetry, method=self.method, generator=generator)
            columns = {"objective": result.objective, "objective_before": result.initial}
            if result.is_converged is not None:
                columns["is_converged"] = result.is_converged
            params = result.params
            rows = [row | {name: column[k].item() for name, column in columns.items()} for k, row in enumerate(rows)]
        with suppress(FileExistsError):  # another worker did the same
            Store.open(self.target).append(params, rows, name=key)


def plan_alignment(
    source: str | Path, target: str | Path, reference: str | Path, *, method: Method | None = None, seed: int = 0
) -> tuple[Store, AlignShards]:
    """The store for the aligned networks, new or as an interrupted run left it, and the jobs that fill it.

    The target knows its source and its reference: it is filled from no other ones. A source that has grown is aligned
    by planning again.

    Raises:
        FileExistsError: The target holds another store, or other files, or is aligned from another source or to another
            reference.
        FileNotFoundError: There is no source.
    """
    reference = Path(reference)
    digest = hashlib.sha256(reference.read_bytes()).hexdigest()
    made = aligned_store(source, target, {"file": reference.name, "sha256": digest}, method=method, seed=seed)
    return made, AlignShards(Path(source), Path(target), reference, method, seed)


def aligned_store(
    source: str | Path, target: str | Path, to: Mapping[str, Any], *, method: Method | None, seed: int
) -> Store:
    """The store for networks that are aligned to what `to` describes."""
    store = Store.open(source)
    about = {
        "aligned": {"method": repr(method), "to": dict(to), "seed": seed},
        "source": {"key": store.key, "about": dict(store.about)},
    }
    return Store.create(target, store.architecture, store.symmetry, storage=store.storage, about=about)


@dataclass(frozen=True)
class CompareBlocks:
    """Job (i, j) compares block i of some networks with block j, and leaves one file with a part of the matrix.

    Attributes:
        store: Folder of the store.
        folder: For the parts.
        networks: Where in the store they are.
        compare: What is computed.
        size: Networks of a block.
        is_symmetric: Whether only blocks with i <= j are computed, and the others are their transposes.
    """

    store: Path
    folder: Path
    networks: tuple[Place, ...]
    compare: Compare
    size: int = 64
    is_symmetric: bool = True

    @property
    def keys(self) -> list[tuple[int, int]]:
        """All blocks."""
        count = -(-len(self.networks) // self.size)
        return [(i, j) for i in range(count) for j in range(i if self.is_symmetric else 0, count)]

    def is_done(self, key: tuple[int, int]) -> bool:
        """Whether the part is there."""
        return self._path(key).exists()

    def __call__(self, key: tuple[int, int]) -> None:
        """Compare two blocks."""
        first = self._read(key[0])
        # The same object where they are the same networks: half the matrix is enough then.
        second = first if key[0] == key[1] else self._read(key[1])
        part = self.compare(first, second).numpy()
        if part.shape != (len(self._block(key[0])), len(self._block(key[1]))):
            raise ValueError(
                f"the comparison gave shape {part.shape} for {[len(self._block(k)) for k in key]} networks"
            )
        with whole_file(self._path(key)) as temporary, open(temporary, "wb") as file:
            np.save(file, part)

    def matrix(self) -> NDArray[np.float64]:
        """The whole matrix.

        Raises:
            FileNotFoundError: A part is missing; run the jobs.
        """
        matrix = np.empty((len(self.networks), len(self.networks)))
        for i, j in self.keys:
            part = np.load(self._path((i, j)), allow_pickle=False)
            rows, columns = (slice(k * self.size, (k + 1) * self.size) for k in (i, j))
            matrix[rows, columns] = part
            if self.is_symmetric and i != j:
                matrix[columns, rows] = part.T
        return matrix

    def _block(self, k: int) -> tuple[Place, ...]:
        return self.networks[k * self.size : (k + 1) * self.size]

    def _read(self, k: int) -> Params:
        """The networks of a block; only their shards are looked at."""
        places = self._block(k)
        part = Store.open(self.store).part(dict.fromkeys(place.shard for place in places))
        return part.read(part.numbers(places))

    def _path(self, key: tuple[int, int]) -> Path:
        return self.folder / f"{key[0]:06d}-{key[1]:06d}.npy"


def plan_comparison(
    store: Store | str | Path,
    folder: str | Path,
    indices: NDArray[np.int64] | Sequence[int],
    compare: Compare,
    *,
    size: int = 64,
    is_symmetric: bool = True,
    what: str | None = None,
) -> CompareBlocks:
    """The jobs of a matrix, new or as an interrupted run left them.

    Args:
        store: The store, or its folder. Numbers are those of the reader that is given.
        folder: For the parts; is made if it does not exist.
        indices: Numbers of the networks, in the order of the rows and columns.
        compare: From two populations to a matrix; a function of a module, or a picklable object.
        size: Networks of a block.
        is_symmetric: Whether the matrix is.
        what: Tells what is computed from all else, such as the text or the digest of all settings: parts of something
            else are refused. The name of a function unless given; for an object, what it says of itself.

    Raises:
        FileExistsError: The folder holds the parts of another matrix.
    """
    opened, folder = store if isinstance(store, Store) else Store.open(store), Path(folder)
    places = tuple(opened.places(indices))
    computed = _words(compare) if what is None else what
    settings = {"store": opened.key, "compare": computed, "size": size, "symmetric": is_symmetric}
    text = json.dumps(settings | {"networks": places})
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / MANIFEST
    with suppress(FileExistsError):
        save_text(text, manifest, is_new=True)
    if manifest.read_text(encoding="utf-8") != text:
        raise FileExistsError(f"{str(folder)!r} holds the parts of another matrix; choose another folder")
    return CompareBlocks(opened.folder, folder, places, compare, size, is_symmetric)


def _words(compare: Compare) -> str:
    """A function by its name, an object by what it says of itself."""
    name = getattr(compare, "__qualname__", None)
    return repr(compare) if name is None else f"{compare.__module__}:{name}"
