"""Align a population shard by shard, and compare it block by block."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regauge.align.align_pairs import align_pairs
from regauge.align.matching import Method
from regauge.checkpoints.reading import load
from regauge.checkpoints.writing import save_text
from regauge.core.params import Params
from regauge.zoo.store import Store, path_of

Compare = Callable[[Params, Params], Tensor]
"""From two populations `[n, ...]` and `[m, ...]` to what relates each pair, `[n, m]`; picklable."""
MANIFEST = "matrix.json"


@dataclass(frozen=True)
class AlignShards:
    """Job `name` aligns the networks of that shard to a reference, and appends them to another store.

    Networks that are not finite are left out. Rows keep what was known and get "objective", what the method maximizes,
    "objective_before", the same before, and "is_converged".

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
        """Names of the shards."""
        return [shard.path.stem for shard in Store.open(self.source).shards]

    def is_done(self, key: str) -> bool:
        """Whether the aligned shard is in the target."""
        return path_of(self.target, key).exists()

    def __call__(self, key: str) -> None:
        """Align one shard."""
        part = Store.open(self.source).shard(key)
        if part.symmetry is None:
            raise ValueError(f"the symmetry of the store {str(self.source)!r} is not known; create it with one")
        indices = part.rows.where(is_finite=True)
        digest = hashlib.sha256(repr((self.seed, key)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        result = align_pairs(
            load(self.reference), part.read(indices), part.symmetry, method=self.method, generator=generator
        )
        gained = zip(result.objective.tolist(), result.initial.tolist(), result.is_converged.tolist(), strict=True)
        rows = [
            row | {"objective": after, "objective_before": before, "is_converged": converged}
            for row, (after, before, converged) in zip(part.rows.dicts(indices), gained, strict=True)
        ]
        Store.open(self.target).append(result.params, rows, name=key)


def plan_alignment(
    source: str | Path, target: str | Path, reference: str | Path, *, method: Method | None = None, seed: int = 0
) -> tuple[Store, AlignShards]:
    """The store for the aligned networks, new or as an interrupted run left it, and the jobs that fill it.

    Raises:
        FileExistsError: The target holds another store, or other files.
        FileNotFoundError: There is no source.
    """
    store = Store.open(source)
    about = {"aligned": repr(method), "reference": Path(reference).name, "seed": seed} | dict(store.about)
    made = Store.create(target, store.architecture, store.symmetry, storage=store.storage, about=about)
    return made, AlignShards(Path(source), Path(target), Path(reference), method, seed)


@dataclass(frozen=True)
class CompareBlocks:
    """Job (i, j) compares block i of some networks with block j, and leaves one file with a part of the matrix.

    Attributes:
        store: Folder of the store.
        folder: For the parts.
        indices: Numbers of the networks.
        compare: What is computed.
        size: Networks of a block.
        is_symmetric: Whether only blocks with i <= j are computed, and the others are their transposes.
    """

    store: Path
    folder: Path
    indices: tuple[int, ...]
    compare: Compare
    size: int = 64
    is_symmetric: bool = True

    @property
    def keys(self) -> list[tuple[int, int]]:
        """All blocks."""
        count = -(-len(self.indices) // self.size)
        return [(i, j) for i in range(count) for j in range(i if self.is_symmetric else 0, count)]

    def is_done(self, key: tuple[int, int]) -> bool:
        """Whether the part is there."""
        return self._path(key).exists()

    def __call__(self, key: tuple[int, int]) -> None:
        """Compare two blocks."""
        store = Store.open(self.store)
        first = store.read(self._block(key[0]))
        # The same object where they are the same networks: half the matrix is enough then.
        second = first if key[0] == key[1] else store.read(self._block(key[1]))
        part = self.compare(first, second).numpy()
        if part.shape != (len(self._block(key[0])), len(self._block(key[1]))):
            raise ValueError(
                f"the comparison gave shape {part.shape} for {[len(self._block(k)) for k in key]} networks"
            )
        path = self._path(key)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
        with open(temporary, "wb") as file:
            np.save(file, part)
        os.replace(temporary, path)

    def matrix(self) -> NDArray[np.float64]:
        """The whole matrix.

        Raises:
            FileNotFoundError: A part is missing; run the jobs.
        """
        matrix = np.empty((len(self.indices), len(self.indices)))
        for i, j in self.keys:
            part = np.load(self._path((i, j)), allow_pickle=False)
            rows, columns = (slice(k * self.size, (k + 1) * self.size) for k in (i, j))
            matrix[rows, columns] = part
            if self.is_symmetric and i != j:
                matrix[columns, rows] = part.T
        return matrix

    def _block(self, k: int) -> tuple[int, ...]:
        return self.indices[k * self.size : (k + 1) * self.size]

    def _path(self, key: tuple[int, int]) -> Path:
        return self.folder / f"{key[0]:06d}-{key[1]:06d}.npy"


def plan_comparison(
    store: str | Path,
    folder: str | Path,
    indices: NDArray[np.int64] | list[int],
    compare: Compare,
    *,
    size: int = 64,
    is_symmetric: bool = True,
) -> CompareBlocks:
    """The jobs of a matrix, new or as an interrupted run left them.

    Args:
        store: Folder of the store.
        folder: For the parts; is made if it does not exist.
        indices: Numbers of the networks, in the order of the rows and columns.
        compare: From two populations to a matrix; a function of a module, or a picklable object.
        size: Networks of a block.
        is_symmetric: Whether the matrix is.

    Raises:
        FileExistsError: The folder holds the parts of another matrix.
    """
    rows, folder = Store.open(store).rows, Path(folder)
    chosen = np.asarray(indices, np.int64)
    networks: Mapping[str, list[int]] = {name: rows[name][chosen].tolist() for name in ("id", "step")}
    text = json.dumps({"networks": networks, "compare": _words(compare), "size": size, "symmetric": is_symmetric})
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / MANIFEST
    if manifest.exists() and manifest.read_text(encoding="utf-8") != text:
        raise FileExistsError(f"{str(folder)!r} holds the parts of another matrix; choose another folder")
    save_text(text, manifest)
    return CompareBlocks(Path(store), folder, tuple(chosen.tolist()), compare, size, is_symmetric)


def _words(compare: Compare) -> str:
    """A function by its name, an object by what it says of itself."""
    name = getattr(compare, "__qualname__", None)
    return repr(compare) if name is None else f"{compare.__module__}:{name}"
