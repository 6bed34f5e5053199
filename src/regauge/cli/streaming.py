"""Parts of the commands that align checkpoints, possibly larger than memory: inputs, method, plan and progress."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regauge as rg
from regauge.alignment import METHODS, Method
from regauge.checkpoints.job import FileJob, open_job
from regauge.checkpoints.memory_limit import MemoryLimit, resident, size_text
from regauge.cli.align_options import Align, Matching, Merge, Transport
from regauge.cli.checkpoint_jobs import output_of
from regauge.cli.commands import as_options
from regauge.cli.models import read_networks
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_table
from regauge.core.counted import count
from regauge.core.progress import Progress, no_progress
from regauge.hub import Networks, Values

if TYPE_CHECKING:
    from regauge.alignment.streamed.job import StreamedJob
    from regauge.hub.tokens import TokenPlan


def read_job(
    options: Align | Merge | Transport, paths: Sequence[Path], *, source: int, element: str | None = None
) -> "tuple[FileJob, Networks, TokenPlan | None]":
    """Open checkpoints and find their symmetry; raise an error if the output cannot be written.

    If the tokens of the checkpoints differ, the result also contains the source checkpoint of each row. Networks that
    are streamed stay on the disk. The memory limit includes later imports and traces. The output has the names, dtypes
    and files of the checkpoint with the number `source`. The provenance names the file of an `element`.
    """
    limit = MemoryLimit(MemoryLimit.of(options.memory or None).nbytes, base=resident())
    out = output_of(options, element=element)
    work = {Align: "aligning", Merge: "merging", Transport: "transporting"}[type(options)]
    job = open_job(paths, source, out=out, memory=limit, work=work)
    assert job is not None
    if not options.dry_run:
        job.require_output()
    remedy = "give checkpoints with the same vocabulary"
    remedy += "" if work == "transporting" else ", or use --tokenizer union"
    tokenizer = options.tokenizer if isinstance(options, Align) else None
    united, model = None, options.model
    with ExitStack() as stack:
        if options.untie:
            if out.is_file:
                raise UsageError("--untie changes config.json, so the output must be a folder; change -o")
            model, *untied = stack.enter_context(rg.hub.untie(model, *job.checkpoints))
            job = job.of(*untied)
        if tokenizer is not None or any(one.is_folder for one in job.checkpoints):
            united = rg.hub.bring_together(job.checkpoints, source, tokenizer=tokenizer, remedy=remedy)
            united.require_place(options.output)
            job = replace(job, checkpoints=united.networks)
        if job.is_streamed and options.data is not None:
            raise UsageError(f"--data runs the model and {job.needs_memory}")
        values: Values = "never" if job.is_streamed else "if small" if options.data is None else "always"
        model = model if united is None else stack.enter_context(rg.hub.model_with(model, united))
        options = replace(options, model=model)
        found = read_networks(options, job.checkpoints, values=values, is_streamed=job.streams)
    return job.of(*found.checkpoints).matched_by(found.symmetry), found, None if united is None else united.plan


@contextmanager
def show_work(label: str, *, is_streamed: bool) -> Iterator[Progress]:
    """Display a bar for each pass over files, or a message for work in memory, until the context ends."""
    if is_streamed:
        with show_progress(is_counted=False) as progress:
            yield progress
    else:
        with show_status(label):
            yield no_progress


def show_plan(streamed: "StreamedJob") -> None:
    """Print the numbers of bytes that will be read, kept in memory and written."""
    plan = streamed.plan
    tell_table("working_sets", plan.rows)
    spread = ", ".join(f"{name} ({plan.symmetry[name].size})" for name in plan.spread)
    tell(f"\ngroups chosen after each sweep: {spread or 'none, everything fits'}", spread=list(plan.spread))
    if plan.loose:
        names = f"{', '.join(plan.loose[:4])}{' ...' if len(plan.loose) > 4 else ''}"
        tell(f"read in pieces: {names}", read_in_pieces=list(plan.loose))
    tell(f"read in each sweep: {size_text(plan.sweep_bytes)}", sweep_bytes=plan.sweep_bytes)
    already = f", {size_text(plan.held)} of them already" if plan.held else ""
    tell(
        f"memory held at once, above the interpreter: at most {size_text(plan.peak)}{already}",
        memory_bytes=plan.peak,
        held_bytes=plan.held,
    )
    show_output(streamed.job.shards, streamed.job.out)


def is_all_shown(options: Matching, job: FileJob, plan: "Callable[[], StreamedJob]") -> bool:
    """Print the memory and file sizes of a dry or streamed run before it begins. Return whether the run is dry."""
    if job.is_streamed:
        show_plan(plan())
    elif options.dry_run:
        show_memory(job)
    return options.dry_run


def show_memory(job: FileJob) -> None:
    """Report the numbers of bytes in files and in memory, for networks that are read completely."""
    nbytes = sum(one.nbytes for one in job.checkpoints)
    tell(f"read, as a whole: {size_text(nbytes)}", read_bytes=nbytes)
    held = f"memory held at once, above the interpreter: about {size_text(job.nbytes)}; everything fits"
    tell(held, memory_bytes=job.nbytes)
    show_output(job.shards, job.out)


def show_output(shards: Sequence[Any], out: Path | None) -> None:
    """Report what will be written."""
    told = [{"file": one.file, "bytes": one.nbytes} for one in shards]
    size = size_text(sum(one.nbytes for one in shards))
    tell(f"written: {count(shards, 'file')} of {size} in all: {out}", files=told)


def notes_of(told: Any) -> dict[str, list[str]]:
    """Return the notes of a result as an entry of the report, or no entry if there are no notes."""
    return {"notes": list(map(as_options, told.notes))} if told.notes else {}


def facts_of(result: rg.alignment.Result[Any]) -> dict[str, Any]:
    """Return facts about an alignment for the report: objectives, starts and convergence."""
    return {
        "initial": result.initial,
        "objective": result.objective,
        "history": result.history,
        "starts": result.starts,
        "is_converged": result.is_converged,
    }


def method_of(options: Matching, plain: type[Method] = rg.WeightMatching) -> Method:
    """Return the method that the options name. If the options name no method and no data, return `plain`."""
    name, has_data = options.method, options.data is not None
    if name == "auto":
        name = "data" if has_data and not options.restarts else "weights"
    if options.matcher is not None and name != "learned":
        raise UsageError(f"--matcher is only for --method learned, not {name!r}; add --method learned")
    if options.refine and not has_data:
        raise UsageError("--refine lowers the loss halfway between A and B, which needs data: give --data")
    is_plain = options.method == "auto" and not has_data
    method, needs_data = (plain(), False) if is_plain else _method_named(name, options)
    if options.restarts and not hasattr(method, "restarts"):
        raise UsageError(f"--restarts cannot be used with the method {name!r}; leave it out")
    if needs_data and not has_data:
        raise UsageError(f"the method {name!r} needs data: give --data, or choose another method with --method")
    method = configure(method, options)
    return rg.Sinkhorn(loss="midpoint", init=method) if options.refine else method


def _method_named(name: str, options: Matching) -> tuple[Method, bool]:
    """Return the method with a given name, and whether it needs data."""
    if name == "learned":
        from regauge.cli.learn_matching import read_matcher  # It imports networks over networks, which takes a while.

        return read_matcher(options.matcher, options), False
    row = METHODS[name]
    method = row.load()(**({} if options.data is not None else row.without_data))
    return method, row.needs_data and not row.without_data


def configure(method: Method, options: Matching) -> Method:
    """Return the method, set up by the options. Methods among the settings of the method get the same `scales`."""
    if options.statistic != "correlation" and not hasattr(method, "statistic"):
        kind = type(method).__name__
        raise UsageError(
            f"--statistic is for matching activations, not {kind}: add --method activations, or mixed, with --data"
        )
    own = {name: getattr(options, name) for name in ("restarts", "statistic") if hasattr(method, name)}
    return _rescale(replace(method, **own), options.scales)  # type: ignore[type-var]


def _rescale(method: Method, scales: str) -> Method:
    settings: dict[str, Any] = {"scales": scales} if hasattr(method, "scales") else {}
    for name, value in vars(method).items():
        if isinstance(value, Method):
            settings[name] = _rescale(value, scales)
        elif isinstance(value, tuple) and value and isinstance(value[0], Method):
            settings[name] = tuple(_rescale(one, scales) for one in value)
    return replace(method, **settings)  # type: ignore[type-var]
