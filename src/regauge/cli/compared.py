"""Checkpoints that `regauge compare` looks at, with the symmetry that they share."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import regauge as rg
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.state_dicts import match
from regauge.checkpoints.job import open_job
from regauge.checkpoints.memory_limit import MemoryLimit, resident
from regauge.checkpoints.names.from_transformers import name_by
from regauge.cli.compare_options import Compare
from regauge.cli.models import read_networks
from regauge.cli.options import UsageError
from regauge.cli.tasks import matching_tasks
from regauge.comparison.common import find_common
from regauge.core.progress import Progress, no_progress
from regauge.hub import Networks, Values, bring_together, model_with


@dataclass(frozen=True)
class Opened:
    """Checkpoints that are compared, which stay on the disk where they need more memory than is allowed.

    Those after the first may have other widths, vocabularies or numbers of layers; the symmetry is that of the first.
    """

    networks: Networks
    limit: MemoryLimit
    choosing: rg.Task | None
    task: rg.Task | None
    is_streamed: bool
    options: Compare
    note: str = ""

    @classmethod
    def of(cls, options: Compare, paths: Sequence[Path]) -> "Opened":
        """Open checkpoints, and find their symmetry."""
        limit = MemoryLimit(MemoryLimit.of(options.memory or None).nbytes, base=resident())
        job = open_job(paths, len(paths) - 1, memory=limit)
        assert job is not None
        if job.is_streamed and options.data is not None:
            raise UsageError(f"--data runs the model and {job.needs_memory}")
        united = bring_together(job.checkpoints, is_shared=True)
        first, *others = united.networks
        alike = [one for one in others if _shapes(one) == _shapes(first)]
        if options.data is not None and (united.files or len(alike) < len(others)):
            raise UsageError("--data runs all networks by one model, but their tensors or tokens differ; leave it out")
        values: Values = "if small" if options.data is None else "always"
        with model_with(options.model, united) as model:
            chosen = replace(options, model=model)
            found = read_networks(chosen, [first, *alike], values=values, is_streamed=job.is_streamed)
        named = iter(found.checkpoints[1:])
        checkpoints = [next(named) if one in alike else _read_other(one, found, job.is_streamed) for one in others]
        found = replace(found, checkpoints=(found.checkpoints[0], *checkpoints))
        tasks = matching_tasks(options, found, is_matched=False)
        return cls(found, limit, *tasks, job.is_streamed, options, united.note)

    @property
    def statistics(self) -> str:
        """Where the statistics of batch normalization come from that outputs, losses and barriers are measured with."""
        if self.choosing is None or self.task is None or self.task.prepare is None:
            return ""
        return (
            f"losses and barriers are those of networks whose statistics of batch normalization were recomputed from "
            f"{self.choosing.name}, the ends too; judged by {self.task.name}"
        )

    def read_other(self, checkpoint: Checkpoint) -> Checkpoint:
        """A checkpoint with other shapes than the first one, under the names of the symmetry.

        Raises:
            ValueError: It has nothing in common with the first one that can be compared, or lacks single tensors.
        """
        return _read_other(checkpoint, self.networks, self.is_streamed)

    def compare(self, a: Checkpoint, b: Checkpoint, progress: Progress = no_progress) -> rg.comparison.Comparison:
        """Compare two of them, or what was read as another one; what is read for that is not kept."""
        return rg.compare(
            copy(a),
            copy(b),
            self.networks.symmetry,
            task=self.task,
            draws=self.options.draws,
            generator=torch.Generator().manual_seed(self.options.seed),
            memory=self.limit,
            progress=progress,
        )


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: one.shape for name, one in checkpoint.stored.items()}


def _read_other(checkpoint: Checkpoint, networks: Networks, is_streamed: bool) -> Checkpoint:
    """A checkpoint with other shapes than the first one, under the names of the symmetry."""
    first, named = networks.checkpoints[0], name_by(checkpoint, networks.symmetry)
    if find_common(first, named, networks.symmetry) is None:
        match(named.on_meta(), first.on_meta(), named.label, first.label)
    return named if is_streamed else named.with_params({name: named[name] for name in named})
