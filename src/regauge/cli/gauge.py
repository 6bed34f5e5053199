"""`regauge gauge`: a checkpoint moved to where it rounds better, with a certificate and a page beside it."""

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import regauge as rg
from regauge.alignment.streamed.job import FileJob
from regauge.alignment.streamed.memory import row_ranges
from regauge.cli.audit import write_mappings
from regauge.cli.checkpoint_jobs import open_checkpoints
from regauge.cli.gauge_options import Gauge
from regauge.cli.models import Model, Networks, find_traced, load_model, name_model, read_networks
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_notes, tell_table, tell_written
from regauge.cli.tasks import convert, load_batches
from regauge.cli.tracing import Traced
from regauge.cli.transformers_models import Values
from regauge.cli.untied import untied
from regauge.cli.vocabulary import bring_together
from regauge.core.params import require_finite
from regauge.core.task import Batch, arguments
from regauge.gauging import Certificate, GaugeMethod, LayerMeasures, Move, RoundToNearest, certify, move_tensor
from regauge.gauging.method import GaugeProblem, fixed_reasons, to_work
from regauge.gauging.methods.rotations import Rotation
from regauge.gauging.moves import Uncovered, rotating, uncover_rotations
from regauge.gauging.result import Chosen, describe_fixed
from regauge.names import VERSION
from regauge.report.gauge_page import gauge_page
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.memory_limit import size_text
from regauge.storage.checkpoints.writing import Pieces, path_beside, save_text

BESIDE = ".gauge.json"
BITS = (8, 4, 3)
"""Bits at which the errors of layers are reported, per row."""
HELD = 4
"""Copies in float64 that choosing holds: the values, what a step makes of them, and what rounding makes of these."""
HELD_BY_FUNCTION = 48
"""Copies in float64 that learning by function holds, which moves gradients along with the values."""
PIECE = 1 << 23
"""Bytes, as float32, of the pieces of tensors that need not be moved as a whole."""
FORMAT, FORMAT_VERSION = "regauge.gauge", 1


def gauge_path(checkpoint: Path) -> Path:
    """Where the certificate of a moved checkpoint is: beside a file, or in a folder."""
    return path_beside(checkpoint, BESIDE)


def run(options: Gauge) -> None:
    """Choose a gauge, write the moved checkpoint, and say what changed."""
    if options.mappings is not None:
        write_mappings(options)
        return
    method = method_of(options)
    job = open_checkpoints(options, [options.checkpoint], gauge_path)
    job = replace(job, checkpoints=bring_together(job.checkpoints).networks)
    with ExitStack() as stack:
        name = name_model(options.model, job.source) if options.symmetry is None else options.model
        if options.untie:
            name, job = stack.enter_context(untied(name, job))
        found, kwargs, uncovered, can_run = _read(options, method, name, job)
        job = replace(job, checkpoints=found.checkpoints)
        if _fits(job):
            require_finite(found.checkpoints[0].params, job.source.label)
        chosen = _choose(method, found, uncovered, kwargs, options)
        measures = LayerMeasures(found.symmetry, [RoundToNearest(bits) for bits in BITS])
        certificate, reason = None, "the model has no values here: it is larger than what is run, or is not known"
        if can_run and found.model is not None and _fits(job):
            with show_status("running the network before and after"):
                certificate = certify(
                    found.checkpoints[0].params,
                    chosen.moves,
                    found.model.module,
                    found.model.inputs,
                    kwargs,
                    outputs=options.inputs.outputs or None,
                )
            _require_same(certificate)
            reason = ""
        facts = _facts(options, chosen, certificate, reason)

        def save_beside(path: Path) -> None:
            facts.update(layers=measures.table(), totals=measures.totals())
            save_facts(facts, path)

        with show_progress(is_counted=False) as progress:
            job.write(_pieces(found.checkpoints[0], chosen.moves, measures), save_beside, progress)
    _tell(options.output, chosen, certificate, reason, measures, found)


def method_of(options: Gauge) -> GaugeMethod:
    """The method that the options ask for; rotations that were asked for are kept, whatever weights alone say."""
    if options.group < 0:
        raise UsageError(f"--group is {options.group}; it counts values that share a scale, or is left out")
    scheme = RoundToNearest(options.bits, options.group or None)
    if options.method == "smooth" and options.data is None:
        raise UsageError("the method 'smooth' looks at what layers read: give --data, or choose another one")
    if options.by == "function" and (options.method != "learned" or options.data is None):
        raise UsageError("--by function is for --method learned with --data, whose batches the model is run on")
    methods: dict[str, GaugeMethod] = {
        "equalize": rg.Equalize(),
        "smooth": rg.Smooth(scheme),
        "hadamard": rg.Hadamard(scheme, is_kept_always=True),
        "random": rg.RandomRotation(scheme, is_kept_always=True),
        "learned": rg.LearnedRotation(scheme, steps=options.steps, by=options.by),
    }
    return methods[options.method]


