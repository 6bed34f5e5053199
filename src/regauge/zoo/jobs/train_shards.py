"""Train a population shard by shard: job i trains the networks of shard i and appends them to the store."""

import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from regauge.core.products import Library, use_library
from regauge.core.progress import Advance, Progress, no_advance, no_progress
from regauge.discovery import discover
from regauge.storage.store import Store, path_of
from regauge.zoo.jobs.driver import WHOLE, Share, missing_jobs, recorded_library, run_jobs
from regauge.zoo.jobs.executors import MakeExecutor
from regauge.zoo.jobs.stage import Stage
from regauge.zoo.training import Config, Examples, load_examples, train

SHARD = 512
"""Networks of a shard at most."""
SHARD_WORK = 1e13
"""Multiplications of a shard at most: some minutes on one core."""


@dataclass(frozen=True)
class TrainShards:
    """Shard k has the networks with ids from `k * size`; the size changes a step by rounding alone, see `train`.

    A shard appears when its last network is trained. Until then its finished stacks are kept aside, and a job that is
    done again after it was killed trains only what was in training then. `advance` counts trained networks, in parts,
    in this process; workers show nothing.
    """

    folder: Path
    config: Config
    size: int
    device: str = "cpu"
    products: Library | None = None
    advance: Advance = field(default=no_advance, compare=False)

    @property
    def keys(self) -> range:
        """Numbers of the shards."""
        return range(math.ceil(self.config.count / self.size))

    def is_done(self, key: int) -> bool:
        """Whether the shard is in the store."""
        return path_of(self.folder, self.name(key)).exists()

    def name(self, key: int) -> str:
        """The name of the shard."""
        return f"train-{key:06d}"

    def ids(self, key: int) -> range:
        """The ids of the networks of the shard."""
        return range(key * self.size, min(self.config.count, (key + 1) * self.size))

    def __call__(self, key: int) -> None:
        """Train the networks of one shard and append all their checkpoints."""
        ids = self.ids(key)
        stage = Stage(Store.open(self.folder), self.name(key))
        missing = ids[max(0, stage.next_id() - ids.start) :]
        self.advance(len(ids) - len(missing))
        try:
            with use_library(self.products):
                self._train(ids, missing, stage)
            stage.publish()
        except FileNotFoundError:  # another worker finished the same job, and deleted what was kept for it
            if not self.is_done(key):
                raise

    def _train(self, ids: range, missing: range, stage: Stage) -> None:
        blocks = train(self.config, ids=missing, device=self.device, advance=self.advance)
        for stack, own in groupby(blocks, key=lambda block: block.stack):
            stage.keep(stack, own, is_last=stack[-1] == ids[-1])


def train_shards(
    jobs: TrainShards,
    *,
    executor: MakeExecutor | None = None,
    share: Share = WHOLE,
    progress: Progress = no_progress,
) -> int:
    """`run_jobs` with progress in networks: after every step in this process, after every shard in other ones."""
    total = sum(len(jobs.ids(key)) for key in missing_jobs(jobs, share))
    advance = progress("networks", total)
    if executor is None:
        return run_jobs(replace(jobs, advance=advance), share=share)

    def begin(label: str, count: float, /) -> Advance:
        return lambda amount=1, /, *, loss=None: advance(amount * total / max(1, count))

    return run_jobs(jobs, executor=executor, share=share, progress=begin)


def plan(
    config: Config,
    folder: str | Path,
    *,
    size: int | None = None,
    storage: str | None = None,
    device: str = "cpu",
) -> tuple[Store, TrainShards]:
    """The store of a population, new or as an interrupted run left it, and the jobs that fill it.

    Args:
        config: The whole population.
        folder: Folder of the store.
        size: Networks of a shard, in whole groups where the worst of a group are discarded; unless given, that of the
            store if there is one, or else at most 512 networks, and not more than are trained in some minutes.
        storage: The dtype of `Store.create`.
        device: The device of the training, which the store does not remember.

    Raises:
        FileExistsError: The folder holds another store, or other files, or the library of matrix products is set to
            another one than the store records.
        ValueError: The size makes no sense.
    """
    if size is not None and size < 1:
        raise ValueError(f"shards of {size} networks hold none; give at least 1")
    known, examples = Store.find(folder), load_examples(config.data)
    if size is None:
        size = known.about.get("shard") if known is not None else None
    if size is None:
        size = _shard_size(config, examples)
    if any(discard.worst is not None for discard in config.discards):
        size = math.ceil(size / config.group) * config.group
    symmetry = known.symmetry if known is not None and known.architecture == config.architecture else None
    if symmetry is None:
        symmetry = discover(config.architecture.module().eval(), (examples.inputs[:2],))
    products = recorded_library(folder)
    about = {"training": settings_of(config), "shard": size, "products": products}
    store = Store.create(folder, config.architecture, symmetry, storage=storage, about=about)
    return store, TrainShards(Path(folder), config, size, device, products)


def settings_of(value: Any) -> Any:
    """A config as plain JSON: every part with the name of its kind; without the architecture, which a store has."""
    if is_dataclass(value):
        parts = {part.name: settings_of(getattr(value, part.name)) for part in fields(value)}
        return {"kind": type(value).__name__} | {k: part for k, part in parts.items() if k != "architecture"}
    return [settings_of(item) for item in value] if isinstance(value, tuple | list) else value


def _shard_size(config: Config, examples: Examples) -> int:
    """Networks of a shard: whole groups, or an equal part of one, so that networks of a group share their batches."""
    size = max(1, min(SHARD, int(SHARD_WORK // _work(config, examples))))
    if size >= config.count:
        return config.count
    if size >= config.group:
        return size // config.group * config.group
    return max(part for part in range(1, size + 1) if config.group % part == 0)


def _work(config: Config, examples: Examples) -> float:
    """Multiplications of the training of one network: those of a forward pass, and twice as many back."""
    module = config.architecture.module().eval()
    with FlopCounterMode(display=False) as counter:
        module(examples.inputs[:1].to(next(module.parameters()).dtype))
    forward = float(counter.get_total_flops()) / 2
    return max(1.0, 3 * forward * config.batch_of(len(examples.inputs)) * config.total_steps(examples))
