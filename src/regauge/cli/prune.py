"""`regauge prune`: remove units that a checkpoint does not need, and a share of the other units."""

import json
from pathlib import Path
from typing import Any

import torch

import regauge as rg
from regauge.cli.checkpoint_jobs import open_checkpoints, output_of
from regauge.cli.models import find_model, read_networks
from regauge.cli.options import UsageError
from regauge.cli.output import show_status, tell, tell_notes, tell_table, tell_written
from regauge.cli.prune_options import Prune
from regauge.hub import Model, Networks, dtype_of, example_task, open_task
from regauge.pruning import CRITERIA, prune_path
from regauge.pruning.pruned_configuration import CONFIG, PrunedConfigs
from regauge.report.prune_page import prune_page


def run(options: Prune) -> None:
    """Prune a checkpoint, write the smaller checkpoint, and report the removed units."""
    criterion = None if options.criterion is None else CRITERIA[options.criterion]()
    if not 0 <= options.share < 1:
        raise UsageError(f"--share is {options.share}, but must be at least 0 and below 1, as not all units can go")
    if criterion is not None and criterion.needs_task and options.data is None:
        raise UsageError(f"the criterion {options.criterion!r} needs data: give --data, or choose another criterion")
    if options.test is not None and options.data is None:
        raise UsageError("--test measures the result of a choice on --data: give --data, too")
    out = output_of(options, page=prune_page)
    job = open_checkpoints([options.checkpoint], out, memory=options.memory, work="pruning")
    job.require_memory()
    model = find_model(options.model, job.source, options.inputs, values="always")
    if model is None:
        raise UsageError("pruning needs a model that can be run: name it with --model")
    found, task, test = _read(options, model, job.source)
    unknown = [one for one in options.groups if one not in {group.name for group in found.symmetry.groups}]
    if unknown:
        raise UsageError(f"there is no group {unknown[0]!r}; `regauge discover {model.name}` lists them")
    configs = None
    if (Path(model.name) / CONFIG).is_file():
        if out.is_file:
            raise UsageError(f"the smaller model needs another {CONFIG}, so the output must be a folder; change -o")
        configs = PrunedConfigs(model.module, Path(model.name), found.symmetry)
    with show_status(f"finding the new sizes in {CONFIG}"):
        sets = [] if configs is None else configs.sets()
    with show_status("pruning"):
        result = rg.prune(
            found.checkpoints[0],
            found.symmetry,
            share=dict.fromkeys(options.groups, options.share) if options.groups else options.share,
            criterion=criterion,
            task=task,
            test=test,
            generator=torch.Generator().manual_seed(options.seed),
            alike=sets,
            build=configs,
            out=out,
            memory=job.limit,
        )
    facts = json.loads(prune_path(options.output).read_text(encoding="utf-8"))
    tell(result.certificate, certificate=facts["certificate"])
    _tell(facts)
    tell_notes([*result.notes, *result.describe_fixed()])
    tell_written(options.output, prune_path(options.output), prune_path(options.output).with_suffix(".html"))


def _read(options: Prune, model: Model, checkpoint: rg.Checkpoint) -> tuple[Networks, rg.Task, rg.Task | None]:
    """Return the checkpoint under its model's names, the task for choosing units, and the task for evaluation."""
    with show_status("tracing the model"):
        kwargs = model.trace().kwargs
    found = read_networks(options, [checkpoint], model=model)
    dtype = dtype_of(found.checkpoints[0].params)
    model.module.to(dtype)
    if options.data is None:
        return found, example_task(model, kwargs or {}, options.inputs.outputs), None
    ways: Any = {"loss": options.loss, "batch": options.batch, "outputs": options.inputs.outputs, "dtype": dtype}
    test = None if options.test is None else open_task(model, options.test, **ways)
    return found, open_task(model, options.data, **ways), test


def _tell(facts: dict[str, Any]) -> None:
    before, after = facts["values"]["before"], facts["values"]["after"]
    tell(f"{before:,} values -> {after:,} ({100 * after / before:.1f}%)", values=facts["values"])
    for why, names in facts["exact"].items():
        tell(f"{len(names)} {why} were removed without changing the function", exact={why: names})
    cut = [row for row in facts["groups"] if row["after"] < row["before"]]
    if cut:
        tell_table("groups", cut, "units of the groups that were cut")
    if facts["losses"]:
        tell_table("losses", [{"": when, **metrics} for when, metrics in facts["losses"].items()])
        chosen, judged = facts["data"]
        tell(f"units were chosen on {chosen}; losses were measured on {judged}", data=facts["data"])
    for key, change in facts["config"].items():
        tell(f"{CONFIG}: {key} {change['before']} -> {change['after']}", config={key: change})
