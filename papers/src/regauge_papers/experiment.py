"""Experiments, and the runs that keep their finished steps: a function from a frozen config to a table of results."""

import hashlib
import itertools
import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from filelock import FileLock, Timeout

from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save, save_text
from regauge.core.devices import multiplies_bfloat16, to_device
from regauge.core.params import Params
from regauge.core.progress import Progress, Unit, no_progress
from regauge_papers.settings import place_of
from regauge_papers.table import Record, Table

LOG = logging.getLogger(__name__)

T = TypeVar("T")

Scale = Literal["smoke", "cpu", "paper"]
CPU = torch.device("cpu")
SMOKE = "a test run on small networks, which are hardly trained: these numbers say nothing about the methods"
"""A note below the tables of the smallest scale."""


class Name(str):
    """A name of settings, by which chance is drawn: its representation is the name itself."""

    __slots__ = ()
    __repr__ = str.__str__


@dataclass(frozen=True)
class Run:
    """One run, which may continue an earlier one: a step whose file is in the folder is not repeated.

    A file is named after the settings that it depends on, but for those at their defaults (see `place_of`), and appears
    only when it is complete. So an interrupted run
    continues where it stopped, and steps with other settings do not get in its way. Several processes that run the same
    experiment in the same folder share its steps: none does what another one is doing (see `make_once`).
    """

    scale: Scale  # size of the experiment: a test in seconds, for a laptop, or as in the paper
    seed: int  # of all chance
    folder: Path  # where networks and finished steps are kept
    progress: Progress = no_progress
    name: str = "result"  # beginning of the names of the run's result files
    device: torch.device = CPU  # where networks are trained and evaluated; only experiments that allow it get another

    def generator(self, *names: object) -> torch.Generator:
        """A generator for one purpose, the same in every run with this seed."""
        digest = hashlib.sha256(repr((self.seed, *names)).encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def network(self, settings: object, key: str, make: Callable[[], Params]) -> Params:
        """The network of that key, trained by `make` unless an earlier run did."""
        path = self._folder("networks", (self.seed, settings)) / f"{key}.safetensors"

        def write() -> None:
            save(make(), path, overwrite=True, metadata={"settings": repr(settings), "seed": str(self.seed)})
            self.state(settings, key).unlink(missing_ok=True)

        make_once(path, write)
        return self.bring(load(path))

    def state(self, settings: object, key: str) -> Path:
        """The file in which the training of the network of that key is kept until `network` has its end."""
        return self._folder("networks", (self.seed, settings)) / f"{key}.state.safetensors"

    def record(self, settings: object, key: str, make: Callable[[], Record]) -> Record:
        """The record of that key, made by `make` unless an earlier run did."""
        return _kept(self._folder("steps", (self.seed, settings)) / f"{key}.json", make)

    def records(self, label: str, settings: object, measure: Callable[..., Record], *axes: Sequence[Any]) -> list[Any]:
        """The records of all combinations of arguments, nested as in `grid`; kept by label, settings and arguments."""

        def one(_: Progress, *cell: Any) -> Record:
            folder = self._folder("steps", (self.seed, (label, settings)))
            return _kept(place_of(folder, cell, ".json"), partial(measure, *cell))

        return self.grid(label, one, *axes)

    def grid(self, label: str, step: Callable[..., Any], *axes: Sequence[Any]) -> list[Any]:
        """Do a step for all combinations of arguments; those that another process is doing are put off.

        Results are in the order of the arguments: `found[i][j]` is `step(unit, axes[0][i], axes[1][j])`, where the
        unit is a `Progress` to which a long step may report its parts. When other processes are doing all that is left,
        this one waits until one of them ends or is stopped.
        """
        cells = list(itertools.product(*axes))
        advance = self.progress(label, len(cells))
        units = [Unit(advance) for _ in cells]
        results, left, put_off = {}, deque(range(len(cells))), 0
        while left:
            k = left.popleft()
            is_last_hope = put_off >= len(left)  # All others have just been put off.
            before = _MAY_WAIT.set(_MAY_WAIT.get() and is_last_hope)
            try:
                results[k] = step(units[k], *cells[k])
            except TakenError:
                if is_last_hope:
                    raise
                left.append(k)
                put_off += 1
                continue
            finally:
                _MAY_WAIT.reset(before)
            units[k].finish()
            put_off = 0
        found = (results[k] for k in range(len(cells)))

        def nest(depth: int) -> Any:
            return next(found) if depth == len(axes) else [nest(depth + 1) for _ in axes[depth]]

        nested: list[Any] = nest(0)
        return nested

    def file(self, name: str) -> Path:
        """The path of a result file."""
        return self.folder / f"{self.name}{name}"

    def bring(self, values: T) -> T:
        """Tensors, parameters or a module, on the device of the run."""
        brought: T = to_device(values, self.device)
        return brought

    @property
    def has_bfloat16(self) -> bool:
        """Whether what is to be trained in bfloat16 is: elsewhere that would take longer than in single precision."""
        return multiplies_bfloat16(self.device)

    @property
    def half_precision(self) -> str:
        """In which precision that is trained, in words."""
        if self.has_bfloat16:
            return "bfloat16 (weights and their updates in float32)"
        return "float32, as the processor has no instructions for bfloat16"

    def autocast(self, *, is_bfloat16: bool) -> torch.autocast:
        """A context in which products and convolutions are computed in bfloat16, if they are to be and can.

        Weights and their updates remain as they are; a cache of converted weights would keep those of the first step.
        """
        is_enabled = is_bfloat16 and self.has_bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=is_enabled, cache_enabled=False)

    def place(self, kind: str, settings: object) -> Path:
        """The file `.safetensors` in which something that was trained with some settings is kept, there or not."""
        folder = self.folder / kind
        folder.mkdir(parents=True, exist_ok=True)
        return place_of(folder, (self.seed, settings), ".safetensors")

    def _folder(self, kind: str, settings: object) -> Path:
        folder = place_of(self.folder / kind, settings)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class TakenError(Exception):
    """Another process is doing this step, and it is not yet time to wait for it."""


_MAY_WAIT: ContextVar[bool] = ContextVar("may_wait", default=True)
"""Whether a step that another process is doing is waited for; else `TakenError` tells that it may be put off."""


def make_once(path: Path, write: Callable[[], object]) -> None:
    """Let `write` make a file that is not there, while no other process does the same.

    A process that is stopped sets its steps free.

    Raises:
        TakenError: Another process is doing it, and `Run.grid` has other steps to do.
    """
    if path.exists():
        return
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if not _MAY_WAIT.get():
            raise TakenError(str(path)) from None
        LOG.info("waiting for another process, which is making %r, to end or be stopped", str(path))
        lock.acquire()
    try:
        if not path.exists():
            write()
    finally:
        with suppress(OSError):  # where open files cannot be removed
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _kept(path: Path, make: Callable[[], Record]) -> Record:
    """The record in a file, made now unless it is there."""
    make_once(path, lambda: save_text(json.dumps(make()) + "\n", path))
    found: Record = json.loads(path.read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True)
class Experiment:
    """One experiment: a line for the list, the settings at each scale (a frozen dataclass), and how to measure."""

    summary: str
    config: Callable[[Scale], Any]
    measure: Callable[[Any, Run], Table]
    takes_device: bool = False  # whether it trains and evaluates on the device of the run, or else on the CPU

    def __call__(self, run: Run) -> Table:
        config = self.config(run.scale)
        table = self.measure(config, run)
        if run.scale != "smoke" or config == self.config("cpu"):
            return table
        return replace(table, notes=(*table.notes, SMOKE))
