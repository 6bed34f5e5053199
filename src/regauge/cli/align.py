"""`regauge align`: checkpoint B next to checkpoint A, and the alignment beside it."""

import torch
from rich.console import Console
from rich.table import Table

import regauge as rg
from regauge.cli.matching import method_of, read_checkpoints, task_for
from regauge.cli.options import Align
from regauge.cli.progress import show_progress
from regauge.cli.streaming import (
    is_streamed,
    job_of,
    matched,
    report_lines,
    require_output,
    show_plan,
    staging_of,
    write,
)
from regauge.core.interpolation import distance
from regauge.merging.streamed import moved_pieces
from regauge.storage.checkpoints.alignments import IN_FOLDER, Alignment, alignment_path, save_alignment
from regauge.storage.checkpoints.writing import SUFFIX, require_writable


def run(options: Align) -> None:
    """Write the aligned checkpoint and its alignment, and print what they gained."""
    console = Console(stderr=True)
    if is_streamed(options, (options.a, options.b), options.output):
        _run_streamed(options, console)
        return
    beside = alignment_path(options.output)
    require_writable(options.output, overwrite=options.overwrite)
    require_writable(beside, overwrite=options.overwrite)
    symmetry, module, (a, b) = read_checkpoints(options, (options.a, options.b), console)
    params_a, params_b = a.params, b.params
    task = task_for(options, module, params_a, a)
    method = method_of(options)
    with console.status("aligning"):
        generator = torch.Generator().manual_seed(options.seed)
        result = rg.align(params_a, params_b, symmetry, method=method, task=task, generator=generator)
    b.with_params(result.params).write(options.output, overwrite=options.overwrite)
    save_alignment(Alignment(symmetry, result.element), beside, overwrite=options.overwrite)
    table = Table("", "before", "after", box=None, pad_edge=False)
    before, after = (distance(params_a, b, symmetry.buffers) for b in (params_b, result.params))
    table.add_row("distance between A and B", f"{before:.6g}", f"{after:.6g}")
    if task is not None:
        before, after = (task.midpoint_loss(params_a, b) for b in (params_b, result.params))
        table.add_row("loss halfway", f"{before:.6g}", f"{after:.6g}")
    Console().print(table)
    print(result.report)
    print(f"written: {options.output} and {beside.name}")


def _run_streamed(options: Align, console: Console) -> None:
    out = options.output
    require_output(options, out)
    with job_of(options, (options.a, options.b), out, source=1, console=console) as job:
        show_plan(job, out)
        if options.dry_run:
            return
        beside = IN_FOLDER if out.suffix != SUFFIX else alignment_path(out).name
        with staging_of(options, job, out, {"command": "align"}) as staging:
            with show_progress(console, is_counted=False) as progress:
                element, report = matched(job, staging, 1, progress)
            for line in report_lines(f"{options.b} to {options.a}", report):
                print(line)
            save_alignment(Alignment(job.symmetry, element), staging.content / beside, overwrite=True)
            with console.status("writing"):
                write(job, staging, moved_pieces(job.checkpoints[1], job.symmetry, element))
    print(f"written: {out} and {beside}")
