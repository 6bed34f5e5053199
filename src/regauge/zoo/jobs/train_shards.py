"""Training of a population by jobs: job i trains the networks of shard i, and appends them to the store."""

import math
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch.utils.flop_counter import FlopCounterMode

from regauge.core.params import Params
from regauge.core.products import Library, use_library
from regauge.core.progress import Advance, Progress, no_advance, no_progress
from regauge.discovery import discover
from regauge.storage import Store
from regauge.storage.store.shard_file import path_of
from regauge.training.settings import LATER
from regauge.zoo.jobs.driver import WHOLE, Share, missing_jobs, recorded_library, run_jobs
from regauge.zoo.jobs.executors import MakeExecutor
from regauge.zoo.training.config import PopulationConfig
from regauge.zoo.training.examples import Examples, load_examples
from regauge.zoo.training.stack_state import SavedNetworks
from regauge.zoo.training.trainer import require_distinct, train

FOLDER = "staged"
"""The subfolder of a store for finished stacks (networks that are trained together), which readers ignore."""
PIECE_BYTES = 64 * 2**20
"""The largest size in bytes of a file's tensors, unless one block is larger."""
END = "end"
MORE = "more"
SHARD = 512
"""The largest number of networks in a shard."""
LOCK = ".extension.lock"
EARLIER = "earlier_counts"
"""The key, in the description of an extended population, of the earlier numbers of networks."""
KINDS = {"PopulationConfig": "Config"}
"""Names of settings classes in stores of earlier versions, by their current names."""
SHARD_WORK = 1e13
"""The largest number of multiplications for the training of one shard. Training a shard with this number of
multiplications takes some minutes on one core."""


