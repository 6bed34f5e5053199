"""`regauge repair`: renormalize the activations of a merged checkpoint."""

import regauge as rg
from regauge.cli.checkpoint_jobs import open_checkpoints, output_of
from regauge.cli.line_options import Repair
from regauge.cli.options import Held, UsageError
from regauge.cli.output import show_status, tell, tell_notes, tell_table, tell_written
from regauge.cli.tasks import read


def run(options: Repair) -> None:
    """Write the repaired checkpoint. Print the variances of every layer and the losses, before and after the repair."""
    out, weights = output_of(options), options.weights or None
    job = open_checkpoints([options.merged, *options.endpoints], out, work="repairing")
    if not options.endpoints and (weights or options.align):
        raise UsageError("--weights and --align need the endpoints: name them with --endpoints")
    if options.held != Held() and not options.align:
        raise UsageError("--keep and --move are only for --align; leave them out, or add --align")
    judged = read(options, job.checkpoints, options.held)
    checkpoint, endpoints = judged.checkpoints[0], judged.networks[1:]
    if options.align:
        with show_status("aligning the endpoints"):
            symmetry, method = judged.symmetry, rg.WeightMatching(scales="recompute")
            endpoints = tuple(rg.align(checkpoint.params, end, symmetry, method=method).params for end in endpoints)
    module, inputs = judged.model.module, [inputs for inputs, _ in judged.choosing.batches]
    task = None if options.always else judged.choosing
    with show_status("repairing"):
        result = rg.repair(checkpoint, module, endpoints, inputs, weights=weights, task=task, out=out)
    networks = {"merged": checkpoint.params, "repaired": result.params}
    if endpoints:
        before, after = (
            rg.connect.variance_collapse(one, module, endpoints, inputs, weights=weights) for one in networks.values()
        )
        tell_table(
            "variances",
            [
                {"layer": old.layer, "units": old.units, "merged": old.ratio, "repaired": new.ratio}
                for old, new in zip(before.table, after.table, strict=True)
            ],
            title="variance of the units, divided by their variance in the endpoints",
            decimals=3,
        )
    rows = [*networks.items(), *zip(map(str, options.endpoints), endpoints, strict=True)]
    tell_table("networks", [{"": label, **judged.task.evaluate(params)} for label, params in rows])
    tell(f"activations were measured on {judged.choosing.name}; losses were measured on {judged.task.name}")
    tell_notes((*result.notes, *checkpoint.notes))
    tell_written(options.output)
