"""Checkpoints that a command reads, and the output that it writes, both checked before any work."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import regauge as rg
from regauge.checkpoints.job import FileJob, open_job
from regauge.checkpoints.memory_limit import MemoryLimit
from regauge.checkpoints.outputs.provenance import Input, Provenance
from regauge.cli.output import STDERR

WITHOUT_EFFECT = ("output", "memory", "resume", "overwrite", "dry_run", "retrace", "json", "shared")
"""Options that do not change the values in the output."""


def output_of(
    options: Any,
    origin: Provenance | None = None,
    *,
    element: str | None = None,
    page: Callable[[Path], str] | None = None,
) -> rg.Output:
    """Return the output that the options of a command ask for, and the name of the file for an element."""
    resume, shared = (getattr(options, name, False) for name in ("resume", "shared"))
    form = options.written.dtype, options.written.shard_size or None
    origin = origin or provenance_of(options, element=element)
    out = rg.Output(options.output, options.overwrite, resume, *form, origin, page, shared)
    if out.crew.rank:  # the first process tells, and errors are told by all
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        STDERR.quiet = True
        logging.disable(logging.INFO)
    return out


def open_checkpoints(
    paths: Sequence[Path], out: rg.Output, *, memory: str | MemoryLimit | None = None, work: str = "aligning"
) -> FileJob:
    """Open the checkpoints of a command; raise an error if its output cannot be written.

    Args:
        paths: The checkpoints.
        out: The output. By default, the output has the tensor names and the file format of the first checkpoint.
        memory: The limit on memory.
        work: The kind of work, such as "pruning", for which the memory is estimated.
    """
    job = open_job(paths, 0, out=out, memory=memory or None, work=work)
    assert job is not None
    job.require_output()
    return job


def provenance_of(options: Any, *, element: str | None = None, **places: Path) -> Provenance:
    """Return the provenance for a command's options: its name, its settings, and the files and folders that it reads.

    Args:
        options: The options of a command.
        element: The name of the file with the element that transforms the checkpoint.
        places: For options that name a file by a short name, the path of the file.
    """
    settings: dict[str, Any] = {}
    inputs: list[Input] = []
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in (*WITHOUT_EFFECT, "seed"):
            continue
        several = list(value) if isinstance(value, tuple) else [value]
        found = [Input(field.name, str(one), places.get(field.name)) for one in several if _is_input(one)]
        if found:
            inputs += found
        else:
            settings[field.name.replace("_", "-")] = _plain(value)
    command = type(options).__name__.lower()
    return Provenance(command, settings, tuple(inputs), getattr(options, "seed", None), element)


def _is_input(value: object) -> bool:
    """Return whether the value of an option names a file or folder. Some options accept either a path or a keyword."""
    return isinstance(value, Path) or (isinstance(value, str) and bool(value) and bool(Input("", value).files))


def _plain(value: Any) -> Any:
    """Return a value ready for JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.name not in WITHOUT_EFFECT]
        return {name.replace("_", "-"): _plain(getattr(value, name)) for name in names}
    return list(value) if isinstance(value, tuple) else value
