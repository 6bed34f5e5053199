"""Files of a network in another gauge: the transformed checkpoint and its report."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from regauge.checkpoints.job import WORKS, FileJob
from regauge.checkpoints.writing import path_beside
from regauge.core.params import Params
from regauge.core.progress import Progress
from regauge.core.symmetry import Symmetry
from regauge.gauging.choose_streamed import moved_pieces
from regauge.gauging.gauge_method import GaugeMethod
from regauge.gauging.measures import LayerMeasures
from regauge.gauging.named_methods import name_of
from regauge.gauging.result import GaugeResult
from regauge.gauging.rounding import FOUR_BITS, REPORTED

NOT_RUN = "the model has no values here, because it is unknown or too large to be run"
"""The reason that is reported if there is no certificate."""


def gauge_path(checkpoint: Path) -> Path:
    """Return the path of a transformed checkpoint's report, such as `out.gauge.json` for `out.safetensors`."""
    return path_beside(checkpoint, WORKS["choosing a gauge"].beside)


def write_gauge(
    job: FileJob, symmetry: Symmetry, method: GaugeMethod, result: GaugeResult, progress: Progress
) -> Params:
    """Write a checkpoint in another gauge, tensor by tensor, with its certificate and the rounding errors of layers.

    Args:
        job: The checkpoint and the output.
        symmetry: The symmetry of its architecture, with every size known.
        method: The method that chose the gauge.
        result: The moves, and a record of the choice.
        progress: A function that shows the progress of writing.

    Returns:
        The transformed network, which is read from the output on access.

    Raises:
        ValueError: According to the certificate, the transformed network would compute another function.
    """
    certificate = result.certificate
    if certificate is not None and not certificate.ok:
        worst = max(certificate.per_group, key=lambda name: certificate.per_group[name], default="")
        raise ValueError(
            f"the transformed network would be {certificate}{f' (group {worst!r} most)' if worst else ''}; nothing was "
            "written: please report this model"
        )
    measures = LayerMeasures(symmetry, [*dict.fromkeys((getattr(method, "scheme", FOUR_BITS), *REPORTED))])

    def facts() -> dict[str, Any]:
        return _facts(result, method) | {"layers": measures.table(), "totals": measures.totals()}

    pieces = moved_pieces(job.source, result.moves, measures)
    return cast(Params, job.write_reported(pieces, "regauge.gauge", facts, progress))


def _facts(result: GaugeResult, method: GaugeMethod) -> dict[str, Any]:
    rotated = [
        {"group": g.name, "kind": g.kind, "size": g.size, "copies": move.symmetry.count_copies(g.name)}
        for move in result.moves
        for g in move.moved_groups()
        if g.matrix != "none"
    ]
    ones: set[str] = set()
    for move in result.moves:
        ones -= {place.parameter for group in move.moved_groups() for place in group.placements}
        ones |= {*move.ones}
    certificate = result.certificate
    return {
        "method": name_of(method),
        "certificate": None if certificate is None else {"ok": certificate.ok} | asdict(certificate),
        "not_run": NOT_RUN if certificate is None else "",
        "objective": {"before": result.initial, "after": result.objective, "unit": result.unit},
        "trials": None if result.trials is None else asdict(result.trials),
        "ones": sorted(ones),
        "rotated": rotated,
        "fixed": [{"name": name, "reason": why} for name, why in result.fixed],
        "notes": list(result.notes),
    }
