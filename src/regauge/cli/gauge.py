"""`regauge gauge`: a checkpoint moved to where it rounds better, with a certificate and a page next to it."""

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch

import regauge as rg
from regauge.checkpoints.job import FileJob
from regauge.checkpoints.memory_limit import size_text
from regauge.checkpoints.writing import path_beside, save_text
from regauge.cli.audit import write_mappings
from regauge.cli.checkpoint_jobs import open_checkpoints
from regauge.cli.gauge_options import Gauge
from regauge.cli.models import read_networks
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_notes, tell_table, tell_written
from regauge.core.params import require_finite, work_dtype
from regauge.core.task import arguments
from regauge.gauging import (
    BestGauge,
    Certificate,
    GaugeMethod,
    GaugeResult,
    LayerMeasures,
    RoundToNearest,
    choose_streamed,
    default_methods,
    moved_pieces,
)
from regauge.gauging.result import Chosen, describe_fixed
from regauge.gauging.rounding import REPORTED
from regauge.hub import (
    Networks,
    Values,
    bring_together,
    convert,
    dtype_of,
    example_task,
    make_task,
    name_model,
    open_batches,
    open_model,
    untie,
)
from regauge.names import VERSION
from regauge.report.gauge_page import gauge_page

BESIDE = ".gauge.json"
HELD = 4
"""Copies in float64 that choosing holds: the values, what a step makes of them, and what rounding makes of these."""
ROTATING = ("best", "hadamard", "random")
"""Methods that go on tensor by tensor, with rotations alone, where the model has no values here."""
HELD_BY_FUNCTION = 48
"""Copies in float64 that learning by function holds, which moves gradients along with the values."""
FORMAT, FORMAT_VERSION = "regauge.gauge", 1


def gauge_path(checkpoint: Path) -> Path:
    """The path of the certificate of a moved checkpoint: next to a file, or inside a folder."""
    return path_beside(checkpoint, BESIDE)


def run(options: Gauge) -> None:
    """Choose a gauge, write the moved checkpoint, and say what changed."""
    if options.mappings is not None:
        write_mappings(options)
        return
    scheme = _scheme(options)
    job = open_checkpoints(options, [options.checkpoint], gauge_path)
    job = replace(job, checkpoints=bring_together(job.checkpoints).networks)
    with ExitStack() as stack:
        name = options.model
        if name is None and options.symmetry is None:
            name = name_model(job.source)
        if options.untie:
            if job.out is not None and job.out.suffix:
                raise UsageError("--untie changes config.json, so that the output must be a folder")
            name, source = stack.enter_context(untie(name, job.source))
            job = replace(job, checkpoints=(source,))
        found, kwargs, is_held = _read(options, name, job)
        if is_held:
            require_finite(found.checkpoints[0].params, job.source.label, found.symmetry.structure)
        job = replace(job, checkpoints=found.checkpoints)
        chosen = _choose(options, scheme, job, found, kwargs, is_held=is_held)
        measures = LayerMeasures(found.symmetry, [*dict.fromkeys((scheme, *REPORTED))])
        certificate, reason = chosen.certificate if isinstance(chosen, GaugeResult) else None, ""
        if certificate is None:
            reason = "the model has no values here: it is larger than what is run, or is not known"
        else:
            _require_same(certificate)
        facts = _facts(options, chosen, certificate, reason)

        def save_beside(path: Path) -> None:
            facts.update(layers=measures.table(), totals=measures.totals())
            save_facts(facts, path)

        with show_progress(is_counted=False) as progress:
            job.write(moved_pieces(found.checkpoints[0], chosen.moves, measures), save_beside, progress)
    _tell(options.output, chosen, certificate, reason, measures, found)


