"""`regauge align`: checkpoint B aligned to checkpoint A, and the alignment in a file next to it."""

from dataclasses import replace

import torch

import regauge as rg
from regauge.alignment.streamed.job import align_job, plan_job
from regauge.alignment.streamed.source import measure_distances
from regauge.checkpoints.alignments import Alignment, alignment_path, save_alignment
from regauge.checkpoints.writing import Pieces
from regauge.cli.options import Align
from regauge.cli.output import show_status, tell, tell_table, tell_written
from regauge.cli.streaming import facts_of, method_of, notes_of, read_job, show_memory, show_plan, show_work
from regauge.cli.tasks import matching_tasks
from regauge.merging.assembly import Assembly, take_over


def run(options: Align) -> None:
    """Write the aligned checkpoint and its alignment, and print what they gained."""
    method = method_of(options)
    job, found, tokens = read_job(options, (options.a, options.b), source=1, beside=alignment_path)
    task, test = matching_tasks(options, found)
    streamed = plan_job(job, found.symmetry, method, task) if job.is_streamed else None
    if streamed is not None:
        show_plan(streamed)
    elif options.dry_run:
        show_memory(job)
    if options.dry_run:
        return
    a, b = found.checkpoints

    def make(element: rg.Element) -> Pieces:
        """The second network, moved, with rows of tokens that it lacks."""
        return Assembly(take_over(b, 1), (a, b), found.symmetry, (None, element), tokens).pieces

    is_made = tokens is not None and not tokens.is_complete
    with show_work("aligning", is_streamed=job.is_streamed) as progress:
        if streamed is not None:
            result: rg.alignment.Result[rg.Params] = align_job(streamed, progress, make=make if is_made else None)
        else:
            generator = torch.Generator().manual_seed(options.seed)
            result = rg.align(a.params, b.params, found.symmetry, method=method, task=task, generator=generator)
            alignment = Alignment(result.symmetry, result.element)
            made = make(result.element) if is_made else result.params
            job.write(made, lambda path: save_alignment(alignment, path, overwrite=True), progress)
            result = replace(result, notes=(*result.notes, *job.source.notes))
    with show_status("measuring distances"):
        gains = {"distance between A and B": measure_distances(a, b, found.symmetry, result.element)}
    if test is not None:
        losses = (test.midpoint_loss(a.params, network) for network in (b.params, result.params))
        gains["loss halfway"] = (next(losses), next(losses))
    tell_table("gains", [{"": name, "before": x, "after": y} for name, (x, y) in gains.items()], digits=6)
    tell(result.report, alignment=facts_of(result), **notes_of(result))
    if task is not None and test is not None:
        tell(f"chosen by {task.name}; judged by {test.name}")
    tell_written(options.output, alignment_path(options.output))
