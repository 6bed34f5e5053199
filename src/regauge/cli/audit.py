"""`regauge audit`: test a table of scale pairs on a model, or make a table of scale pairs from the model's symmetry."""

from dataclasses import asdict

import torch

import regauge as rg
from regauge.cli.gauge_options import Audit, Gauge
from regauge.cli.models import read_networks, require_model
from regauge.cli.output import show_status, tell, tell_notes, tell_table, tell_written
from regauge.gauging import Finding, ScalePair, audit, audit_rows, read_mappings, save_mappings


def run(options: Audit) -> None:
    """Print how much each pair of the table changes the outputs, and the parameters that invalid pairs leave out."""
    table = read_mappings(options.mappings)
    checkpoint = rg.Checkpoint.open(options.checkpoint)
    model = require_model(options.model, checkpoint, options.inputs, values="always")
    with show_status("tracing the model"):
        kwargs = model.trace().kwargs
    found = read_networks(options, [checkpoint], model=model)
    with show_status("scaling every pair, and running the model"):
        findings = audit(
            table,
            found.checkpoints[0],
            found.symmetry,
            model.module,
            model.inputs,
            kwargs,
            generator=torch.Generator().manual_seed(options.seed),
            outputs=options.inputs.outputs or None,
        )
    _tell(findings, table)


def write_mappings(options: Gauge) -> None:
    """Write a table for a quantization tool with the scale pairs that leave a model's function unchanged."""
    assert options.mappings is not None
    model = require_model(options.model, rg.Checkpoint.open(options.checkpoint), options.inputs)
    with show_status("tracing the model"):
        symmetry = model.symmetry
    rows, others = save_mappings(symmetry, options.output, options.mappings, overwrite=options.overwrite)
    tell(f"{len(rows)} scale pairs are valid for this model", pairs=rows)
    tell_notes([f"not written: {name}: {reason}" for name, reason in others])
    tell_written(options.output)


def _tell(findings: list[Finding], table: list[ScalePair]) -> None:
    title = "relative change of the outputs in float64 when one pair at a time is scaled by random factors"
    tell_table("rows", audit_rows(findings, table), title)
    tell("", findings=[asdict(one) for one in findings])
    seen: dict[int, Finding] = {one.row: one for one in reversed(findings) if one.verdict != "holds"}
    for _, one in sorted(seen.items()):
        tell(one)
    broken = sum(one.verdict == "broken" for one in findings)
    held = sum(one.verdict == "holds" for one in findings)
    tell(f"{held} pairs keep the function, {broken} change it", held=held, broken=broken)
