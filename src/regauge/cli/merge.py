"""`regauge merge`: one checkpoint out of many, and a model card with the numbers beside it."""

import torch

import regauge as rg
from regauge.alignment import Method
from regauge.alignment.streamed.job import plan_job
from regauge.cli.options import Merge, UsageError
from regauge.cli.streaming import configure, method_of, read_job, show_plan, show_work
from regauge.cli.tasks import matching_task
from regauge.merging.merge_record import card_path
from regauge.merging.rules import Rule
from regauge.merging.streamed import merge_job

NEED_BASE = ("task-arithmetic", "ties", "dare", "dare-ties")


def run(options: Merge) -> None:
    """Write the merged checkpoint and its card, and print the card."""
    if not options.checkpoints:
        raise UsageError("there is nothing to merge: name the checkpoints")
    rule = rule_of(options)
    bases = [] if options.base is None else [options.base]
    job, found = read_job(options, [*bases, *options.checkpoints], source=0, beside=card_path)
    is_streamed = options.dry_run or job.is_streamed
    method, task = _method(options, is_streamed=is_streamed), matching_task(options, found)
    streamed = plan_job(job, found.symmetry, method, task) if is_streamed else None
    if streamed is not None:
        show_plan(streamed)
    if options.dry_run:
        return
    weights = options.weights or None
    with show_work("aligning and merging", is_streamed=is_streamed) as progress:
        if streamed is not None:
            result = merge_job(streamed, rule=rule, weights=weights, has_base=bool(bases), progress=progress)
        else:
            result = rg.merge(
                found.checkpoints[len(bases) :],
                found.symmetry,
                method=method,
                weights=weights,
                rule=rule,
                base=found.checkpoints[0] if bases else None,
                task=task,
                generator=torch.Generator().manual_seed(options.seed),
                out=job.out,
                memory=job.limit,
                overwrite=job.overwrite,
                provenance=job.provenance,
            )
    for report in result.record.reports:
        print(report)
    print(result.record.card)
    print(f"written: {options.output} and {card_path(options.output).name}")


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
            return rg.merging.Average()
        case "greedy":
            return rg.merging.GreedySoup()
        case "task-arithmetic":
            return rg.merging.TaskArithmetic(options.scale)
        case "ties":
            return rg.merging.Ties(0.2 if options.density is None else options.density, options.scale)
        case "dare":
            return rg.merging.Dare(options.drop, rg.merging.TaskArithmetic(options.scale))
        case "dare-ties":
            return rg.merging.Dare(
                options.drop, rg.merging.Ties(1.0 if options.density is None else options.density, options.scale)
            )


def _method(options: Merge, *, is_streamed: bool) -> Method:
    """Weights of many networks at once, or of each against the first one, unless another method is asked for."""
    chosen = method_of(options)
    if options.method != "auto" or options.refine:
        return chosen
    if options.base is None and not is_streamed:
        return configure(rg.MergeMany(), options)
    return configure(rg.WeightMatching(), options)
