"""`regauge prune`: a checkpoint without units that it does not need, and without a share of the others."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import regauge as rg
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.job import FileJob
from regauge.checkpoints.memory_limit import size_text
from regauge.checkpoints.writing import SUFFIX, path_beside, save_text
from regauge.cli.checkpoint_jobs import open_checkpoints
from regauge.cli.models import find_model, read_networks
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_notes, tell_table, tell_written
from regauge.cli.prune_options import Prune
from regauge.core.params import Params
from regauge.hub import Model, Networks, dtype_of, example_task, open_task
from regauge.names import VERSION
from regauge.pruning import Criterion, Magnitude, OutputError, Pruned, RandomUnits, Taylor
from regauge.pruning.prune_network import WITHOUT_DATA
from regauge.pruning.pruned_configuration import CONFIG, PrunedConfigs
from regauge.report.prune_page import prune_page

BESIDE = ".prune.json"
CRITERIA: dict[str, type[Criterion]] = {
    "magnitude": Magnitude,
    "taylor": Taylor,
    "output": OutputError,
    "random": RandomUnits,
}
HELD = 6
"""Copies in float64 that pruning holds."""
FORMAT, FORMAT_VERSION = "regauge.prune", 1


def prune_path(checkpoint: Path) -> Path:
    """The path of the report of a pruned checkpoint: next to a file, or inside a folder."""
    return path_beside(checkpoint, BESIDE)


def run(options: Prune) -> None:
    """Prune, write the smaller checkpoint, and say what was removed."""
    if options.criterion is None:
        options = replace(options, criterion="magnitude" if options.data is None else "output")
    assert options.criterion is not None
    criterion = CRITERIA[options.criterion]()
    if not 0 <= options.share < 1:
        raise UsageError(f"--share is {options.share}; it is from 0 to below 1: some unit must stay")
    if criterion.needs_task and options.data is None:
        raise UsageError(f"the criterion {options.criterion!r} runs the network: give --data, or choose another one")
    if options.test is not None and options.data is None:
        raise UsageError("--test judges what --data chose: give --data, too")
    job = open_checkpoints(options, [options.checkpoint], prune_path)
    _require_memory(job)
    model = find_model(options.model, job.source, options.inputs, values="always")
    if model is None:
        raise UsageError("pruning runs the model: name it with --model")
    found, task, test = _read(options, model, job)
    configs = _configs(options, model, found)
    params = found.checkpoints[0].params
    shares = dict.fromkeys(options.groups, options.share) if options.groups else options.share
    unknown = [one for one in options.groups if one not in {group.name for group in found.symmetry.groups}]
    if unknown:
        raise UsageError(f"there is no group {unknown[0]!r}; `regauge discover {model.name}` lists them")
    sets = []
    if configs is not None:
        with show_status(f"finding the numbers of {CONFIG}"):
            sets = configs.sets()
    with show_status("pruning"):
        try:
            result = rg.prune(
                params,
                found.symmetry,
                share=shares,
                criterion=criterion,
                task=task,
                test=test,
                generator=torch.Generator().manual_seed(options.seed),
                alike=sets,
                build=None if configs is None else configs.build,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
    assert result.certificate is not None
    if not result.certificate.ok:
        raise UsageError(f"{result.certificate}; nothing was written: please report this model")
    files: dict[str, bytes | None] = {}
    if configs is not None and configs.found is not None and configs.changes():
        files = {CONFIG: configs.text().encode()}
    changes = {} if configs is None else configs.changes()
    job = replace(job, checkpoints=(_resized(found.checkpoints[0], result.params).replacing(files),))
    facts = _facts(options, params, result, changes)

    def save_beside(path: Path) -> None:
        save_text(json.dumps(facts, indent=1, allow_nan=False), path)
        save_text(prune_page(path), path.with_suffix(".html"))

    with show_progress(is_counted=False) as progress:
        job.write(job.source.params, save_beside, progress)
    _tell(options.output, facts, result)


def _read(options: Prune, model: Model, job: FileJob) -> tuple[Networks, rg.Task, rg.Task | None]:
    """The checkpoint under the names of its model with their symmetry, and tasks that choose and judge."""
    with show_status("tracing the model"):
        kwargs = model.trace().kwargs
    found = read_networks(options, job.checkpoints, model=model)
    dtype = dtype_of(found.checkpoints[0].params)
    model.module.to(dtype)
    if options.data is None:
        return found, example_task(model, kwargs or {}, options.inputs.outputs), None
    ways: Any = {"loss": options.loss, "batch": options.batch, "outputs": options.inputs.outputs, "dtype": dtype}
    test = None if options.test is None else open_task(model, options.test, **ways)
    return found, open_task(model, options.data, **ways), test


def _configs(options: Prune, model: Model, found: Networks) -> PrunedConfigs | None:
    """The finder of the widths in a folder's configuration; None for models without a folder."""
    folder = Path(model.name)
    if not (folder / CONFIG).is_file():
        return None
    if options.output.suffix == SUFFIX:
        raise UsageError(f"the smaller model needs another {CONFIG}, so that the output must be a folder")
    return PrunedConfigs(model.module, folder, found.symmetry)


