"""`regauge transport`: transfer the change of a fine-tune to another base."""

from dataclasses import replace
from typing import Any

import torch

import regauge as rg
from regauge.cli.align_options import Transport
from regauge.cli.output import tell, tell_table, tell_written
from regauge.cli.streaming import is_all_shown, method_of, read_job, show_work
from regauge.cli.tasks import matching_tasks


def run(options: Transport) -> None:
    """Write the fine-tuned B, and print how the change was transferred."""
    job, found, _ = read_job(options, (options.base_b, options.base_a, options.tuned_a), source=0)
    task, test = matching_tasks(options, found)
    method = method_of(replace(options, data=None) if options.method == "auto" and not options.refine else options)
    ways: dict[str, Any] = {"method": method, "task": task, "rotate": options.rotate}
    if is_all_shown(options, job, lambda: rg.merging.plan_transport(job, found.symmetry, **ways)):
        return
    base_b, base_a, tuned_a = found.checkpoints
    ways |= {"generator": torch.Generator().manual_seed(options.seed), "out": job.output, "memory": job.limit}
    with show_work("aligning, and transferring the change", is_streamed=job.is_streamed) as progress:
        ways |= {"scale": options.scale, "steps": options.steps, "progress": progress}
        made = rg.transport(base_a, tuned_a, base_b, found.symmetry, **ways)
    facts = {name: getattr(made, name) for name in ("mode", "scale", "cosine", "steps", "losses", "notes")}
    tell(made, **facts, is_element=made.element is not None)
    if test is not None:
        rows = [{"": name, **test.evaluate(one)} for name, one in (("base B", base_b.params), ("result", made.params))]
        tell_table("losses", rows, f"measured on {test.name}")
    tell_written(options.output)
