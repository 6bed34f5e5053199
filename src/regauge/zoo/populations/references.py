"""A store aligned to one network, shard by shard: to a given one, to the medoid, or to the mean of a universe."""

from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from regauge.alignment.method import Method
from regauge.core.params import Params, select
from regauge.core.symmetry import Symmetry
from regauge.storage.checkpoints.writing import save
from regauge.storage.store import Store
from regauge.zoo.jobs.align_shards import AlignShards, aligned_store
from regauge.zoo.populations.orbit_distances import OrbitDistances
from regauge.zoo.populations.universe import universe

To = int | Literal["medoid", "universe"]
REFERENCE = "reference.safetensors"
"""In the folder of a store: the network that the others are aligned to."""


def sample(store: Store, count: int, *, seed: int = 0, among: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Numbers of some networks of a store, drawn at random, in increasing order; those that diverged never are.

    Args:
        store: Where they are.
        count: How many at most.
        seed: Where chance comes from.
        among: Numbers of those that may be drawn; what `store.rows.final()` says unless given.

    Raises:
        ValueError: No network is finite, or the count is not positive.
    """
    if count < 1:
        raise ValueError(f"{count} networks are none; draw one at least")
    there = np.intersect1d(store.rows.where(is_finite=True), store.rows.final() if among is None else among)
    if "is_diverged" in store.rows.names:  # finite, but with an infinite loss
        there = np.setdiff1d(there, store.rows.where(is_diverged=True))
    if not len(there):
        raise ValueError(f"none of the {len(store)} networks of {str(store.folder)!r} is finite and was asked for")
    order = torch.randperm(len(there), generator=torch.Generator().manual_seed(seed)).numpy()
    return np.sort(there[order[:count]])


def medoid(params: Params, symmetry: Symmetry, *, method: Method | None = None, seed: int = 0) -> int:
    """The number of the network whose orbit is nearest to those of all others, in the mean."""
    distances = OrbitDistances(symmetry, method, seed)(params, params)
    return int(distances.sum(1).argmin())


def reference(store: Store, to: To, *, count: int = 64, seed: int = 0) -> Params:
    """The network that a store is aligned to.

    Args:
        store: With a known symmetry.
        to: The id of a trajectory, whose last checkpoint is taken; "medoid" or "universe" of some networks, which are
            drawn from the last checkpoints of all trajectories. The mean of a universe is no network that was trained,
            but closer to all of them.
        count: How many are drawn for that.
        seed: Where chance comes from.

    Raises:
        ValueError: There is no such network, or the symmetry is not known.
    """
    if store.symmetry is None:
        raise ValueError(f"the symmetry of the store {str(store.folder)!r} is not known; create it with one")
    if not isinstance(to, str):
        found = np.intersect1d(
            np.intersect1d(store.rows.where(id=to), store.rows.final()), store.rows.where(is_finite=True)
        )
        if not len(found):
            raise ValueError(
                f"no trajectory of the store has the id {to} and ends in a network that is finite and not discarded"
            )
        return select(store.read(found[:1]), 0)
    params = store.read(sample(store, count, seed=seed))
    if to == "medoid":
        return select(params, medoid(params, store.symmetry, seed=seed))
    return universe(params, store.symmetry).mean


def plan_population(
    source: str | Path,
    target: str | Path,
    *,
    to: To = "medoid",
    method: Method | None = None,
    count: int = 64,
    seed: int = 0,
) -> tuple[Store, AlignShards]:
    """The store for a population aligned to one network, and the jobs that fill it.

    The reference is written into the target's folder, as `reference.safetensors`, and used again by a later run.

    Args:
        source: Folder of the store.
        target: Folder of the store for the aligned networks.
        to: See `reference`.
        method: As for `align_pairs`.
        count: Networks from which the reference is found.
        seed: Where all chance comes from.

    Raises:
        FileExistsError: The target holds another store, or other files, or is aligned from another source or to
            something else.
        FileNotFoundError: There is no source.
        ValueError: There is no such reference.
    """
    path = Path(target) / REFERENCE
    # Found first, so that a reference that is not there leaves no store behind.
    found = None if path.exists() else reference(Store.open(source), to, count=count, seed=seed)
    what = {"kind": to, "of": count} if isinstance(to, str) else {"kind": "id", "id": to}
    made = aligned_store(source, target, what, method=method, seed=seed)
    if found is not None:
        with suppress(FileExistsError):  # another process may have found the same
            save(found, path)
    return made, AlignShards(Path(source), Path(target), path, method, seed)
