"""The checkpoints that a command reads and the output that it writes, opened and checked before any work."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import regauge as rg
from regauge.checkpoints.job import FileJob, open_job
from regauge.checkpoints.memory_limit import MemoryLimit
from regauge.checkpoints.outputs.provenance import Provenance
from regauge.cli.provenance import provenance_of


def output_of(
    options: Any,
    provenance: Provenance | None = None,
    *,
    element: str | None = None,
    page: Callable[[Path], str] | None = None,
) -> rg.Output:
    """The output that the options of a command ask for, with the name of the element's file next to it, if any."""
    return rg.Output(
        options.output,
        options.overwrite,
        getattr(options, "resume", False),
        options.written.dtype,
        options.written.shard_size or None,
        provenance or provenance_of(options, element=element),
        page,
    )


def open_checkpoints(
    paths: Sequence[Path],
    out: rg.Output,
    *,
    beside: Callable[[Path], Path] | None = None,
    memory: str | MemoryLimit | None = None,
    work: str = "aligning",
) -> FileJob:
    """Open the checkpoints of a command, and refuse an output that cannot be written.

    Args:
        paths: The checkpoints.
        out: The output, with the names and the form of the first.
        beside: Function from the output to the file that is written next to it.
        memory: The limit on memory.
        work: The work in memory, such as "pruning".
    """
    job = open_job(paths, 0, beside, out=out, memory=memory or None, work=work)
    assert job is not None
    job.require_output()
    return job
