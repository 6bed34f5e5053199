"""Aligning and merging checkpoints that do not fit in memory: plan, progress, and going on after an interrupt."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import regauge as rg
from regauge.alignment.streamed.climb import align_streamed
from regauge.alignment.streamed.plan import Plan, make_plan
from regauge.alignment.streamed.state import load_state, save_state
from regauge.cli.discover import find
from regauge.cli.errors import UsageError
from regauge.cli.matching import model_of, symmetry_file
from regauge.cli.models import load_model
from regauge.cli.options import Streamed
from regauge.core.element import Element
from regauge.core.progress import Progress
from regauge.storage.checkpoints.alignments import Alignment, load_alignment, save_alignment
from regauge.storage.checkpoints.checkpoint import Checkpoint, require_alike
from regauge.storage.checkpoints.locating import locate
from regauge.storage.checkpoints.names import match
from regauge.storage.checkpoints.shards import Pieces, Shard, joined, layout
from regauge.storage.checkpoints.staging import Staging, require_place

SUFFIX = ".safetensors"
HELD = 5
"""Copies in float32 of one network that aligning in memory holds."""
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json", ".md")
"""Files of a folder that are not copied beside new weights."""
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


@dataclass(frozen=True)
class Job:
    """What a streamed command works on.

    Attributes:
        checkpoints: Opened; the first one stays where it is.
        symmetry: Of all of them, with every size known.
        plans: One for each checkpoint that moves.
        shards: The files of the output.
        source: The checkpoint whose layout and whose other files the output takes over.
        method: How to match.
    """

    checkpoints: tuple[Checkpoint, ...]
    symmetry: rg.Symmetry
    plans: tuple[Plan, ...]
    shards: tuple[Shard, ...]
    source: Checkpoint
    method: rg.WeightMatching


def is_streamed(options: Streamed, paths: Sequence[Path], out: Path) -> bool:
    """Whether a command streams: it was asked to, it makes a folder of folders, or the networks are too large."""
    files = [locate(path) for path in paths]
    is_folder = out.suffix != SUFFIX and all(path.is_dir() or path.name.endswith(".index.json") for path in paths)
    if options.dry_run or options.resume or is_folder:
        return True
    if not all(file.name.endswith((SUFFIX, SUFFIX + ".index.json")) for file in files):
        return False
    with ExitStack() as stack:
        opened = [stack.enter_context(Checkpoint.open(file)) for file in files]
        values = sum(entry.nbytes // entry.dtype.itemsize for entry in opened[0].stored.values())
        needed = sum(checkpoint.nbytes for checkpoint in opened) + 4 * HELD * values
    return needed > memory_of(options)


def memory_of(options: Streamed) -> int:
    """The bytes that a command may hold: half of the machine's memory unless given."""
    if not options.memory:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", options.memory.strip().lower())
    if found is None or found[2] not in UNITS:
        raise UsageError(f"the memory {options.memory!r} cannot be read; write for example 3GB or 500MB")
    return int(float(found[1]) * UNITS[found[2]])


@contextmanager
def job_of(options: Streamed, paths: Sequence[Path], out: Path, *, source: int, console: Console) -> Iterator[Job]:
    """Open and check everything, and make the plans, before anything is written.

    Args:
        options: Of the command.
        paths: The checkpoints, first the one that stays.
        out: The output.
        source: Number of the checkpoint whose layout the output takes over.
        console: For what is going on.
    """
    _require_weights(options)
    with ExitStack() as stack:
        checkpoints = tuple(stack.enter_context(Checkpoint.open(path)) for path in paths)
        require_alike(checkpoints)
        symmetry = _symmetry_of(options, checkpoints[0], console)
        for checkpoint in checkpoints:
            symmetry.require_ones({name: checkpoint.read(name) for name in symmetry.ones if name in checkpoint.stored})
        method = rg.WeightMatching(scales=options.scales)
        is_balanced = method.scales == "balance" and any(group.scales for group in symmetry.groups)
        plans = []
        for checkpoint in checkpoints[1:]:
            first = checkpoints[0].stored
            dtypes = {name: (first[name].dtype, entry.dtype) for name, entry in checkpoint.stored.items()}
            plans.append(make_plan(symmetry, dtypes, memory=memory_of(options), is_balanced=is_balanced))
        shards = layout(checkpoints[source])
        if out.suffix == SUFFIX:
            shards = joined(shards, out.name)
        elif len(shards) == 1:
            shards = joined(shards, "model.safetensors")
        yield Job(checkpoints, symmetry, tuple(plans), tuple(shards), checkpoints[source], method)


def show_plan(job: Job, out: Path) -> None:
    """Print what will be read, held and written."""
    console, plan = Console(soft_wrap=True), max(job.plans, key=lambda plan: plan.peak)
    table = Table("working sets", "tensors", "values", "groups chosen", box=None, pad_edge=False, title_justify="left")
    alike: dict[tuple[Any, ...], list[str]] = {}
    for one in plan.sets:
        values = sum(plan.sizes.numel(name) for name in one.names)
        alike.setdefault((len(one.names), values, len(one.roots), len(one.signs)), []).append(one.names[0])
    for (tensors, values, groups, signs), names in alike.items():
        label = f"{len(names)} like that of {names[0]}" if len(names) > 1 else f"that of {names[0]}"
        chosen = f"{groups}" + (f", signs of {signs} spread" if signs else "")
        table.add_row(label, str(tensors), f"{values:,}", chosen)
    console.print(table)
    spread = ", ".join(f"{name} ({job.symmetry[name].size})" for name in plan.spread)
    print(f"\ngroups chosen after each sweep: {spread or 'none, everything fits'}")
    if plan.loose:
        print(f"read in pieces: {', '.join(plan.loose[:4])}{' ...' if len(plan.loose) > 4 else ''}")
    print(f"read in each sweep: {size(plan.sweep_bytes)}")
    print(f"memory held at once, above the interpreter: at most {size(plan.peak)}")
    written = sum(shard.nbytes for shard in job.shards)
    print(f"written: {len(job.shards)} file{'s' * (len(job.shards) > 1)} of {size(written)} in all: {out}")


