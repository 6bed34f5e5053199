"""Train a population shard by shard: job i trains the networks of shard i and appends them to the store."""

import math
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from regauge.core.symmetry import Symmetry
from regauge.discover import discover
from regauge.zoo.store import Store, path_of
from regauge.zoo.training import Config, load_examples, train

SHARD = 512
"""Networks of a shard at most."""
SHARD_BYTES = 64 * 2**20
"""Values of a shard, all checkpoints of its networks, in bytes; one group of networks is the least."""


@dataclass(frozen=True)
class TrainShards:
    """Shard k has the networks with ids from `k * size`; a network is the same whatever the size is.

    Attributes:
        folder: Of the store.
        config: Of the whole population.
        size: Networks of a shard, a multiple of the config's group.
    """

    folder: Path
    config: Config
    size: int

    @property
    def keys(self) -> range:
        """Numbers of the shards."""
        return range(math.ceil(self.config.count / self.size))

    def is_done(self, key: int) -> bool:
        """Whether the shard is in the store."""
        return path_of(self.folder, self.name(key)).exists()

    def name(self, key: int) -> str:
        """Of the shard."""
        return f"train-{key:06d}"

    def __call__(self, key: int) -> None:
        """Train the networks of one shard and append all their checkpoints."""
        ids = range(key * self.size, min(self.config.count, (key + 1) * self.size))
        blocks = list(train(self.config, ids=ids))
        store = Store.open(self.folder)
        params = {
            spec.name: torch.cat(
                [block.params[spec.name] for block in blocks] or [torch.empty(0, *spec.shape, dtype=spec.dtype)]
            )
            for spec in self.config.architecture.layout
        }
        store.append(params, [row for block in blocks for row in block.rows], name=self.name(key))


def plan(
    config: Config, folder: str | Path, *, size: int | None = None, storage: str | None = None
) -> tuple[Store, TrainShards]:
    """The store of a population, new or as an interrupted run left it, and the jobs that fill it.

    Args:
        config: Of the whole population.
        folder: Of the store.
        size: Networks of a shard, rounded up to whole groups; unless given, such that a shard has at most 512 networks
            and 64 MiB.
        storage: As for `Store.create`.

    Raises:
        FileExistsError: The folder holds another store, or other files.
        ValueError: The size makes no sense.
    """
    if size is not None and size < 1:
        raise ValueError(f"shards of {size} networks hold none; give at least 1")
    examples = load_examples(config.data)
    if size is None:
        total = config.total_steps(examples)
        checkpoints = 1 + (0 if config.checkpoints is None else len(config.checkpoints.steps(total)))
        size = max(1, min(SHARD, config.count, SHARD_BYTES // (4 * config.architecture.size * checkpoints)))
        size = max(1, size // config.group) * config.group
    size = math.ceil(size / config.group) * config.group
    about = {"training": settings_of(config), "shard": size}
    store = Store.create(folder, config.architecture, _symmetry(config, folder), storage=storage, about=about)
    return store, TrainShards(Path(folder), config, size)


def settings_of(value: Any) -> Any:
    """A config as plain JSON: every part with the name of its kind; without the architecture, which a store has."""
    if is_dataclass(value):
        parts = {field.name: settings_of(getattr(value, field.name)) for field in fields(value)}
        return {"kind": type(value).__name__} | {k: part for k, part in parts.items() if k != "architecture"}
    return [settings_of(item) for item in value] if isinstance(value, tuple | list) else value


def _symmetry(config: Config, folder: str | Path) -> Symmetry:
    """That of the store if there is one already, else found now."""
    try:
        known = Store.open(folder)
    except FileNotFoundError:
        known = None
    if known is not None and known.symmetry is not None and known.architecture == config.architecture:
        return known.symmetry
    return discover(config.architecture.module().eval(), (load_examples(config.data).inputs[:2],))
