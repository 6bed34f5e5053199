"""Matrices over all pairs of some networks, block by block: with a bar, on processes or a cluster, and resumed."""

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from regauge.cli.progress import show_progress
from regauge.cli.zoo_common import executor_of
from regauge.cli.zoo_options import ZooCompare, ZooMap
from regauge.core.params import Params
from regauge.storage.store import Store
from regauge.zoo.jobs import run_jobs
from regauge.zoo.jobs.compare_blocks import Compare, plan_comparison

SIZE = 32
"""Networks of a block."""


class Matrices:
    """Computes matrices for one command.

    What is done already is kept in the folder `OUT.parts` until the command has written its output; the same command
    continues there.

    Args:
        options: The options of the command.
        store: The store of the networks.
        chosen: Their numbers.
        console: The console that shows progress.
    """

    def __init__(self, options: ZooCompare | ZooMap, store: Store, chosen: Any, console: Console) -> None:
        self.store, self.console = store, console
        self.executor = executor_of(options.on)
        settings = {name: value for name, value in asdict(options).items() if name not in ("output", "overwrite", "on")}
        files = [Path(value) for value in settings.values() if isinstance(value, str) and Path(value).is_file()]
        states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        what = json.dumps([repr(settings), store.key, store.places(chosen), states])
        self.what = hashlib.sha256(what.encode()).hexdigest()
        self.folder = options.output.with_name(f"{options.output.name}.parts")

    def __call__(self, label: str, params: Params, compare: Compare) -> Tensor:
        """The matrix of all pairs, float64 `[networks, networks]`.

        Args:
            label: What is shown; another one for each matrix of a command.
            params: The networks.
            compare: As for `plan_comparison`.
        """
        folder = self.folder / hashlib.sha256(f"{self.what} {label}".encode()).hexdigest()[:16]
        networks = Store.create(folder / "networks", self.store.architecture)
        count = len(next(iter(params.values())))
        if not networks.has("all"):
            networks.append(params, [{"id": k, "step": 0} for k in range(count)], name="all")
        jobs = plan_comparison(networks, folder / "blocks", range(count), compare, size=SIZE, what=self.what)
        with show_progress(self.console) as progress:
            run_jobs(jobs, executor=self.executor, progress=lambda _, total: progress(label, total))
        return torch.from_numpy(jobs.matrix())

    def clear(self) -> None:
        """Delete what is kept."""
        shutil.rmtree(self.folder, ignore_errors=True)
