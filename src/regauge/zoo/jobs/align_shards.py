"""Align a population to one network, shard by shard."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from regauge.alignment import align_pairs
from regauge.alignment.method import Method
from regauge.core.products import Library, use_library
from regauge.storage.checkpoints.checkpoint import load
from regauge.storage.store import Store, path_of


@dataclass(frozen=True)
class AlignShards:
    """Job `name` aligns the networks of that shard to a reference, and appends them to another store.

    Networks that are not finite are left out. Rows keep what was known and get "objective", what the method maximizes,
    "objective_before", the same before, and "is_converged" where the method knows it.

    Attributes:
        source: Folder of the store that is aligned; its symmetry must be known.
        target: Folder of the store for the aligned networks.
        reference: Checkpoint of the network that is not moved.
        method: The method of `align_pairs`.
        seed: The seed of the generators, one for each shard.
        products: The library of matrix products; that of each process if None.
    """

    source: Path
    target: Path
    reference: Path
    method: Method | None = None
    seed: int = 0
    products: Library | None = None

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
        symmetry = part.require_symmetry()
        indices = part.rows.where(is_finite=True)
        params, rows = part.read(indices), part.rows.dicts(indices)
        if rows:
            digest = hashlib.sha256(repr((self.seed, key)).encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            first = load(self.reference)
            with use_library(self.products):
                result = align_pairs(first, params, symmetry, method=self.method, generator=generator)
            columns = {"objective": result.objective, "objective_before": result.initial}
            if result.is_converged is not None:
                columns["is_converged"] = result.is_converged
            params = result.params
            rows = [row | {name: column[k].item() for name, column in columns.items()} for k, row in enumerate(rows)]
        with suppress(FileExistsError):  # another worker did the same
            Store.open(self.target).append(params, rows, name=key)
