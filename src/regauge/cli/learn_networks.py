"""Networks that are named to be read by a trained net: stores and checkpoints."""

from pathlib import Path
from typing import Any

from regauge.cli.options import UsageError
from regauge.core.params import Params
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.store import Store

Rows = list[dict[str, Any]]
"""What is known about each of some networks."""


def require_named(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """The networks that are named, at least one."""
    if not paths:
        raise UsageError("no networks are named; give folders of stores, or checkpoints")
    return paths


def read_networks(path: Path) -> tuple[Store | Params, Rows]:
    """A store, or a checkpoint as a population of one; and a row for each network."""
    store = Store.find(path) if path.is_dir() else None
    if store is None:
        with Checkpoint.open(path) as checkpoint:
            return {name: t.unsqueeze(0) for name, t in checkpoint.params.items()}, [{"network": str(path)}]
    if not len(store):
        raise UsageError(f"the store {str(path)!r} has no networks")
    ids, steps = (store.rows[name].tolist() for name in ("id", "step"))
    return store, [{"network": str(path), "id": k, "step": step} for k, step in zip(ids, steps, strict=True)]