def _read(
    options: Gauge, method: GaugeMethod, name: str | None, job: FileJob
) -> tuple[Networks, dict[str, Any], Uncovered, bool]:
    """The checkpoint under the names of its model, example inputs, its rotations, and whether the model can run."""
    model: Model | None = None
    traced, kwargs = None, {}
    if name is not None:
        values: Values = "never" if not _fits(job) else "if small" if options.data is None else "always"
        model = load_model(name, options.inputs, values=values)
        if options.data is not None:
            args, named = arguments(_batches(options)[0][0])
            model = replace(model, inputs=args, kwargs=named, further=())
        with show_status("tracing the model"):
            if options.symmetry is None:
                symmetry, found_kwargs = find_traced(model, options.inputs.outputs)
                kwargs = dict(found_kwargs or {})
                traced = Traced(symmetry, model.module.state_dict(), model.is_meta, module=model.module)
            else:
                kwargs = dict(model.kwargs or {})
    can_run = model is not None and not model.is_meta
    is_held = can_run or not isinstance(method, Rotation)
    copies = HELD_BY_FUNCTION if options.by == "function" else HELD
    if is_held and not _fits(job, copies):
        raise UsageError(
            f"the method {options.method!r} needs all values in memory, which takes "
            f"{size_text(_needed(job, copies))}, more than the {size_text(job.limit.nbytes)} that are allowed: allow "
            "more --memory, or say --method hadamard"
        )
    where = replace(options, model=name)
    found = read_networks(where, job.checkpoints, is_streamed=not is_held, traced=traced)
    found = replace(found, model=model)
    uncovered = Uncovered(None, rotating(found.symmetry), {})
    if model is not None and options.method not in ("equalize", "smooth") and not found.symmetry.ones:
        with show_status("looking for rotations behind gains"):
            read, outputs = _reader(found), options.inputs.outputs or None
            uncovered = uncover_rotations(read, found.symmetry, model.module, model.inputs, kwargs, outputs)
    return found, kwargs, uncovered, can_run


def _batches(options: Gauge) -> list[Batch]:
    """The batches of --data, in float32."""
    assert options.data is not None
    loaded = load_batches(options.data, options.batch)
    return [(convert(inputs, torch.float32), targets) for inputs, targets in loaded]


def _reader(found: Networks) -> Any:
    """Reads a parameter by any name that it has."""
    (checkpoint,) = found.checkpoints
    alias = {name: names for names in found.symmetry.tied for name in names}

    def read(name: str) -> torch.Tensor:
        known = next((one for one in (name, *alias.get(name, ())) if one in checkpoint.stored), name)
        return checkpoint.read(known) if known in checkpoint.stored else checkpoint.params[name]

    return read


def _choose(
    method: GaugeMethod, found: Networks, uncovered: Uncovered, kwargs: dict[str, Any], options: Gauge
) -> Chosen:
    """Choose the moves of the checkpoint; random and Hadamard rotations need no weights in memory."""
    generator = torch.Generator().manual_seed(options.seed)
    if isinstance(method, Rotation):
        element = method.rotate(uncovered.symmetry, generator)
        before = () if uncovered.before is None else (uncovered.before,)
        fixed = fixed_reasons(found.symmetry, uncovered)
        return Chosen((*before, Move(uncovered.symmetry, element)), 0.0, 0.0, (), "", fixed)
    task = None
    if found.model is not None and method.needs_task:
        if found.model.inputs and kwargs:
            raise UsageError("the model needs masks beside its data: give batches whose inputs are named")
        first = [(found.model.inputs or kwargs, torch.zeros(1))]
        batches = _batches(options) if options.by == "function" else first
        task = rg.Task(found.model.module, batches, outputs=options.inputs.outputs or None)
    problem = GaugeProblem(to_work(found.checkpoints[0].params), found.symmetry, task, generator)
    problem.__dict__["uncovered"] = uncovered
    with show_status("choosing a gauge"):
        chosen = method.choose(problem)
    return chosen if chosen.moves else replace(chosen, moves=(Move(found.symmetry, found.symmetry.identity()),))


def _pieces(checkpoint: Checkpoint, moves: tuple[Move, ...], measures: LayerMeasures) -> Pieces:
    """The moved tensors piece by piece, which are measured on the way."""

    def pieces(name: str) -> Any:
        shape = checkpoint.stored[name].shape
        ranges = [row_ranges(move.symmetry, name, shape, PIECE) for move in moves]
        for rows in next((one for one in ranges if one == [None]), ranges[0]):
            tensor = checkpoint.read(name, rows=rows)
            require_finite({name: tensor}, checkpoint.label)
            moved = move_tensor(moves, name, tensor)
            measures.add(name, tensor, moved)
            yield moved

    return pieces


def save_facts(facts: dict[str, Any], path: Path) -> None:
    """Write the certificate with all numbers, and the page that is made of them."""
    import json

    save_text(json.dumps(facts, indent=1, allow_nan=False), path)
    save_text(gauge_page(path), path.with_suffix(".html"))


def _facts(options: Gauge, chosen: Chosen, certificate: Certificate | None, reason: str) -> dict[str, Any]:
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
        "ones": sorted(ones),
        "rotated": rotated,
        "fixed": [{"name": name, "reason": why} for name, why in chosen.fixed],
        "notes": list(chosen.notes),
    }


def _tell(
    out: Path,
    chosen: Chosen,
    certificate: Certificate | None,
    reason: str,
    measures: LayerMeasures,
    found: Networks,
) -> None:
    if certificate is None:
        tell(f"not run on outputs: {reason}", not_run=reason)
    else:
        tell(certificate, certificate={"ok": certificate.ok} | asdict(certificate))
    if chosen.unit:
        tell(
            f"objective {chosen.initial:.4g} -> {chosen.objective:.4g} {chosen.unit}",
            objective={"before": chosen.initial, "after": chosen.objective, "unit": chosen.unit},
        )
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
