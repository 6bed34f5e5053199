"""Comparison of all pairs of some networks in a store, block by block."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from regauge.checkpoints.array_files import map_array
from regauge.checkpoints.writing import save_text, whole_file
from regauge.core.params import Params
from regauge.storage import Store
from regauge.storage.store.listing import Place

Compare = Callable[[Params, Params], Tensor]
"""A picklable function from two populations, `[n, ...]` and `[m, ...]`, to one number per pair, `[n, m]`."""
MANIFEST = "matrix.json"


@dataclass(frozen=True)
class CompareBlocks:
    """Jobs (i, j) that compare two blocks of networks, i <= j, and write blocks of a symmetric matrix to a folder."""

    store: Path
    folder: Path
    networks: tuple[Place, ...]
    compare: Compare
    size: int = 64

    @property
    def keys(self) -> list[tuple[int, int]]:
        """Return the pairs of blocks on and above the diagonal of the matrix. Each pair is a job."""
        count = -(-len(self.networks) // self.size)
        return [(i, j) for i in range(count) for j in range(i, count)]

    def is_done(self, key: tuple[int, int]) -> bool:
        """Return whether the file of a matrix block exists."""
        return self._path(key).exists()

    def __call__(self, key: tuple[int, int]) -> None:
        """Compare two blocks of networks, and write the block of the matrix."""
        first = self._read(key[0])
        # The same object for the same networks: half of the matrix is then enough.
        second = first if key[0] == key[1] else self._read(key[1])
        part = self.compare(first, second).numpy()
        if part.shape != (len(self._block(key[0])), len(self._block(key[1]))):
            raise ValueError(
                f"the comparison gave shape {part.shape} for {[len(self._block(k)) for k in key]} networks"
            )
        with whole_file(self._path(key)) as temporary, open(temporary, "wb") as file:
            np.save(file, part)

    def matrix(self) -> NDArray[np.float64]:
        """Return the whole matrix.

        Raises:
            FileNotFoundError: A block of the matrix is missing; run the jobs.
            ValueError: A block of the matrix is damaged; remove it and run the jobs.
        """
        matrix = np.empty((len(self.networks), len(self.networks)))
        for i, j in self.keys:
            path, shape = self._path((i, j)), (len(self._block(i)), len(self._block(j)))
            part = map_array(path)
            if part.shape != shape:
                raise ValueError(f"{str(path)!r} has the shape {part.shape}, not {shape}; remove it and run again")
            rows, columns = (slice(k * self.size, (k + 1) * self.size) for k in (i, j))
            matrix[rows, columns] = part
            matrix[columns, rows] = part.T
        return matrix

    def _block(self, k: int) -> tuple[Place, ...]:
        return self.networks[k * self.size : (k + 1) * self.size]

    def _read(self, k: int) -> Params:
        """Return the networks of a block. Shards without the given networks are not read."""
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
    what: str | None = None,
) -> CompareBlocks:
    """Return the jobs that compute a matrix, or the remaining jobs of an interrupted computation.

    Args:
        store: The store, or its folder. Indices of networks refer to the store.
        folder: The folder for blocks of the matrix. A missing folder is created.
        indices: The indices of the networks, in the order of rows and columns.
        compare: The comparison of two blocks: a function in a module, or a picklable object.
        size: The number of networks in a block.
        what: A string that identifies this matrix, such as a hash of all settings. An error is raised if the folder
            contains blocks of another matrix. Default: the name of the function or the `repr` of the object.

    Raises:
        FileExistsError: The folder contains blocks of another matrix.
    """
    opened, folder = store if isinstance(store, Store) else Store.open(store), Path(folder)
    places = tuple(opened.places(indices))
    computed = _words(compare) if what is None else what
    settings = {"store": opened.key, "compare": computed, "size": size}
    text = json.dumps(settings | {"networks": places})
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / MANIFEST
    with suppress(FileExistsError):
        save_text(text, manifest, is_new=True)
    if manifest.read_bytes() != text.encode():
        raise FileExistsError(f"{str(folder)!r} holds the parts of another matrix; choose another folder")
    return CompareBlocks(opened.folder, folder, places, compare, size)


def _words(compare: Compare) -> str:
    """Return the name of a function, or the `repr` of an object."""
    name = getattr(compare, "__qualname__", None)
    return repr(compare) if name is None else f"{compare.__module__}:{name}"
