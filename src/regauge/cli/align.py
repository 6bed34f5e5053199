"""`regauge align`: checkpoint B next to checkpoint A, and the alignment beside it."""

import torch
from rich.console import Console
from rich.table import Table

import regauge as rg
from regauge.alignment.streamed.job import plan_job
from regauge.alignment.streamed.pieces import measure_distances
from regauge.cli.matching import method_of
from regauge.cli.options import Align
from regauge.cli.streaming import read_job, show_plan, show_work
from regauge.cli.tasks import matching_task
from regauge.storage.checkpoints.alignments import alignment_path


def run(options: Align) -> None:
    """Write the aligned checkpoint and its alignment, and print what they gained."""
    console, method = Console(stderr=True), method_of(options)
    paths = (options.a, options.b)
    job, found = read_job(options, paths, source=1, beside=alignment_path, console=console)
    task = matching_task(options, found)
    if options.dry_run or job.is_streamed:
        show_plan(plan_job(job, found.symmetry, method))
        if options.dry_run:
            return
    a, b = found.checkpoints
    with show_work(console, "aligning", is_streamed=job.is_streamed) as progress:
        result = rg.align(
            a,
            b,
            found.symmetry,
            method=method,
            task=task,
            generator=torch.Generator().manual_seed(options.seed),
            **job.settings(progress),
        )
    table = Table("", "before", "after", box=None, pad_edge=False)
    with console.status("measuring distances"):
        before, after = measure_distances(a, b, found.symmetry, result.element)
    table.add_row("distance between A and B", f"{before:.6g}", f"{after:.6g}")
    if task is not None:
        before, after = (task.midpoint_loss(a.params, network) for network in (b.params, result.params))
        table.add_row("loss halfway", f"{before:.6g}", f"{after:.6g}")
    Console().print(table)
    print(result.report)
    print(f"written: {options.output} and {alignment_path(options.output).name}")
