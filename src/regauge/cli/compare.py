"""`regauge compare`: are checkpoints the same network, one the other's descendant, or neither?"""

from dataclasses import replace
from pathlib import Path

import torch

import regauge as rg
from regauge.alignment.streamed.job import open_job
from regauge.cli.compare_options import Compare
from regauge.cli.models import read_networks
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_notes, tell_table, tell_written
from regauge.cli.tasks import matching_task
from regauge.cli.vocabulary import bring_together
from regauge.core.progress import Progress, no_progress
from regauge.names import VERSION
from regauge.storage.checkpoints.memory_limit import MemoryLimit, resident
from regauge.storage.checkpoints.writing import require_writable, save_text


def run(options: Compare) -> None:
    """Print the verdict with the evidence, and write the page."""
    if options.output is not None:
        require_writable(options.output, overwrite=options.overwrite, suffixes=(".html",))
    if len(options.checkpoints) != 2:
        raise UsageError(f"{len(options.checkpoints)} checkpoints are given; two or more are compared")
    a, b = options.checkpoints
    found = compare_pair(options, a, b)
    facts = facts_of(found)
    tell(f"{found.verdict}: {found.reason}", verdict=found.verdict, reason=found.reason)
    numbers = {name: value for name, value in found.numbers.items() if value is not None}
    tell_table("numbers", [{"": name, "value": value} for name, value in numbers.items()], digits=6)
    tell_table("layers", found.layers, "\nshare of A that B explains, as stored and after alignment")
    tell("", **{name: facts[name] for name in ("tested_groups", "draws", "tensors")})
    tell_notes(found.notes)
    if options.output is not None:
        from regauge.report.comparison_page import comparison_page

        page = comparison_page(facts | {"a": str(a), "b": str(b), "version": VERSION, "seed": options.seed})
        save_text(page, options.output)
        tell_written(options.output)


def compare_pair(options: Compare, a: Path, b: Path) -> rg.Comparison:
    """Compare two checkpoints, which stay on the disk where they need more memory than is allowed."""
    limit = MemoryLimit(MemoryLimit.of(options.memory or None).nbytes, base=resident())
    job = open_job((a, b), 1, memory=limit)
    assert job is not None
    if job.is_streamed and options.data is not None:
        raise UsageError(f"--data runs the model and {job.needs_memory}")
    checkpoints = bring_together(job.checkpoints, remedy="regauge compare --model needs networks with one").networks
    job = replace(job, checkpoints=checkpoints)
    values = "if small" if options.data is None else "always"
    found = read_networks(options, job.checkpoints, values=values, is_streamed=job.is_streamed)  # type: ignore[arg-type]
    task = matching_task(options, found)
    generator = torch.Generator().manual_seed(options.seed)

    def compare(progress: Progress = no_progress) -> rg.Comparison:
        first, second = found.checkpoints
        return rg.compare(
            first,
            second,
            found.symmetry,
            task=task,
            draws=options.draws,
            generator=generator,
            memory=limit,
            progress=progress,
        )

    if job.is_streamed:
        with show_progress(is_counted=False) as progress:
            return compare(progress)
    with show_status("comparing"):
        return compare()


def facts_of(found: rg.Comparison) -> dict[str, object]:
    """A comparison as plain values, for JSON and pages."""
    return {
        "verdict": found.verdict,
        "reason": found.reason,
        "numbers": {name: value for name, value in found.numbers.items() if value is not None},
        "layers": found.layers,
        "tensors": [
            {"tensor": one.name, "size": torch.Size(one.shape).numel(), "before": one.before, "after": one.after}
            for one in found.shares
        ],
        "tested_groups": list(found.tested_groups),
        "draws": found.draws,
        "notes": list(found.notes),
    }