def _scheme(options: Gauge) -> RoundToNearest:
    """The rounding that a gauge is chosen for; options that do not go together are refused."""
    if options.group < 0:
        raise UsageError(f"--group is {options.group}; it counts values that share a scale, or is left out")
    if options.method == "smooth" and options.data is None:
        raise UsageError("the method 'smooth' looks at what layers read: give --data, or choose another one")
    if options.by == "function" and (options.method != "learned" or options.data is None):
        raise UsageError("--by function is for --method learned with --data, whose batches the model is run on")
    if options.test is not None and options.data is None:
        raise UsageError("--test judges what --data chose: give --data, too")
    return RoundToNearest(options.bits, options.group or None)


def method_of(options: Gauge, scheme: RoundToNearest, *, is_by_function: bool = True) -> BestGauge:
    """The method that the options ask for: what is chosen loses no more than nothing, unless it is to be kept."""
    is_loss = options.data is not None
    is_whole = is_loss or options.always
    methods: dict[str, GaugeMethod] = {
        "equalize": rg.Equalize(),
        "smooth": rg.gauging.Smooth(scheme),
        "hadamard": rg.Hadamard(scheme, is_kept_always=is_whole),
        "random": rg.gauging.RandomRotation(scheme, is_kept_always=is_whole),
        "learned": rg.gauging.LearnedRotation(scheme, steps=options.steps, by=options.by),
    }
    chosen: tuple[GaugeMethod, ...] | None = None if options.method == "best" else (methods[options.method],)
    if chosen is None and not is_by_function:
        chosen = default_methods(scheme, options.steps, is_loss=is_loss, is_by_function=False)
    by: Literal["loss", "weights"] = "loss" if is_loss else "weights"
    return BestGauge(scheme, chosen, by, options.steps, options.always)


def _read(options: Gauge, name: str | None, job: FileJob) -> tuple[Networks, dict[str, Any], bool]:
    """The checkpoint under the names of its model, keyword inputs, and whether its values are held in memory."""
    model, kwargs = None, {}
    if name is not None:
        is_run = options.data is not None or options.method == "learned"
        values: Values = "never" if not _fits(job) else "always" if is_run else "if small"
        model = open_model(name, **vars(options.inputs), values=values)
        with show_status("building and tracing the model"):
            if options.data is not None:
                model = model.on(*arguments(convert(open_batches(options.data, options.batch)[0][0], torch.float32)))
            kwargs = dict((model.trace().kwargs if options.symmetry is None else model.kwargs) or {})
    elif options.data is not None:
        raise UsageError("--data needs the model that runs on them: name it with --model")
    is_held = _fits(job) and (model is None or not model.is_meta or options.method not in ROTATING)
    if not is_held and (options.method not in ROTATING or options.data is not None):
        raise UsageError(_too_large(options, job, HELD))
    found = read_networks(options, job.checkpoints, is_streamed=not is_held, model=model)
    return replace(found, model=model), kwargs, is_held


def _choose(
    options: Gauge,
    scheme: RoundToNearest,
    job: FileJob,
    found: Networks,
    kwargs: dict[str, Any],
    *,
    is_held: bool,
) -> GaugeResult | Chosen:
    """Choose the moves of the checkpoint; of one that does not fit in memory these are rotations."""
    generator = torch.Generator().manual_seed(options.seed)
    method = method_of(options, scheme, is_by_function=_fits(job, HELD_BY_FUNCTION))
    model, outputs = found.model, options.inputs.outputs or None
    if is_held:
        if options.by == "function" and not _fits(job, HELD_BY_FUNCTION):
            raise UsageError(_too_large(options, job, HELD_BY_FUNCTION))
        task, test = _tasks(options, found, kwargs)
        with show_status("choosing a gauge"):
            params = found.checkpoints[0].params
            return rg.gauge(params, found.symmetry, method=method, task=task, test=test, generator=generator)
    module, inputs = (None, ()) if model is None else (model.module, model.inputs)
    ways: Any = {"module": module, "inputs": inputs, "kwargs": kwargs, "outputs": outputs}
    with show_status("choosing a gauge"):
        return choose_streamed(found.checkpoints[0], found.symmetry, method, **ways, generator=generator)


