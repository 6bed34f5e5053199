"""Networks that are named to be read by a trained net: stores and checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.cli.options import UsageError
from regauge.cli.output import warn
from regauge.core.params import Params
from regauge.storage import Store
from regauge.storage.collection import Kept

Rows = list[dict[str, Any]]
"""Rows of facts about some networks."""


@dataclass(frozen=True)
class Named:
    """The networks at a path.

    Attributes:
        networks: A store whose networks are all read, or those that are, with a leading model axis.
        rows: Facts about each network.
        store: The store that holds them; None for a checkpoint.
        numbers: Numbers of the networks in the store.
    """

    networks: Store | Params
    rows: Rows
    store: Store | None = None
    numbers: np.ndarray[Any, Any] | None = None


def require_named(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """The networks that are named, at least one."""
    if not paths:
        raise UsageError("no networks are named; give folders of stores, or checkpoints")
    return paths


def read_networks(path: Path, checkpoints: Kept) -> Named:
    """Networks of a store, or a checkpoint as a population of one."""
    store = Store.find(path) if path.is_dir() else None
    if store is None:
        with Checkpoint.open(path) as checkpoint:
            return Named({name: t.unsqueeze(0) for name, t in checkpoint.params.items()}, [{"network": str(path)}])
    if not len(store):
        raise UsageError(f"the store {str(path)!r} has no networks")
    chosen = store.rows.final() if checkpoints == "last" else np.arange(len(store))
    if not len(chosen):
        raise UsageError(f"all networks of the store {str(path)!r} were discarded; --checkpoints all reads them")
    tell_chosen(len(chosen), len(store), checkpoints)
    ids, steps = (store.rows[name][chosen].tolist() for name in ("id", "step"))
    rows: Rows = [{"network": str(path), "id": k, "step": step} for k, step in zip(ids, steps, strict=True)]
    return Named(store if len(chosen) == len(store) else store.read(chosen), rows, store, chosen)


def tell_chosen(count: int, stored: int, checkpoints: Kept) -> None:
    """Tell people how many of the networks that are stored are read, where these are not all."""
    if count < stored:
        why = "the last checkpoint of each run; --checkpoints all reads all" if checkpoints == "last" else "as chosen"
        warn(f"{count:,} of {stored:,} stored networks are read: {why}")
