"""`regauge repair`: the activations of a merged checkpoint, renormalized."""

from collections.abc import Sequence

import regauge as rg
from regauge.cli.checkpoint_jobs import open_checkpoints, output_of
from regauge.cli.options import Held, Repair, UsageError
from regauge.cli.output import show_status, tell, tell_notes, tell_table, tell_written
from regauge.cli.tasks import read
from regauge.core.interpolation import distance, mean, shares_of
from regauge.core.params import Params

FAR = 0.05
"""A note is printed if the mean of the endpoints is this share of their distance away from the merged checkpoint."""


def run(options: Repair) -> None:
    """Write the repaired checkpoint, and print the variances of every layer and the losses, before and after."""
    out = output_of(options)
    job = open_checkpoints([options.merged, *options.endpoints], out)
    if not options.endpoints and (options.weights or options.align):
        raise UsageError("--weights and --align are for endpoints: name them with --endpoints")
    if options.held != Held() and not options.align:
        raise UsageError("--keep and --move are for --align, for which the model is traced")
    shares = shares_of(options.weights or None, len(options.endpoints)) if options.endpoints else ()
    judged = read(options, job.checkpoints, options.held)
    merged, endpoints = judged.networks[0], judged.networks[1:]
    if options.align:
        with show_status("aligning the endpoints"):
            symmetry, method = judged.symmetry, rg.WeightMatching(scales="recompute")
            endpoints = tuple(rg.align(merged, end, symmetry, method=method).params for end in endpoints)
    module, inputs = judged.model.module, [inputs for inputs, _ in judged.choosing.batches]
    task = None if options.always else judged.choosing
    if endpoints:
        _warn(merged, endpoints, shares)
    with show_status("repairing"):
        checkpoint = judged.checkpoints[0]
        result = rg.repair(checkpoint, module, endpoints, inputs, weights=shares or None, task=task, out=out)
    if endpoints:
        before, after = (
            rg.connect.variance_collapse(one, module, endpoints, inputs, weights=shares)
            for one in (merged, result.params)
        )
        tell_table(
            "variances",
            [
                {"layer": old.layer, "units": old.units, "merged": old.ratio, "repaired": new.ratio}
                for old, new in zip(before.table, after.table, strict=True)
            ],
            title="variance of the units, as a share of that in the endpoints",
            decimals=3,
        )
    rows = [("merged", merged), ("repaired", result.params), *zip(map(str, options.endpoints), endpoints, strict=True)]
    tell_table("networks", [{"": label, **judged.task.evaluate(params)} for label, params in rows])
    tell(f"activations come from {judged.choosing.name}; judged by {judged.task.name}")
    tell_notes((*result.notes, *checkpoint.notes))
    tell_written(options.output)


def _warn(merged: Params, endpoints: Sequence[Params], shares: Sequence[float]) -> None:
    """Print a note if the mean of the endpoints is far from the merged checkpoint."""
    off = distance(merged, mean(endpoints, shares))
    spread = max(distance(endpoints[0], end) for end in endpoints)
    if off > FAR * spread:
        tell(
            f"note: the mean of the endpoints is {off:.4g} away from the merged checkpoint, and they are up to "
            f"{spread:.4g} apart; where they were aligned for merging, give them aligned, or say --align"
        )
