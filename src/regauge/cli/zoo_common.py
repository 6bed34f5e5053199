"""Shared parts of the commands on populations: executors, conditions on networks, a store in words."""

import json
import os
import re
from typing import Any

import numpy as np

from regauge.cli.options import UsageError
from regauge.storage.store import Store
from regauge.zoo.jobs import dask, processes
from regauge.zoo.jobs.executors import MakeExecutor


def executor_of(on: str) -> MakeExecutor | None:
    """Where jobs run."""
    if on == "here":
        return None
    if re.match(r"(tcp|tls|ucx|ws|wss)://", on):
        return dask(on)
    kind, colon, text = on.partition(":")
    if kind not in ("processes", "dask") or (colon and not re.fullmatch(r"[1-9]\d*", text)):
        raise UsageError(
            f"--on {on!r} is no place to train; say here, processes, processes:4, dask, dask:4 or tcp://HOST:PORT"
        )
    count = int(text) if colon else os.cpu_count() or 1
    return processes(count) if kind == "processes" else dask(workers=count)


def conditions_of(where: tuple[str, ...]) -> dict[str, Any]:
    """Columns and values; numbers and truth values where they read as such."""
    conditions: dict[str, Any] = {}
    for text in where:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--where {text!r} is no condition; write COLUMN=VALUE, for example step=86")
        try:
            conditions[name] = json.loads(value)
        except json.JSONDecodeError:
            conditions[name] = value
    return conditions


def words(store: Store) -> str:
    """The content of a store in words."""
    count = len(store)
    trajectories = len(np.unique(store.rows.column("id").values)) if count else 0
    return f"{count} networks of {store.architecture.name!r} on {trajectories} trajectories"
