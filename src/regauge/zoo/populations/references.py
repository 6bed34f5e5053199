"""Alignment of a store to one network: a given network, the medoid, or the mean of aligned networks (a universe)."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from regauge.alignment import align_pairs
from regauge.alignment.method import Method
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.core.arguments import check_arguments
from regauge.core.params import Params, select
from regauge.core.products import Library, use_library
from regauge.core.symmetry import Symmetry
from regauge.storage import Store
from regauge.storage.store.shard_file import path_of
from regauge.zoo.jobs.driver import recorded_library
from regauge.zoo.populations.pairs import OrbitDistances
from regauge.zoo.populations.universe import universe

To = int | Path | Literal["medoid", "universe"]
REFERENCE = "reference.safetensors"
"""The file, in a store's folder, of the network to which all other networks are aligned."""


@dataclass(frozen=True)
class AlignShards:
    """Jobs that align networks: job `name` aligns the shard with this name, and appends the result to a second store.

    Networks with NaN or Inf are skipped. The rows of aligned networks keep their columns and get further columns. The
    column "objective" is the value that the method maximizes, and "objective_before" is its value before alignment. The
    column "is_converged" is added if the method reports convergence. `plan_population` describes the attributes.
    `reference` is the checkpoint to which networks are aligned, and `products` is the library of matrix products.
    """

    source: Path
    target: Path
    reference: Path
    method: Method | None = None
    seed: int = 0
    products: Library | None = None

    @property
    def keys(self) -> list[str]:
        """Return the names of the current shards."""
        return [shard.path.stem for shard in Store.open(self.source).shards]

    def is_done(self, key: str) -> bool:
        """Return whether the aligned shard is in the target store."""
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


def sample(store: Store, count: int, *, seed: int = 0, among: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Sample at most `count` networks without NaN or Inf from a store; return their indices in increasing order.

    The networks are sampled from `among`. By default, networks are sampled from the last checkpoints of all
    trajectories, `store.rows.final()`.

    Raises:
        ValueError: No network is finite, or the count is not positive.
    """
    if count < 1:
        raise ValueError(f"count is {count}, but must be at least 1")
    there = np.intersect1d(store.rows.where(is_finite=True), store.rows.final() if among is None else among)
    if "is_diverged" in store.rows.names:  # finite, but with an infinite loss
        there = np.setdiff1d(there, store.rows.where(is_diverged=True))
    if not len(there):
        raise ValueError(
            f"none of the {len(store)} networks of {str(store.folder)!r} is finite and was asked for; choose other "
            "networks"
        )
    order = torch.randperm(len(there), generator=torch.Generator().manual_seed(seed)).numpy()
    return np.sort(there[order[:count]])


@check_arguments
def medoid(params: Params, symmetry: Symmetry, *, method: Method | None = None, seed: int = 0) -> int:
    """Return the index of the network whose orbit has the smallest mean distance to all other orbits."""
    distances = OrbitDistances(symmetry, method, seed)(params, params)
    return int(distances.sum(1).argmin())


def reference(store: Store, to: To, *, count: int = 64, seed: int = 0) -> Params:
    """Return the network to which a store is aligned.

    Args:
        store: The store, whose symmetry must be known.
        to: The id of a trajectory, whose last checkpoint is used; or the file of a checkpoint; or "medoid" or
            "universe". The medoid or universe is computed from a sample of the last checkpoints of all trajectories.
            The mean of a universe is not a trained network, but on average it is closer to the networks than any
            trained network.
        count: The sample size for the medoid or universe.
        seed: The seed of the sampling.

    Raises:
        ValueError: The store does not contain the requested network, or the symmetry is not known.
    """
    symmetry = store.require_symmetry()
    if isinstance(to, Path):
        return load(to)
    if not isinstance(to, str):
        found = np.intersect1d(
            np.intersect1d(store.rows.where(id=to), store.rows.final()), store.rows.where(is_finite=True)
        )
        if not len(found):
            raise ValueError(
                f"no trajectory of the store has the id {to} and a last network that is finite and not discarded; name "
                "another one"
            )
        return select(store.read(found[:1]), 0)
    params = store.read(sample(store, count, seed=seed))
    if to == "medoid":
        return select(params, medoid(params, symmetry, seed=seed))
    return universe(params, symmetry).mean


def plan_population(
    source: str | Path,
    target: str | Path,
    *,
    to: To = "medoid",
    method: Method | None = None,
    count: int = 64,
    seed: int = 0,
) -> tuple[Store, AlignShards]:
    """Return the store for a population that is aligned to one network, and the jobs that fill this store.

    The reference is written to the folder of the target as `reference.safetensors`, and later runs use this file. All
    networks of a target come from one source, and are aligned to one reference. If networks were added to the source,
    plan again to align the added networks.

    Args:
        source: The folder of the store to align.
        target: The folder of the store for the aligned networks, new or from an interrupted run.
        to: The network to which all networks are aligned; see `reference`.
        method: The alignment method; see `align_pairs`.
        count: The number of networks from which the reference is determined.
        seed: The seed of all generators.

    Raises:
        FileExistsError: The target contains another store or other files, or has another source or another reference.
        FileNotFoundError: The source does not exist.
        ValueError: The reference does not exist.
    """
    store, path = Store.open(source), Path(target) / REFERENCE
    # Found first, so that a missing reference leaves no store.
    found = None if path.exists() else reference(store, to, count=count, seed=seed)
    if isinstance(to, Path):
        described: dict[str, Any] = {"file": to.name, "sha256": hashlib.sha256(to.read_bytes()).hexdigest()}
    else:
        described = {"kind": to, "of": count} if isinstance(to, str) else {"kind": "id", "id": to}
    about: dict[str, Any] = {
        "aligned": {"method": repr(method), "to": described, "seed": seed},
        "source": {"key": store.key, "about": dict(store.about)},
        "products": recorded_library(target),
    }
    made = Store.create(target, store.architecture, store.symmetry, storage=store.storage, about=about)
    if found is not None:
        with suppress(FileExistsError):  # another process may have found the same
            save(found, path)
    return made, AlignShards(Path(source), Path(target), path, method, seed, about["products"])
