"""The networks at a path: all networks of a store, or a checkpoint as a population of one network."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.core.params import Params
from regauge.storage.collection import Kept
from regauge.storage.store import Store
from regauge.storage.store.rows import Indices


@dataclass(frozen=True)
class NamedNetworks:
    """The networks at a path.

    Attributes:
        networks: A store whose networks are all used, or parameters with a leading model axis.
        rows: A table with one row per network: its path, and its id and step if it is in a store.
        store: The store of the networks; None for a checkpoint.
        numbers: The indices of the networks in the store.
    """

    networks: Store | Params
    rows: tuple[Mapping[str, Any], ...]
    store: Store | None = None
    numbers: Indices | None = None

    @property
    def known(self) -> list[dict[str, Any]]:
        """The rows of metadata of the networks in the store, without the column "is_finite"."""
        found = [] if self.store is None else self.store.rows.dicts(self.numbers)
        return [{name: value for name, value in row.items() if name != "is_finite"} for row in found]


def read_networks(path: str | Path, checkpoints: Kept = "last") -> NamedNetworks:
    """Read the networks at a path: the folder of a store, or a checkpoint.

    Args:
        path: The path of a store or a checkpoint.
        checkpoints: "last": the last checkpoint of each run that was not discarded. "all": all checkpoints of a store.

    Raises:
        FileNotFoundError: There is no file or folder at the path.
        ValueError: The store has no networks, or all networks in the store were discarded.
    """
    path = Path(path)
    store = Store.find(path) if path.is_dir() else None
    if store is None:
        with Checkpoint.open(path) as checkpoint:
            networks = {name: tensor.unsqueeze(0) for name, tensor in checkpoint.params.items()}
            return NamedNetworks(networks, ({"network": str(path)},))
    if not len(store):
        raise ValueError(f"the store {str(path)!r} has no networks; train or import some first")
    chosen = store.rows.final() if checkpoints == "last" else np.arange(len(store))
    if not len(chosen):
        raise ValueError(f"all networks of the store {str(path)!r} were discarded; `checkpoints=all` reads them")
    ids, steps = (store.rows[name][chosen].tolist() for name in ("id", "step"))
    rows = tuple({"network": str(path), "id": k, "step": step} for k, step in zip(ids, steps, strict=True))
    return NamedNetworks(store if len(chosen) == len(store) else store.read(chosen), rows, store, chosen)