def staging_of(options: Streamed, job: Job, out: Path, settings: dict[str, Any]) -> Staging:
    """The folder in which the output is made; a run goes on only from the same inputs and settings."""
    files = {
        str(file.resolve()): [file.stat().st_size, file.stat().st_mtime_ns]
        for checkpoint in job.checkpoints
        for file in checkpoint.metadata
    }
    inputs = {"files": files, "symmetry": job.symmetry.to_json(), "method": repr(job.method), **settings}
    return Staging(out, inputs, resume=options.resume, overwrite=options.overwrite)


def matched(job: Job, staging: Staging, k: int, progress: Progress) -> tuple[Element, dict[str, Any]]:
    """The element that moves checkpoint k, and the numbers of its alignment; what an earlier run found is used."""
    found, numbers = staging.folder / f"{k}.alignment.safetensors", staging.folder / f"{k}.json"
    if found.exists() and numbers.exists():
        return load_alignment(found).element, json.loads(numbers.read_text(encoding="utf-8"))
    names = [group.name for group in job.symmetry.groups]
    kept = staging.progress.with_name(f"{k}.{staging.progress.name}")
    result = align_streamed(
        job.checkpoints[0],
        job.checkpoints[k],
        job.plans[k - 1],
        job.method,
        state=load_state(kept, names) if kept.exists() else None,
        keep=lambda state: save_state(state, kept),
        progress=progress,
    )
    report = {key: getattr(result, key) for key in ("initial", "objective", "history", "is_converged")}
    report["timings"] = [asdict(timing) for timing in result.timings]
    numbers.write_text(json.dumps(report), encoding="utf-8")
    save_alignment(Alignment(job.symmetry, result.element), found, overwrite=True)
    return result.element, report


def write(job: Job, staging: Staging, pieces: Pieces) -> None:
    """Write what is not there yet and put the output in its place, with the files that lay beside the weights."""
    kept = staging.write(job.shards, pieces)
    if kept:
        print(f"kept from the interrupted run: {', '.join(kept)}")
    path = job.source.path
    is_sharded = path.name.endswith(".index.json") and len(job.shards) > 1
    extras = []
    if staging.out.suffix != SUFFIX and (path.parent / "config.json").is_file():
        extras = [
            file
            for file in sorted(path.parent.iterdir())
            if file.is_file() and not file.name.endswith(WEIGHT_FILES) and not file.name.startswith(".")
        ]
    staging.publish(job.shards, index=path.name if is_sharded else None, extras=extras)


def size(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


def report_lines(label: str, report: dict[str, Any]) -> list[str]:
    """What an alignment gained, and how fast it read."""
    lines = [
        f"{label}: objective {report['initial']:.6g} -> {report['objective']:.6g} in {len(report['history'])} sweeps"
        + ("" if report["is_converged"] else "; it was still moving when it stopped")
    ]
    for timing in report["timings"]:
        if timing["nbytes"]:
            speed = timing["nbytes"] / max(timing["read_seconds"], 1e-9)
            lines.append(
                f"  {timing['label']}: {timing['seconds']:.1f} s ({timing['cpu_seconds']:.1f} s of processor time), of "
                f"which {timing['read_seconds']:.2f} s reading {size(timing['nbytes'])} ({size(speed)}/s)"
            )
    return lines


def _symmetry_of(options: Streamed, first: Checkpoint, console: Console) -> rg.Symmetry:
    params, name = first.on_meta(), model_of(options, first)
    if options.symmetry is not None:
        return symmetry_file(options.symmetry).bind(params)
    if name is None:
        raise UsageError("the symmetry is unknown: name the model with --model, or give --symmetry FILE.json")
    with console.status("tracing the model"):
        built = load_model(name, options.inputs, values="never")
        match(params, built.module.state_dict(), first.label)
        return find(built, options.inputs).bind(params)


def _require_weights(options: Streamed) -> None:
    """Refuse what needs the networks in memory."""
    if options.method not in ("auto", "weights"):
        raise UsageError(
            f"--method {options.method} needs the networks in memory; streaming matches weights only: leave --method "
            "out, or allow more --memory and write to a .safetensors file"
        )
    for is_given, name in ((options.data is not None, "--data"), (options.refine, "--refine")):
        if is_given:
            raise UsageError(f"{name} runs the model and needs it in memory; leave it out, or allow more --memory")
    if options.restarts:
        raise UsageError("--restarts needs the networks in memory; leave it out, or allow more --memory")


def require_output(options: Streamed, out: Path) -> None:
    """Refuse an output that cannot be written; a dry run writes none."""
    if not options.dry_run:
        require_place(out, overwrite=options.overwrite)
