"""`regauge merge`: one checkpoint out of many, and a model card with the numbers beside it."""

from pathlib import Path

import torch
from rich.console import Console

import regauge as rg
from regauge.align import ManyMethod, Method
from regauge.checkpoints.writing import require_writable, save, save_text
from regauge.cli.errors import UsageError
from regauge.cli.matching import checkpoints_of, method_of, task_for
from regauge.cli.options import Merge
from regauge.merge.rules import Rule

NEED_BASE = ("task-arithmetic", "ties", "dare", "dare-ties")


def run(options: Merge) -> None:
    """Write the merged checkpoint and its card, and print the card."""
    console = Console(stderr=True)
    if not options.checkpoints:
        raise UsageError("there is nothing to merge: name the checkpoints")
    card = card_path(options.output)
    require_writable(options.output, overwrite=options.overwrite)
    require_writable(card, overwrite=options.overwrite, suffixes=(".md",))
    rule, method = rule_of(options), _method(options)
    paths = [*options.checkpoints, *([] if options.base is None else [options.base])]
    symmetry, module, networks = checkpoints_of(options, paths, console)
    base = None if options.base is None else networks.pop()
    task = task_for(options, module, networks[0])
    with console.status("aligning and merging"):
        result = rg.merged(
            networks,
            symmetry,
            method=method,
            weights=options.weights or None,
            rule=rule,
            base=base,
            task=task,
            generator=torch.Generator().manual_seed(options.seed),
            labels=[str(path) for path in paths],
        )
    params = result.params if task is None or task.prepare is None else task.prepare(result.params)
    save(params, options.output, overwrite=options.overwrite)
    save_text(result.record.card, card)
    print(result.record.card)
    print(f"written: {options.output} and {card.name}")


def card_path(checkpoint: Path) -> Path:
    """Where the card of a merged checkpoint is written: `out.safetensors` has `out.md` beside it."""
    return checkpoint.with_name(checkpoint.name.removesuffix(".safetensors") + ".md")


def rule_of(options: Merge) -> Rule:
    """The rule that the options ask for."""
    if options.rule in NEED_BASE and options.base is None:
        raise UsageError(f"--rule {options.rule} combines what the checkpoints differ by from a base: give --base")
    if options.rule not in NEED_BASE and options.base is not None:
        raise UsageError(f"--rule {options.rule} takes no --base; give it as one of the checkpoints, or leave it out")
    if options.rule == "greedy" and options.data is None:
        raise UsageError("--rule greedy chooses by the loss, which needs data: give --data")
    if options.density is not None and "ties" not in options.rule:
        raise UsageError(f"--density is for --rule ties and dare-ties; {options.rule} trims nothing")
    match options.rule:
        case "average":
            return rg.Average()
        case "greedy":
            return rg.GreedySoup()
        case "task-arithmetic":
            return rg.TaskArithmetic(options.scale)
        case "ties":
            return rg.Ties(0.2 if options.density is None else options.density, options.scale)
        case "dare":
            return rg.Dare(options.drop, rg.TaskArithmetic(options.scale))
        case "dare-ties":
            return rg.Dare(options.drop, rg.Ties(1.0 if options.density is None else options.density, options.scale))


def _method(options: Merge) -> ManyMethod | Method | None:
    """Weights of many networks at once, or of each against the base, unless another method is asked for."""
    chosen = method_of(options)
    if options.method != "auto" or options.refine:
        return chosen
    if options.base is None:
        return rg.MergeMany(inner=rg.WeightMatching(scales=options.scales), restarts=options.restarts)
    return rg.WeightMatching(restarts=options.restarts, scales=options.scales)
