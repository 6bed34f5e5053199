"""`regauge repair`: the activations of a merged checkpoint, renormalized."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

import regauge as rg
from regauge.cli.evaluation import Judged, read, table_of
from regauge.cli.options import Repair, UsageError
from regauge.core.interpolation import distance, mean, shares_of
from regauge.core.params import Params
from regauge.core.task import arguments
from regauge.storage.checkpoints.writing import require_writable

FAR = 0.05
"""A note is printed if the mean of the endpoints is this share of their distance away from the merged checkpoint."""


def run(options: Repair) -> None:
    """Write the repaired checkpoint, and print the variances of every layer and the losses, before and after."""
    require_writable(options.output, overwrite=options.overwrite)
    if not options.endpoints and (options.weights or options.align):
        raise UsageError("--weights and --align are for endpoints: name them with --endpoints")
    shares = shares_of(options.weights or None, len(options.endpoints)) if options.endpoints else ()
    console = Console(stderr=True)
    judged = read(options, (options.merged, *options.endpoints), console)
    merged, endpoints = judged.networks[0], judged.networks[1:]
    if not endpoints and judged.task.prepare is None:
        raise UsageError(
            "without endpoints only statistics of batch normalization are recomputed, but the model has none; name the "
            "checkpoints that were merged with --endpoints"
        )
    if options.align:
        endpoints = _align_endpoints(judged, console)
    inputs = [kwargs or args for args, kwargs in (arguments(batch) for batch, _ in judged.task.batches)]
    if endpoints:
        _warn(merged, endpoints, shares)
        with console.status("repairing"):
            before = rg.connect.variance_collapse(merged, judged.model.module, endpoints, inputs, weights=shares)
            result = rg.repair(merged, judged.model.module, endpoints, inputs, weights=shares).params
            after = rg.connect.variance_collapse(result, judged.model.module, endpoints, inputs, weights=shares)
        Console().print(_table(before, after))
    else:
        with console.status("recomputing statistics"):
            result = rg.reset_batchnorm(merged, judged.model.module, inputs)
    rows = [("merged", merged), ("repaired", result), *zip(map(str, options.endpoints), endpoints, strict=True)]
    Console().print(table_of([{"": label, **judged.task.evaluate(params)} for label, params in rows]))
    judged.checkpoints[0].with_params(result).write(options.output, overwrite=options.overwrite)
    print(f"written: {options.output}")


def _align_endpoints(judged: Judged, console: Console) -> tuple[Params, ...]:
    """Align the endpoints to the merged checkpoint."""
    merged, *endpoints = judged.networks
    with console.status("aligning the endpoints"):
        symmetry = judged.symmetry
        return tuple(rg.align(merged, end, symmetry, method=rg.WeightMatching()).params for end in endpoints)


def _warn(merged: Params, endpoints: Sequence[Params], shares: Sequence[float]) -> None:
    """Print a note if the mean of the endpoints is far from the merged checkpoint."""
    off = distance(merged, mean(endpoints, shares))
    spread = max(distance(endpoints[0], end) for end in endpoints)
    if off > FAR * spread:
        print(
            f"note: the mean of the endpoints is {off:.4g} away from the merged checkpoint, and they are up to "
            f"{spread:.4g} apart; where they were aligned for merging, give them aligned, or say --align"
        )


def _table(before: rg.connect.VarianceCollapse, after: rg.connect.VarianceCollapse) -> Table:
    table = Table(box=None, pad_edge=False, title="variance of the units, as a share of that in the endpoints")
    for title in ("layer", "units", "merged", "repaired"):
        table.add_column(title, justify="left" if title == "layer" else "right")
    for old, new in zip(before.table, after.table, strict=True):
        table.add_row(old.layer, str(old.units), f"{old.ratio:.3f}", f"{new.ratio:.3f}")
    return table
