"""`regauge align`: align checkpoint B to checkpoint A, and write the alignment to a file next to the output."""

from typing import Any

import torch

import regauge as rg
from regauge.alignment.streamed.source import measure_distances
from regauge.checkpoints import alignment_path
from regauge.checkpoints.output import alignment_label
from regauge.cli.align_options import Align
from regauge.cli.output import show_status, tell, tell_table, tell_written
from regauge.cli.streaming import facts_of, is_all_shown, method_of, notes_of, read_job, show_work
from regauge.cli.tasks import matching_tasks
from regauge.merging.align_tokens import plan_alignment


def run(options: Align) -> None:
    """Write the aligned checkpoint and its alignment, and print the improvement."""
    method = method_of(options)
    job, found, tokens = read_job(options, (options.a, options.b), source=1, element=alignment_label(options.output))
    task, test = matching_tasks(options, found)
    job = method.planned(job, task) if options.dry_run else job
    if is_all_shown(options, job, lambda: plan_alignment(job, found.symmetry, tokens, method, task, options.rotate)):
        return
    a, b = found.checkpoints
    chance = torch.Generator().manual_seed(options.seed)
    ways: dict[str, Any] = {"method": method, "task": task, "generator": chance, "rotate": options.rotate}
    with show_work("aligning", is_streamed=job.is_streamed) as progress:
        if tokens is not None and not tokens.is_complete:
            result = rg.merging.align_tokens(job, found.symmetry, tokens, **ways, progress=progress)
        else:
            result = rg.align(a, b, found.symmetry, out=job.output, memory=job.limit, progress=progress, **ways)
    with show_status("measuring distances"):
        gains = {"distance between A and B": measure_distances(a, b, result.symmetry, result.element)}
    if test is not None:
        losses = (test.midpoint_loss(a.params, network) for network in (b.params, result.params))
        gains["loss halfway"] = (next(losses), next(losses))
    tell_table("gains", [{"": name, "before": x, "after": y} for name, (x, y) in gains.items()], digits=6)
    tell(result.report, alignment=facts_of(result), **notes_of(result))
    if task is not None and test is not None:
        tell(f"the alignment was chosen on {task.name}; the losses were measured on {test.name}")
    tell_written(options.output, alignment_path(options.output))
