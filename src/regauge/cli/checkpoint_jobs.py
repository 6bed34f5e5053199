"""The checkpoints that a command reads, with the one that it writes: opened and checked before anything is computed."""

from collections.abc import Callable, Sequence
from pathlib import Path

from regauge.checkpoints.job import FileJob, open_job
from regauge.checkpoints.outputs.provenance import Provenance
from regauge.cli.gauge_options import Gauge
from regauge.cli.line_options import Repair
from regauge.cli.options import Apply, Canonicalize
from regauge.cli.output import output_of
from regauge.cli.provenance import provenance_of
from regauge.cli.prune_options import Prune


def open_checkpoints(
    options: Apply | Canonicalize | Gauge | Prune | Repair,
    paths: Sequence[Path],
    beside: Callable[[Path], Path] | None = None,
    *,
    provenance: Provenance | None = None,
) -> FileJob:
    """Open checkpoints of which the first one is moved or changed, and refuse an output that cannot be written.

    Args:
        options: The options of the command.
        paths: The checkpoints; the output has the names and the form of the first.
        beside: Function from the output to the file that is written next to it.
        provenance: Facts on the origin of the output, written with it; read off the options unless given.
    """
    job = open_job(
        paths,
        0,
        beside,
        out=output_of(options, provenance or provenance_of(options)),
        memory=None if isinstance(options, Apply | Repair) else options.memory or None,
    )
    assert job is not None
    job.require_output()
    return job
