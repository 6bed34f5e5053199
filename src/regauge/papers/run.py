"""A run of an experiment: where its finished steps are kept, where its chance comes from, and its progress."""

import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.storage.checkpoints.checkpoint import load
from regauge.storage.checkpoints.writing import save, save_text

T = TypeVar("T")
Scale = Literal["smoke", "cpu", "paper"]
Record = dict[str, Any]
"""What one step found, ready for JSON."""


@dataclass(frozen=True)
class Run:
    """One run, which may continue an earlier one: a step whose file is in the folder is not done again.

    A file is named after the settings that it depends on, and appears only when it is complete. So a run that was
    interrupted goes on where it stopped, and steps with other settings do not get in its way. Several processes that
    run the same experiment in the same folder share its steps: each takes them in an order of its own.

    Attributes:
        scale: How large the experiment is: to see that it works, on a laptop, or as in the paper.
        seed: Where all chance comes from.
        folder: For networks and finished steps.
        progress: Shows the steps of each part.
    """

    scale: Scale
    seed: int
    folder: Path
    progress: Progress = no_progress

    def generator(self, *names: object) -> torch.Generator:
        """Chance for one purpose, the same in every run with this seed."""
        digest = hashlib.sha256(repr((self.seed, *names)).encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def network(self, settings: object, key: str, make: Callable[[], Params]) -> Params:
        """The network of that key, trained by `make` unless an earlier run did."""
        path = self._path("networks", (self.seed, settings), f"{key}.safetensors")
        if path.exists():
            return load(path)
        params = make()
        save(params, path, overwrite=True, metadata={"settings": repr(settings), "seed": str(self.seed)})
        return params

    def record(self, settings: object, key: str, make: Callable[[], Record]) -> Record:
        """What the step of that key found, now or in an earlier run."""
        path = self._path("steps", (self.seed, settings), f"{key}.json")
        if path.exists():
            found: Record = json.loads(path.read_text(encoding="utf-8"))
            return found
        record = make()
        save_text(json.dumps(record) + "\n", path)
        return record

    def each(self, label: str, steps: Sequence[Callable[[], T]]) -> list[T]:
        """Do all steps, in an order that differs between processes; results are in the order of the steps."""
        advance = self.progress(label, len(steps))
        order = list(range(len(steps)))
        random.Random(os.getpid()).shuffle(order)
        results = {}
        for k in order:
            results[k] = steps[k]()
            advance()
        return [results[k] for k in range(len(steps))]

    def _path(self, kind: str, settings: object, name: str) -> Path:
        digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
        folder = self.folder / kind / digest
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name