def _require_memory(job: FileJob) -> None:
    values = sum(one.nbytes // one.dtype.itemsize for one in job.source.stored.values())
    needed = job.source.nbytes + 8 * HELD * values
    if needed > job.limit.nbytes:
        raise UsageError(
            f"pruning holds the values in memory in float64, which takes {size_text(needed)}, more than the "
            f"{size_text(job.limit.nbytes)} that are allowed: allow more --memory"
        )


def _resized(checkpoint: Checkpoint, params: Params) -> Checkpoint:
    """A checkpoint with the tensors of the smaller network, under the names of the model."""
    first = next(iter(checkpoint.stored.values()))
    result = Checkpoint(checkpoint.label, checkpoint.path, {}, checkpoint.metadata)
    result._take_over(checkpoint)
    seen: set[int] = set()
    stored = {}
    for name, tensor in params.items():
        known = checkpoint.stored.get(name)
        if known is None and (id(tensor) in seen or name not in checkpoint.params):
            continue
        seen.add(id(tensor))
        spec = first if known is None else known
        dtype = spec.dtype if known is not None else tensor.dtype
        nbytes = tensor.numel() * dtype.itemsize
        stored[name] = spec._replace(name=name, dtype=dtype, shape=tuple(tensor.shape), nbytes=nbytes)
    result.stored = stored
    return result.with_params(params)


def _facts(options: Prune, params: Params, result: Pruned, changes: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    assert result.certificate is not None
    values = {id(t): t.numel() for t in params.values() if t.is_floating_point()}
    by_reason: dict[str, list[str]] = {}
    for one in result.exact:
        by_reason.setdefault(one.why, []).append(str(one))
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "regauge": VERSION,
        "checkpoint": str(options.checkpoint),
        "criterion": options.criterion,
        "share": options.share,
        "seed": options.seed,
        "values": {"before": sum(values.values()), "after": result.values},
        "certificate": {"ok": result.certificate.ok} | asdict(result.certificate),
        "groups": [{"group": name, "before": old, "after": new} for name, (old, new) in result.sizes.items()],
        "exact": by_reason,
        "losses": dict(result.losses) if options.data is not None else {},
        "data": list(result.data or ()) if options.data is not None else [],
        "config": {key: {"before": old, "after": new} for key, (old, new) in changes.items()},
        "fixed": [{"name": name, "reason": why} for name, why in result.fixed],
        "kept": {name: units.tolist() for name, units in result.kept.items()},
    }


def _tell(out: Path, facts: dict[str, Any], result: Pruned) -> None:
    tell(result.certificate, certificate=facts["certificate"])
    before, after = facts["values"]["before"], facts["values"]["after"]
    tell(f"{before:,} values -> {after:,} ({100 * after / before:.1f}%)", values=facts["values"])
    for why, names in facts["exact"].items():
        tell(f"{len(names)} {why}: removed, and the function stays", exact={why: names})
    cut = [row for row in facts["groups"] if row["after"] < row["before"]]
    if cut:
        tell_table("groups", cut, "units of the groups that were cut")
    if facts["losses"]:
        rows = [{"": when, **metrics} for when, metrics in facts["losses"].items()]
        tell_table("losses", rows)
        chosen, judged = facts["data"]
        tell(f"chosen by {chosen}; judged by {judged}", data=facts["data"])
    for key, change in facts["config"].items():
        tell(f"{CONFIG}: {key} {change['before']} -> {change['after']}", config={key: change})
    notes = [WITHOUT_DATA] if not facts["losses"] and facts["share"] else []
    tell_notes([*result.notes, *notes, *result.describe_fixed()])
    tell_written(out, prune_path(out), prune_path(out).with_suffix(".html"))