def _too_large(options: Gauge, job: FileJob, copies: int) -> str:
    what = "choosing by data" if options.method in ROTATING else f"the method {options.method!r}"
    return (
        f"{what} needs all values in memory, which takes {size_text(_needed(job, copies))}, more than the "
        f"{size_text(job.limit.nbytes)} that are allowed: allow more --memory, or use --method hadamard without --data"
    )


def _tasks(options: Gauge, found: Networks, kwargs: dict[str, Any]) -> tuple[rg.Task | None, rg.Task | None]:
    """The model on the data that choose, or else on example inputs, and on those that judge."""
    model = found.model
    if model is None or model.is_meta:
        return None, None
    if options.data is None:
        return example_task(model, kwargs, options.inputs.outputs), None
    dtype = work_dtype(dtype_of(found.checkpoints[0].params))
    module, outputs = model.module.to(dtype), options.inputs.outputs
    task, test = (
        None
        if text is None
        else make_task(module, open_batches(text, options.batch), loss=options.loss, dtype=dtype, outputs=outputs)
        for text in (options.data, options.test)
    )
    return task, test


def save_facts(facts: dict[str, Any], path: Path) -> None:
    """Write the certificate with all numbers, and the page that is made of them."""
    import json

    save_text(json.dumps(facts, indent=1, allow_nan=False), path)
    save_text(gauge_page(path), path.with_suffix(".html"))


def _facts(
    options: Gauge, chosen: GaugeResult | Chosen, certificate: Certificate | None, reason: str
) -> dict[str, Any]:
    rotated = [
        {"group": g.name, "kind": g.kind, "size": g.size, "copies": move.symmetry.count_copies(g.name)}
        for move in chosen.moves
        for g in move.moved_groups()
        if g.matrix != "none"
    ]
    ones: set[str] = set()
    for move in chosen.moves:
        ones -= {place.parameter for group in move.moved_groups() for place in group.placements}
        ones |= {*move.ones}
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "regauge": VERSION,
        "checkpoint": str(options.checkpoint),
        "method": options.method,
        "seed": options.seed,
        "certificate": None if certificate is None else {"ok": certificate.ok} | asdict(certificate),
        "not_run": reason,
        "objective": {"before": chosen.initial, "after": chosen.objective, "unit": chosen.unit},
        "trials": None if chosen.trials is None else asdict(chosen.trials),
        "ones": sorted(ones),
        "rotated": rotated,
        "fixed": [{"name": name, "reason": why} for name, why in chosen.fixed],
        "notes": list(chosen.notes),
    }


def _tell(
    out: Path,
    chosen: GaugeResult | Chosen,
    certificate: Certificate | None,
    reason: str,
    measures: LayerMeasures,
    found: Networks,
) -> None:
    if certificate is None:
        tell(f"not run on outputs: {reason}", not_run=reason)
    else:
        tell(certificate, certificate={"ok": certificate.ok} | asdict(certificate))
    if chosen.trials is not None:
        objective = {"before": chosen.initial, "after": chosen.objective, "unit": chosen.unit}
        tell(chosen.trials, trials=asdict(chosen.trials), objective=objective)
    tell_table("rounding", measures.totals(), "mean relative squared error of rounded layers", digits=4)
    tell_notes([*chosen.notes, *describe_fixed(chosen.fixed), *found.checkpoints[0].notes])
    tell_written(out, gauge_path(out), gauge_path(out).with_suffix(".html"))


def _require_same(certificate: Certificate) -> None:
    """Refuse to write a network that computes something else."""
    if not certificate.ok:
        worst = max(certificate.per_group, key=lambda name: certificate.per_group[name], default="")
        raise UsageError(
            f"the moved network would be {certificate}{f' (group {worst!r} most)' if worst else ''}; nothing was "
            "written: please report this model"
        )


def _needed(job: FileJob, copies: int = HELD) -> int:
    """Bytes that the checkpoint takes in memory while a gauge is chosen."""
    values = sum(one.nbytes // one.dtype.itemsize for one in job.source.stored.values())
    return job.source.nbytes + 8 * copies * values


def _fits(job: FileJob, copies: int = HELD) -> bool:
    return _needed(job, copies) <= job.limit.nbytes