class Stage:
    """The finished stacks of one job, in a separate small store. If the job is killed, another job can continue.

    A stack is a set of networks that are trained together, and is stored in parts. The names of the parts identify the
    process that trained the stack, and the last part has a special name. If a process was killed within a stack, the
    stored parts of the unfinished stack are not used. Every network must be trained by one process, because another
    processor may round differently.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self.folder = store.folder / FOLDER / name
        self.rest: list[SavedNetworks] = []

    def next_id(self) -> int:
        """Return the first id that is not in a finished stack. Stacks are finished in the order of ids."""
        stacks = self._stacks()
        return _end(stacks[-1][-1]) if stacks else 0

    def keep(self, ids: Sequence[int], blocks: Iterable[SavedNetworks], *, is_last: bool) -> None:
        """Store the blocks of a stack, one after another.

        A last stack of one part is only kept in memory.
        """
        mark = secrets.token_hex(4)
        for number, (piece, is_end) in enumerate(self._pieces(blocks)):
            if is_last and is_end and not number:
                self.rest.append(piece)
            else:
                name = f"{ids[0]:09d}-{ids[-1] + 1:09d}-{mark}-{number:06d}-{END if is_end else MORE}"
                self._kept().append(piece.params, piece.rows, name=name)

    def publish(self) -> None:
        """Write all stored networks as shards of the store: `NAME-000001` and so on, and `NAME` as the last shard."""
        for number, (piece, is_end) in enumerate(self._pieces(chain(self._blocks(), self.rest)), 1):
            with suppress(FileExistsError):  # another process did the same
                name = self.name if is_end else f"{self.name}-{number:06d}"
                self.store.append(piece.params, piece.rows, name=name)
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # others are staged there
            self.folder.parent.rmdir()

    def _blocks(self) -> Iterator[SavedNetworks]:
        for name in chain.from_iterable(self._stacks()):
            part = self._kept().part([name])
            yield SavedNetworks(part.read(slice(None)), part.rows.dicts())

    def _stacks(self) -> list[list[str]]:
        """Return the names of the parts of each finished stack."""
        if not self.folder.exists():
            return []
        names = [shard.path.stem for shard in self._kept().shards]
        found: list[list[str]] = []
        for last in names:
            if last.endswith(END) and (not found or _begin(last) >= _end(found[-1][-1])):
                found.append([name for name in names if name.startswith(last.rsplit("-", 2)[0])])
        return found

    def _kept(self) -> Store:
        return Store.create(self.folder, self.store.architecture, storage=self.store.storage)

    def _pieces(self, blocks: Iterable[SavedNetworks]) -> Iterator[tuple[SavedNetworks, bool]]:
        """Yield blocks, joined up to the size limit, each with a flag that marks the last block. Yield at least one
        block.
        """
        joined: list[SavedNetworks] = []
        size = 0
        for block in blocks:
            own = sum(tensor.nbytes for tensor in block.params.values())
            if joined and size + own > PIECE_BYTES:
                yield self._join(joined), False
                joined, size = [], 0
            joined.append(block)
            size += own
        yield self._join(joined), True

    def _join(self, blocks: Sequence[SavedNetworks]) -> SavedNetworks:
        layout = self.store.architecture.layout
        params: Params = {
            spec.name: torch.cat(
                [block.params[spec.name].cpu() for block in blocks] or [torch.empty(0, *spec.shape, dtype=spec.dtype)]
            )
            for spec in layout
        }
        return SavedNetworks(params, [row for block in blocks for row in block.rows])


def _begin(name: str) -> int:
    return int(name.split("-")[0])


def _end(name: str) -> int:
    return int(name.split("-")[1])


@dataclass(frozen=True)
class TrainShards:
    """Jobs that train shards; shard k contains the networks whose ids begin at `k * size`.

    The size of shards changes a training step only by rounding; see `train`. If a population was extended, `earlier`
    contains the earlier numbers of networks in order. A new shard begins at each earlier number, because shards never
    change.

    A shard is written when its last network is trained. Until then, the finished stacks of the shard are stored
    separately. A job that is repeated after it was killed trains only the unfinished stacks. `advance` counts trained
    networks in this process, including fractions. Worker processes do not display progress.
    """

    folder: Path
    config: PopulationConfig
    size: int
    device: str = "cpu"
    products: Library | None = None
    earlier: tuple[int, ...] = ()
    advance: Advance = field(default=no_advance, compare=False)

    @property
    def keys(self) -> range:
        """Return the indices of the shards."""
        return range(len(self._ranges))

    def is_done(self, key: int) -> bool:
        """Return whether the shard is in the store."""
        return path_of(self.folder, self.name(key)).exists()

    def name(self, key: int) -> str:
        """Return the name of the shard."""
        return f"train-{key:06d}"

    def ids(self, key: int) -> range:
        """Return the ids of the networks in the shard."""
        return self._ranges[key]

    @cached_property
    def _ranges(self) -> list[range]:
        parts = pairwise((0, *self.earlier, self.config.count))
        return [range(k, min(end, k + self.size)) for begin, end in parts for k in range(begin, end, self.size)]

    def __call__(self, key: int) -> None:
        """Train the networks of one shard and append all their checkpoints."""
        ids = self.ids(key)
        stage = Stage(Store.open(self.folder), self.name(key))
        missing = ids[max(0, stage.next_id() - ids.start) :]
        self.advance(len(ids) - len(missing))
        try:
            with use_library(self.products):
                blocks = train(self.config, ids=missing, device=self.device, advance=self.advance)
                for stack, own in groupby(blocks, key=lambda block: block.stack):
                    stage.keep(stack, own, is_last=stack[-1] == ids[-1])
            stage.publish()
        except FileNotFoundError:  # another worker finished the job and deleted its files
            if not self.is_done(key):
                raise

    def missing(self, share: Share = WHOLE) -> list[int]:
        """Return the shards of a share that are not done yet."""
        return missing_jobs(self, share)

    def run(
        self, *, executor: MakeExecutor | None = None, share: Share = WHOLE, progress: Progress = no_progress
    ) -> int:
        """Train the missing shards of a share, and return their number; see `train_shards`."""
        return train_shards(self, executor=executor, share=share, progress=progress)


def train_shards(
    jobs: TrainShards,
    *,
    executor: MakeExecutor | None = None,
    share: Share = WHOLE,
    progress: Progress = no_progress,
) -> int:
    """Do jobs in the same way as `run_jobs`, but report the number of trained networks.

    The number is updated after each shard if other processes do the jobs.
    """
    total = sum(len(jobs.ids(key)) for key in missing_jobs(jobs, share))
    advance = progress("networks", total)
    if executor is None:
        return run_jobs(replace(jobs, advance=advance), share=share)

    def begin(label: str, count: float, /) -> Advance:
        return lambda amount=1, /, *, loss=None: advance(amount * total / max(1, count))

    return run_jobs(jobs, executor=executor, share=share, progress=begin)


def plan_training(
    config: PopulationConfig,
    folder: str | Path,
    *,
    size: int | None = None,
    storage: str | None = None,
    device: str = "cpu",
) -> tuple[Store, TrainShards]:
    """Return the store of a population, new or from an interrupted run, and the jobs that fill the store.

    If a store contains only the first networks of the population, the missing networks are added. A population can be
    extended, because network i does not depend on the number of networks. A population cannot be extended if it
    discards the worst networks of each group and its last group is incomplete. Training data are read only if the store
    lacks networks.

    Args:
        config: The whole population.
        folder: The folder of the store.
        size: The number of networks in a shard. The size must be a multiple of the group size if the worst networks of
            a group are discarded. The default is the size in an existing store. For a new store, the default is at most
            512 networks, and at most the number of networks that one core trains in some minutes.
        storage: The storage dtype; see `Store.create`.
        device: The device for training, which the store does not record.

    Raises:
        FileExistsError: The folder contains another store, more networks of this population, or other files. The error
            is also raised if the chosen library of matrix products is not the library that the store records.
        ValueError: The size is invalid, the networks in the store depend on the number of networks, or several networks
            would be equal.
    """
    if size is not None and size < 1:
        raise ValueError(f"the size of a shard is {size}, but must be at least 1")
    known = Store.find(folder)
    if size is None:
        size = known.about.get("shard") if known is not None else None
    if size is None:
        size = _shard_size(config, load_examples(config.data))
    if any(discard.worst is not None for discard in config.discards):
        size = math.ceil(size / config.group) * config.group
    if config.initialization.is_common:
        require_distinct(config, load_examples(config.data), range(min(config.count, 2 * config.group)))
    symmetry = known.symmetry if known is not None and known.architecture == config.architecture else None
    if symmetry is None:
        symmetry = discover(config.architecture.module().eval(), (load_examples(config.data).inputs[:2],))
    products = recorded_library(folder)
    about = {"training": settings_of(config), "shard": size, "products": products}
    if known is None:
        store = Store.create(folder, config.architecture, symmetry, storage=storage, about=about)
    else:
        with FileLock(Path(folder) / LOCK):
            before = Store.open(folder).about
            store = Store.create(
                folder, config.architecture, symmetry, storage=storage, about=_counted(about, before, _count_in(before))
            )
            _require_extensible(store, config)
            if config.count > _count_in(before):
                store.tell(_counted(about, before, config.count))
                store = Store.open(folder)
    jobs = TrainShards(Path(folder), config, size, device, products, tuple(store.about.get(EARLIER, ())))
    if missing_jobs(jobs):
        load_examples(config.data)  # raises errors before any network is trained
    return store, jobs


def _count_in(about: Mapping[str, Any]) -> int:
    """Return the number of networks that a store is to contain."""
    count: int = about.get("training", {}).get("count", 0)
    return count


def _counted(about: Mapping[str, Any], before: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the description of a store, updated to another number of networks."""
    earlier = [*before.get(EARLIER, ()), *([_count_in(before)] if count > _count_in(before) else [])]
    return {**about, "training": {**about["training"], "count": count}, **({EARLIER: earlier} if earlier else {})}


