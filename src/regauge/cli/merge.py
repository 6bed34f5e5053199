"""`regauge merge`: one checkpoint out of many, and a model card with the numbers beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import regauge as rg
from regauge.alignment import Method
from regauge.alignment.streamed.job import plan_job
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.cli.assemble import Request, assemble
from regauge.cli.options import Merge, UsageError
from regauge.cli.provenance import provenance_of
from regauge.cli.recipe import run_recipe
from regauge.cli.streaming import configure, method_of, read_job, show_memory, show_plan, show_work, tell_merged
from regauge.cli.tasks import matching_tasks
from regauge.hub.tokens import Vocabulary
from regauge.hub.vocabulary import read_choice
from regauge.merging.assembly import Part
from regauge.merging.merge_record import card_path
from regauge.merging.recipes.plan_parts import plan_rule
from regauge.merging.rule import Rule, draw_seed, require_networks
from regauge.merging.settings import Number, read_number, read_numbers
from regauge.merging.streamed import merge_job, plan_blend
from regauge.merging.table import RULES


def run(options: Merge) -> None:
    """Write the merged checkpoint and its card, and print the card."""
    if options.recipe is not None:
        return run_recipe(options)
    if not options.checkpoints:
        raise UsageError("there is nothing to merge: name the checkpoints, or a recipe with --recipe")
    rule = rule_of(options)
    bases = [] if options.base is None else [options.base]
    if options.tokenizer is not None:
        return _unite(options, rule, (*bases, *options.checkpoints))
    job, found, _ = read_job(options, [*bases, *options.checkpoints], source=0, beside=card_path)
    method, (task, test) = _method(options, is_streamed=job.is_streamed), matching_tasks(options, found)
    weights: list[Number] | None = [read_number(text) for text in options.weights] or None
    generator, streamed = torch.Generator().manual_seed(options.seed), None
    if job.is_streamed:
        streamed = plan_job(job, found.symmetry, method, task)
        streamed, _ = plan_blend(streamed, rule=rule, weights=weights, has_base=bool(bases))
        show_plan(streamed)
    elif options.dry_run:
        show_memory(job)
    if options.dry_run:
        return
    with show_work("aligning and merging", is_streamed=job.is_streamed) as progress:
        if streamed is not None:
            result = merge_job(
                streamed,
                rule=rule,
                weights=weights,
                has_base=bool(bases),
                seed=draw_seed(rule, generator),
                progress=progress,
            )
        else:
            result = rg.merge(
                found.checkpoints[len(bases) :],
                found.symmetry,
                method=method,
                weights=weights,
                rule=rule,
                base=found.checkpoints[0] if bases else None,
                task=task,
                test=test,
                generator=generator,
                out=job.output,
                memory=job.limit,
            )
    tell_merged(result.record, options.output)


def _unite(options: Merge, rule: Rule, folders: tuple[Path, ...]) -> None:
    """Merge folders with different tokens."""
    if rule.needs_task:
        raise UsageError(f"--tokenizer is for rules that look at no data; {options.rule} does")
    weights: list[Number] | None = [read_number(text) for text in options.weights] or None
    assert options.tokenizer is not None
    vocabulary = Vocabulary(read_choice(options.tokenizer, folders))

    def plan(
        networks: Sequence[Checkpoint], order: Sequence[str], statistics: frozenset[str], keys: Mapping[str, str]
    ) -> dict[str, Part]:
        has_base = options.base is not None
        return plan_rule(rule, weights, networks, has_base=has_base, statistics=statistics, keys=keys)

    assemble(
        options,
        Request(folders, options.base is not None, plan, str(rule), provenance_of(options), vocabulary=vocabulary),
    )


def rule_of(options: Merge) -> Rule:
    """The rule that the options ask for."""
    row = RULES[options.rule]
    given: dict[str, Any] = {
        name: read_numbers(texts)
        for name in ("density", "drop", "epsilon", "gamma")
        if (texts := getattr(options, name))
    }
    given |= {name: read_number(text) for name in ("scale", "reach") if (text := getattr(options, name))}
    unused = [name for name in given if name not in row.settings]
    if options.normalize != "auto":
        given["is_normalized"] = options.normalize == "yes"
        unused += ["normalize"] * ("is_normalized" not in row.settings)
    if unused:
        able = [
            name
            for name, other in RULES.items()
            if {"normalize": "is_normalized"}.get(unused[0], unused[0]) in other.settings
        ]
        raise UsageError(f"--{unused[0]} is for --rule {', '.join(able)}; {options.rule} has no use for it")
    rule, has_base = row.build(**given), options.base is not None
    if rule.base == "needed" and not has_base:
        raise UsageError(f"--rule {options.rule} combines what the checkpoints differ by from a base: give --base")
    if rule.base == "none" and has_base:
        raise UsageError(f"--rule {options.rule} takes no --base; give it as one of the checkpoints, or leave it out")
    if rule.needs_task and options.data is None:
        raise UsageError(f"--rule {options.rule} chooses by the loss, which needs data: give --data")
    if len(options.checkpoints) == 1 < rule.least:
        raise UsageError(
            f"there is only one checkpoint, and --rule {options.rule} combines several: name more of them, or give "
            "what it was trained from as --base with a rule for task vectors, such as task-arithmetic"
        )
    require_networks(rule, len(options.checkpoints), has_base=has_base)
    return rule


def _method(options: Merge, *, is_streamed: bool) -> Method:
    """By data where there are any, else weights of many networks at once, or of each against the first one."""
    chosen = method_of(options)
    if options.method != "auto" or options.data is not None:
        return chosen
    if options.base is None and not is_streamed:
        return configure(rg.alignment.MergeMany(), options)
    return configure(rg.WeightMatching(), options)
