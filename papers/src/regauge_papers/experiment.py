"""Experiments (functions from frozen settings to a table of results), and runs that store finished steps."""

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
from regauge.core.devices import to_device
from regauge.core.params import Params
from regauge.core.progress import Advance, Progress, no_progress
from regauge_papers.settings import place_of
from regauge_papers.table import Record, Table

LOG = logging.getLogger(__name__)

T = TypeVar("T")

Scale = Literal["smoke", "cpu", "paper"]
CPU = torch.device("cpu")
SMOKE = "a test run on small networks, which are hardly trained: these numbers say nothing about the methods"
"""The note that is printed below tables at the scale "smoke"."""


class Unit:
    """A `Progress` for one unit of work, which is a part of a longer experiment.

    Progress within the unit is reported as progress of the whole experiment. Until the caller finishes the unit, at
    most 99% of the unit counts as done.

    Args:
        advance: The function that reports progress of the whole experiment.
    """

    def __init__(self, advance: Advance) -> None:
        self._advance, self._done = advance, 0.0

    def __call__(self, label: str, total: float, /) -> Advance:
        def advance(amount: float = 1, /, *, loss: float | None = None) -> None:
            share = min(amount / total, 0.99 - self._done)
            if share > 0:
                self._done += share
                self._advance(share, loss=loss)

        return advance

    def finish(self) -> None:
        """Count the remainder of the unit as done."""
        self._advance(1 - self._done)


class Name(str):
    """A name of settings, from which random seeds are derived; its `repr` is the name itself."""

    __slots__ = ()
    __repr__ = str.__str__


@dataclass(frozen=True)
class Run:
    """One run, which may continue an earlier run: a step is not repeated if its file is in the folder.

    The name of a file depends on the settings of its step, except settings with default values (see `place_of`). A file
    appears only when it is complete. An interrupted run therefore continues where it stopped, and steps with other
    settings do not interfere. Several processes that run the same experiment in the same folder share its steps (see
    `make_once`).
    """

    scale: Scale  # size of the experiment: a short test, for a laptop, or as in the paper
    seed: int  # of all chance
    folder: Path  # where networks and finished steps are kept
    progress: Progress = no_progress
    name: str = "result"  # beginning of the names of the run's result files
    device: torch.device = CPU  # where networks are trained and evaluated; only experiments that allow it get another

    def generator(self, *names: object) -> torch.Generator:
        """Return a random generator for one purpose, which is the same in every run with the run's seed."""
        digest = hashlib.sha256(repr((self.seed, *names)).encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def network(self, settings: object, key: str, make: Callable[[], Params]) -> Params:
        """Return the network with a given key, trained by `make` or by an earlier run."""
        path = self._folder("networks", (self.seed, settings)) / f"{key}.safetensors"

        def write() -> None:
            save(make(), path, overwrite=True, metadata={"settings": repr(settings), "seed": str(self.seed)})
            self.state(settings, key).unlink(missing_ok=True)

        make_once(path, write)
        return self.bring(load(path))

    def state(self, settings: object, key: str) -> Path:
        """Return the file with the state of a network's training. The file is deleted when the training ends."""
        return self._folder("networks", (self.seed, settings)) / f"{key}.state.safetensors"

    def record(self, settings: object, key: str, make: Callable[[], Record]) -> Record:
        """Return the record with a given key, made by `make` or by an earlier run."""
        return _kept(self._folder("steps", (self.seed, settings)) / f"{key}.json", make)

    def records(self, label: str, settings: object, measure: Callable[..., Record], *axes: Sequence[Any]) -> list[Any]:
        """Return records of all combinations of arguments, nested as in `grid`, stored by label and settings."""

        def one(_: Progress, *cell: Any) -> Record:
            folder = self._folder("steps", (self.seed, (label, settings)))
            return _kept(place_of(folder, cell, ".json"), partial(measure, *cell))

        return self.grid(label, one, *axes)

    def grid(self, label: str, step: Callable[..., Any], *axes: Sequence[Any]) -> list[Any]:
        """Run a step for all combinations of arguments. Steps that another process runs are postponed.

        Results are in the order of the arguments: `found[i][j]` is `step(unit, axes[0][i], axes[1][j])`, where the unit
        is a `Progress` to which a long step may report its parts. If other processes run all remaining steps, this
        process waits until one remaining step ends or is stopped.
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
        """Return the path of a result file."""
        return self.folder / f"{self.name}{name}"

    def bring(self, values: T) -> T:
        """Return tensors, parameters or a module on the device of the run."""
        brought: T = to_device(values, self.device)
        return brought

    @property
    def has_bfloat16(self) -> bool:
        """Whether the device computes fast in bfloat16. On other devices, single precision is used even if settings
        request bfloat16.
        """
        return multiplies_bfloat16(self.device)

    @property
    def half_precision(self) -> str:
        """The precision of trainings that request bfloat16, in words."""
        if self.has_bfloat16:
            return "bfloat16 (weights and their updates in float32)"
        return "float32, as the processor has no instructions for bfloat16"

    def autocast(self, *, is_bfloat16: bool) -> torch.autocast:
        """Return a context that computes products and convolutions in bfloat16, if bfloat16 is requested and fast.

        Weights and their updates keep their precision. Converted weights are not cached, because the cache would
        contain the weights of the first step in later steps.
        """
        is_enabled = is_bfloat16 and self.has_bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=is_enabled, cache_enabled=False)

    def place(self, kind: str, settings: object) -> Path:
        """Return the path of the `.safetensors` file for a training result with some settings. The file may not
        exist.
        """
        folder = self.folder / kind
        folder.mkdir(parents=True, exist_ok=True)
        return place_of(folder, (self.seed, settings), ".safetensors")

    def _folder(self, kind: str, settings: object) -> Path:
        folder = place_of(self.folder / kind, settings)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class TakenError(Exception):
    """An error that is raised if another process runs a step, and this process can do other steps before it waits."""


_MAY_WAIT: ContextVar[bool] = ContextVar("may_wait", default=True)
"""Whether to wait for a step that another process is doing. If false, a `TakenError` is raised, and the step is
postponed."""


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether a device has instructions for products in bfloat16.

    Without instructions for bfloat16, products in bfloat16 can take much longer than products in single precision. On a
    processor with only AVX2, bfloat16 products of 1,024 x 1,024 matrices took 68 times as long as float32 products.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type != "cpu" or any(has for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)


def make_once(path: Path, write: Callable[[], object]) -> None:
    """Call `write` to make a missing file, unless another process is making the file.

    If a process is stopped, another process can run its unfinished steps.

    Raises:
        TakenError: Another process is making the file, and `Run.grid` has other steps to do.
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
    """Return the record in a file. If the file is missing, make the record and write the file."""
    make_once(path, lambda: save_text(json.dumps(make()) + "\n", path))
    found: Record = json.loads(path.read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True)
class Experiment:
    """An experiment: a line for the list of experiments, the settings at each scale (a frozen dataclass), and a
    function that measures.
    """

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
