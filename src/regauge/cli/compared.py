"""Checkpoints that `regauge compare` looks at, with the symmetry that they share."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import torch

import regauge as rg
from regauge.alignment.streamed.job import open_job
from regauge.cli.compare_options import Compare
from regauge.cli.models import Networks, read_networks
from regauge.cli.options import UsageError
from regauge.cli.tasks import matching_task
from regauge.cli.transformers_models import Values
from regauge.cli.vocabulary import bring_together
from regauge.core.progress import Progress, no_progress
from regauge.storage.checkpoints.memory_limit import MemoryLimit, resident


@dataclass(frozen=True)
class Opened:
    """Checkpoints of one architecture, which stay on the disk where they need more memory than is allowed."""

    networks: Networks
    limit: MemoryLimit
    task: rg.Task | None
    is_streamed: bool
    options: Compare

    @classmethod
    def of(cls, options: Compare, paths: Sequence[Path]) -> "Opened":
        """Open checkpoints, and find their symmetry."""
        limit = MemoryLimit(MemoryLimit.of(options.memory or None).nbytes, base=resident())
        job = open_job(paths, 1, memory=limit)
        assert job is not None
        if job.is_streamed and options.data is not None:
            raise UsageError(f"--data runs the model and {job.needs_memory}")
        checkpoints = bring_together(job.checkpoints).networks
        values: Values = "if small" if options.data is None else "always"
        found = read_networks(options, checkpoints, values=values, is_streamed=job.is_streamed)
        return cls(found, limit, matching_task(options, found), job.is_streamed, options)

    def compare(self, i: int, j: int, progress: Progress = no_progress) -> rg.comparison.Comparison:
        """Compare two of them; what is read for that is not kept."""
        a, b = (copy(self.networks.checkpoints[k]) for k in (i, j))
        return rg.compare(
            a,
            b,
            self.networks.symmetry,
            task=self.task,
            draws=self.options.draws,
            generator=torch.Generator().manual_seed(self.options.seed),
            memory=self.limit,
            progress=progress,
        )
