"""`regauge audit`: a table of scale pairs tried on a model, row by row; and such a table made from its symmetry."""

import json
from dataclasses import asdict
from typing import Any

import torch
import yaml

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.names.converted import Converted
from regauge.checkpoints.writing import require_writable, save_text
from regauge.cli.gauge_options import Audit, Gauge
from regauge.cli.models import read_networks, require_model
from regauge.cli.options import UsageError
from regauge.cli.output import show_status, tell, tell_notes, tell_table, tell_written
from regauge.core.params import Params, require_finite
from regauge.gauging import Finding, ScalePair, audit, read_mappings, scale_pairs, write_table

SUFFIXES = (".json", ".yaml", ".yml")


def run(options: Audit) -> None:
    """Print what each pair of the table does to the outputs, and what the broken ones leave out."""
    table = read_mappings(options.mappings)
    checkpoint = Checkpoint.open(options.checkpoint)
    model = require_model(options.model, checkpoint, options.inputs, values="always")
    with show_status("tracing the model"):
        kwargs = model.trace().kwargs
    found = read_networks(options, [checkpoint], model=model)
    view, stored = found.checkpoints[0], dict(checkpoint.params)
    require_finite(view.params, checkpoint.label, found.symmetry.structure)

    def convert(params: Params) -> Params:
        """Parameters under the names of the files as those of the model."""
        if not isinstance(view, Converted):
            return dict(params)
        there = Converted(checkpoint.with_params(params), view.conversion)
        return {one: there.read(one) for one in there.stored}

    with show_status("scaling every pair, and running the model"):
        findings = audit(
            table,
            stored,
            found.symmetry,
            model.module,
            model.inputs,
            kwargs,
            generator=torch.Generator().manual_seed(options.seed),
            outputs=options.inputs.outputs or None,
            convert=convert,
        )
    _tell(findings, table)


def _tell(findings: list[Finding], table: list[ScalePair]) -> None:
    rows: list[dict[str, Any]] = []
    for number, pattern in enumerate(table):
        own = [one for one in findings if one.row == number]
        changes = [one.change for one in own if one.change is not None]
        counts = {v: sum(one.verdict == v for one in own) for v in ("holds", "broken", "skipped", "unmatched")}
        rows.append(
            {
                "row": number,
                "smooth layer": pattern.smooth,
                "verdict": ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count),
                "largest change": f"{max(changes):.1e}" if changes else "",
            }
        )
    tell_table("rows", rows, "each pair scaled alone by random factors, relative change of the outputs in float64")
    tell("", findings=[asdict(one) for one in findings])
    seen: dict[int, Finding] = {one.row: one for one in reversed(findings) if one.verdict != "holds"}
    for number, one in sorted(seen.items()):
        parts = [one.reason] if one.reason else []
        parts += [f"must be scaled, too: {', '.join(one.missing)}"] if one.missing else []
        parts += [f"must not be scaled so: {', '.join(one.extra)}"] if one.extra else []
        tell(f"row {number}, {one.smooth}: {'; '.join(parts)}")
    broken = sum(one.verdict == "broken" for one in findings)
    held = sum(one.verdict == "holds" for one in findings)
    tell(f"{held} pairs leave the function as it is, {broken} change it", held=held, broken=broken)


def write_mappings(options: Gauge) -> None:
    """Write the scale pairs that hold for a model as a table of another tool."""
    assert options.mappings is not None
    out = options.output
    require_writable(out, overwrite=options.overwrite, suffixes=SUFFIXES)
    checkpoint = Checkpoint.open(options.checkpoint)
    model = require_model(options.model, checkpoint, options.inputs)
    with show_status("tracing the model"):
        pairs, others = scale_pairs(model.symmetry)
    if not pairs:
        raise UsageError(f"no scale pair of the model of {model.name!r} can be written as modules with a weight each")
    rows = write_table(pairs, options.mappings)
    text = json.dumps(rows, indent=1) + "\n" if out.suffix == ".json" else yaml.safe_dump(rows, sort_keys=False)
    save_text(text, out)
    tell(f"{len(pairs)} scale pairs hold for this model", pairs=rows)
    tell_notes([f"not written: {name}: {reason}" for name, reason in others])
    tell_written(out)
