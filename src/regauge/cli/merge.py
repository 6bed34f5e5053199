"""`regauge merge`: merge checkpoints into one, and write a model card next to the output."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import regauge as rg
from regauge.cli.align_options import Matching, Merge
from regauge.cli.checkpoint_jobs import output_of, provenance_of
from regauge.cli.options import UsageError
from regauge.cli.output import tell, tell_written
from regauge.cli.streaming import is_all_shown, method_of, notes_of, read_job, show_output, show_plan, show_work
from regauge.hub import open_model, read_symmetry
from regauge.merging import RULES, Rule
from regauge.merging.merge_record import card_path

SHARED = ("output", "recipe", *(one.name for one in fields(Matching)))
SAID = [one.name for one in fields(Merge) if one.name not in SHARED]
"""Options that a recipe replaces."""


def run(options: Merge) -> None:
    """Write the merged checkpoint and its card, and print the card."""
    if options.recipe is not None:
        return _merge_recipe(options, options.recipe)
    if not options.checkpoints or str(options.checkpoints[0]).endswith((".yaml", ".yml")):
        raise UsageError("no checkpoints are named; name them, or a recipe with --recipe")
    rule, bases = rule_of(options), [] if options.base is None else [options.base]
    weights = options.weights or None
    if _are_adapters(options):
        return _merge_adapters(options, rule, weights)
    if options.tokenizer is not None:
        return _merge_folders(options, rule, weights)
    job, found, _ = read_job(options, [*bases, *options.checkpoints], source=0)
    task, test = None, None
    if options.data is not None or options.test is not None:
        from regauge.cli.tasks import matching_tasks  # what runs models takes a while to import

        task, test = matching_tasks(options, found)
    method = method_of(options, rg.WeightMatching if bases or job.is_streamed else rg.alignment.MergeMany)
    job = method.planned(job, task) if options.dry_run else job
    ways: dict[str, Any] = {"method": method, "rule": rule, "weights": weights, "task": task, "rotate": options.rotate}
    if is_all_shown(options, job, lambda: rg.merging.plan_merge(job, found.symmetry, has_base=bool(bases), **ways)):
        return
    ways |= {"generator": torch.Generator().manual_seed(options.seed), "test": test, "out": job.output}
    base, networks = found.checkpoints[0] if bases else None, found.checkpoints[len(bases) :]
    with show_work("aligning and merging", is_streamed=job.is_streamed) as progress:
        result = rg.merge(networks, found.symmetry, base=base, memory=job.limit, progress=progress, **ways)
    _tell(result, options.output)


def _merge_recipe(options: Merge, recipe: Path) -> None:
    """Merge by a recipe."""
    blank = {one.name: one.default for one in fields(Merge)} | {"checkpoints": ()}
    given = [name for name in SAID if getattr(options, name) != blank[name]]
    if given:
        what = "checkpoints" if given[0] == "checkpoints" else f"--{given[0]}"
        raise UsageError(f"the recipe says what is merged and how; leave {what} out, or merge without --recipe")
    provenance = provenance_of(options)
    settings = {name: value for name, value in provenance.settings.items() if name.replace("-", "_") not in SAID}
    out = output_of(options, replace(provenance, settings=settings))
    make = rg.merging.plan_recipe if options.dry_run else rg.merging.merge_recipe
    _assemble(options, partial(make, recipe, out))


def _are_adapters(options: Merge) -> bool:
    return all((Path(one) / "adapter_config.json").is_file() for one in options.checkpoints)


def _merge_adapters(options: Merge, rule: Rule, weights: tuple[str, ...] | None) -> None:
    """Merge adapters without their base."""
    if options.base is not None or options.dry_run:
        raise UsageError("adapters are merged without a base: leave out --base and --dry-run, or name BASE+ADAPTER")
    out = output_of(options, provenance_of(options))
    ways = {"generator": _setting(options)["generator"], "rule": rule, "weights": weights}
    with show_work("merging", is_streamed=True) as progress:
        made = rg.merging.merge_adapters(options.checkpoints, out, progress=progress, **ways)
    tell(made)
    tell_written(made.path)


def _merge_folders(options: Merge, rule: Rule, weights: tuple[str, ...] | None) -> None:
    """Merge folders with different tokens."""
    if rule.needs_task:
        raise UsageError(f"--rule {options.rule} needs data, which --tokenizer excludes; choose another rule")
    ways: dict[str, Any] = {"tokenizer": options.tokenizer, "rule": rule, "weights": weights, "base": options.base}
    out = output_of(options, provenance_of(options))
    make = rg.merging.plan_folders if options.dry_run else rg.merging.merge_folders
    _assemble(options, partial(make, options.checkpoints, out, **ways))


def _assemble(options: Merge, make: Callable[..., Any]) -> None:
    """Merge tensor by tensor and print the record, or only print the plan."""
    with show_work("merging", is_streamed=True) as progress:
        made = make(**_setting(options), progress=progress)
    if not options.dry_run:
        return _tell(made, options.output)
    if made.alignment is not None:
        show_plan(made.alignment)
    show_output(made.shards, options.output)


def _setting(options: Merge) -> dict[str, Any]:
    """Return the options for merging tensor by tensor, as arguments of the library."""
    if options.data is not None or options.refine:
        raise UsageError("this merge goes tensor by tensor and cannot run models; leave --data and --refine out")
    if options.rotate == "always" or options.untie:
        raise UsageError("this merge goes tensor by tensor and cannot rotate networks; leave --rotate and --untie out")
    return {
        "model": None if options.model is None else open_model(options.model, **vars(options.inputs), values="never"),
        "symmetry": None if options.symmetry is None else read_symmetry(options.symmetry),
        "method": method_of(options),
        "generator": torch.Generator().manual_seed(options.seed),
        "memory": options.memory or None,
    }


def rule_of(options: Merge) -> Rule:
    """Return the rule that the options name."""
    row = RULES[options.rule]
    named = ("density", "drop", "epsilon", "gamma", "scale", "reach")
    given: dict[str, str | tuple[str, ...]] = {name: one for name in named if (one := getattr(options, name))}
    unused = [name for name in given if name not in row.settings]
    is_normalized = {} if options.normalize == "auto" else {"is_normalized": options.normalize == "yes"}
    unused += ["normalize"] * (bool(is_normalized) and "is_normalized" not in row.settings)
    if unused:
        setting = {"normalize": "is_normalized"}.get(unused[0], unused[0])
        able = ", ".join(name for name, other in RULES.items() if setting in other.settings)
        raise UsageError(f"--{unused[0]} is for --rule {able}; {options.rule} does not use it")
    rule, has_base = row.read(given, **is_normalized), options.base is not None
    if rule.base == "needed" and not has_base and not _are_adapters(options):
        raise UsageError(f"--rule {options.rule} combines differences from a base checkpoint: give --base")
    if rule.base == "none" and has_base:
        raise UsageError(f"--rule {options.rule} has no --base; name it as one of the checkpoints, or leave it out")
    if rule.needs_task and options.data is None:
        raise UsageError(f"--rule {options.rule} chooses networks by their loss, which needs --data")
    if len(options.checkpoints) == 1 < rule.least:
        raise UsageError(
            f"there is only one checkpoint, but --rule {options.rule} combines several: name more, or give the "
            "checkpoint before fine-tuning as --base with a rule for task vectors, such as task-arithmetic"
        )
    return rule


def _tell(made: rg.merging.MergeResult | rg.merging.AssembledMixture, out: Path) -> None:
    """Print the record and the files of a merge, or the experts of a mixture."""
    if not isinstance(made, rg.merging.MergeResult):
        tell(made)
        return tell_written(out)
    record = made.record
    for line in record.reports:
        tell(line, alignments=[line])
    tell(record, record=record, **notes_of(record))
    return tell_written(out, card_path(out))