def _require_extensible(store: Store, config: PopulationConfig) -> None:
    """Raise an error if a store has more networks than requested, or if its networks depend on their number."""
    count, name = _count_in(store.about), str(store.folder)
    if config.count < count:
        raise FileExistsError(
            f"{name!r} is for {count} networks of this population already, and {config.count} are wanted; ask for at "
            "least as many, or choose another folder"
        )
    is_whole = count % config.group == 0 or all(discard.worst is None for discard in config.discards)
    if config.count > count and not is_whole:
        raise ValueError(
            f"the last of the {count} networks in {name!r} are no whole group of {config.group}, of which the worst "
            f"are given up, so they depend on the number of networks, which cannot become {config.count}; choose "
            "another folder"
        )


def settings_of(value: Any) -> Any:
    """Return settings as plain JSON, with the name of each component's class. The architecture is in the store."""
    if is_dataclass(value):
        values = {part: getattr(value, part.name) for part in fields(value) if part.name != "architecture"}
        told = {part.name: own for part, own in values.items() if not (LATER in part.metadata and own == part.default)}
        kind = type(value).__name__
        return {"kind": KINDS.get(kind, kind)} | {name: settings_of(own) for name, own in told.items()}
    return [settings_of(item) for item in value] if isinstance(value, tuple | list) else value


def _shard_size(config: PopulationConfig, examples: Examples) -> int:
    """Return the number of networks in a shard: several whole groups, or one of several equal parts of a group."""
    size = max(1, min(SHARD, int(SHARD_WORK // _work(config, examples))))
    if size >= config.count:
        return config.count
    if size >= config.group:
        return size // config.group * config.group
    return max(part for part in range(1, size + 1) if config.group % part == 0)


def _work(config: PopulationConfig, examples: Examples) -> float:
    """Return the number of multiplications for training one network, where a backward pass counts as two forward
    passes.
    """
    module = config.architecture.module().eval()
    with FlopCounterMode(display=False) as counter:
        module(examples.inputs[:1].to(next(module.parameters()).dtype))
    forward = float(counter.get_total_flops()) / 2
    return max(1.0, 3 * forward * config.batch_of(len(examples.inputs)) * config.total_steps(examples))
