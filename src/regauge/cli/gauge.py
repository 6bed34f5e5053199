"""`regauge gauge`: write an equivalent checkpoint with smaller rounding errors, a certificate and a page."""

import json
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch

import regauge as rg
from regauge.cli.audit import write_mappings
from regauge.cli.checkpoint_jobs import open_checkpoints, output_of
from regauge.cli.gauge_options import Gauge
from regauge.cli.models import read_networks
from regauge.cli.options import UsageError
from regauge.cli.output import show_status, tell, tell_notes, tell_table, tell_written
from regauge.cli.streaming import show_work
from regauge.core.task import arguments
from regauge.gauging import GaugeResult, RoundToNearest, describe_fixed, gauge_path, named_method
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
from regauge.report.gauge_page import gauge_page

ROTATING = ("best", "hadamard", "random")
"""Methods that can work tensor by tensor, with rotations only, for models on the meta device."""


def run(options: Gauge) -> None:
    """Choose a gauge, write the transformed checkpoint, and report the changes."""
    if options.mappings is not None:
        return write_mappings(options)
    scheme = _scheme(options)
    settings: Any = {"is_loss": options.data is not None, "steps": options.steps, "by": options.by}
    out = output_of(options, page=gauge_page)
    work = "choosing a gauge"
    job = open_checkpoints([options.checkpoint], out, memory=options.memory, work=work)
    if options.method not in ROTATING or options.data is not None:
        job.require_memory(", or use --method hadamard without --data")
    job = job.of(*bring_together(job.checkpoints).networks)
    with ExitStack() as stack:
        name = options.model
        if name is None and options.symmetry is None:
            name = name_model(job.source)
        if options.untie:
            name, source = stack.enter_context(untie(name, job.source))
            if out.path.suffix:
                raise UsageError("--untie changes config.json, so the output must be a folder; change -o")
            job = job.of(source)
        found, task, test = _read(options, name, job.source, fits=job.fits)
        with show_work(work, is_streamed=found.checkpoints[0].is_lazy) as progress:
            result = rg.gauge(
                found.checkpoints[0],
                found.symmetry,
                method=named_method(options.method, scheme, is_kept_always=options.always, **settings),
                task=task,
                test=test,
                generator=torch.Generator().manual_seed(options.seed),
                out=out,
                memory=job.limit,
                progress=progress,
            )
    _tell(options, result, found.checkpoints[0].notes)
    return None


def _scheme(options: Gauge) -> RoundToNearest:
    """Return the rounding scheme for which a gauge is chosen. Raise an error for options that exclude each other."""
    if options.group < 0:
        raise UsageError(f"--group is {options.group}; give the number of values that share a scale, or leave it out")
    if options.method == "smooth" and options.data is None:
        raise UsageError("the method 'smooth' needs the inputs of layers: give --data, or choose another method")
    if options.by == "function" and (options.method != "learned" or options.data is None):
        raise UsageError("--by function needs --method learned and --data: give both, or leave --by out")
    if options.test is not None and options.data is None:
        raise UsageError("--test measures the result of a choice on --data: give --data, too")
    return RoundToNearest(options.bits, options.group or None)


def _read(
    options: Gauge, name: str | None, checkpoint: rg.Checkpoint, *, fits: bool
) -> tuple[Networks, rg.Task | None, rg.Task | None]:
    """Return the checkpoint under its model's names, the task for choosing the gauge, and the task for evaluating it.

    The network stays on the disk if memory does not suffice, or if rotations are sampled and the model has no weights.
    """
    if name is None:
        if options.data is not None:
            raise UsageError("--data needs a model that is run on the data: name it with --model")
        return read_networks(options, [checkpoint], is_streamed=not fits), None, None
    is_run = options.data is not None or options.method == "learned"
    values: Values = "never" if not fits else "always" if is_run else "if small"
    model = open_model(name, **vars(options.inputs), values=values)
    with show_status("building and tracing the model"):
        if options.data is not None:
            model = model.on(*arguments(convert(open_batches(options.data, options.batch)[0][0], torch.float32)))
        kwargs = dict((model.trace().kwargs if options.symmetry is None else model.kwargs) or {})
    is_held = fits and (not model.is_meta or options.method not in ROTATING)
    found = read_networks(options, [checkpoint], is_streamed=not is_held, model=model)
    if model.is_meta and is_held:
        return found, None, None
    if options.data is None:
        return found, example_task(model, kwargs, options.inputs.outputs), None
    dtype = torch.promote_types(dtype_of(found.checkpoints[0].params), torch.float32)
    module, outputs = model.module.to(dtype), options.inputs.outputs
    task, test = (
        None
        if text is None
        else make_task(module, open_batches(text, options.batch), loss=options.loss, dtype=dtype, outputs=outputs)
        for text in (options.data, options.test)
    )
    return found, task, test


def _tell(options: Gauge, result: GaugeResult, notes: tuple[str, ...]) -> None:
    path = gauge_path(options.output)
    facts = json.loads(path.read_text(encoding="utf-8"))
    if result.certificate is None:
        tell(f"the model was not run, so its outputs were not compared: {facts['not_run']}", not_run=facts["not_run"])
    else:
        tell(result.certificate, certificate=facts["certificate"])
    if result.trials is not None:
        tell(result.trials, trials=asdict(result.trials), objective=facts["objective"])
    tell_table("rounding", facts["totals"], "mean relative squared error of rounded layers", digits=4)
    tell_notes([*result.notes, *describe_fixed(result.fixed), *notes])
    tell_written(options.output, path, path.with_suffix(".html"))
