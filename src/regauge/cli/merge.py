"""`regauge merge`: one checkpoint out of many, and a model card with the numbers beside it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import regauge as rg
from regauge.alignment import Method
from regauge.cli.errors import UsageError
from regauge.cli.matching import method_of, read_checkpoints, task_for
from regauge.cli.options import Merge
from regauge.cli.progress import show_progress
from regauge.cli.streaming import (
    is_streamed,
    job_of,
    matched,
    report_lines,
    require_output,
    show_plan,
    staging_of,
    write,
)
from regauge.core.element import Element
from regauge.core.markdown import markdown_table
from regauge.merging.rules import Rule
from regauge.merging.streamed import merged_pieces
from regauge.storage.checkpoints.writing import SUFFIX, require_writable, save_text

NEED_BASE = ("task-arithmetic", "ties", "dare", "dare-ties")


def run(options: Merge) -> None:
    """Write the merged checkpoint and its card, and print the card."""
    console = Console(stderr=True)
    if not options.checkpoints:
        raise UsageError("there is nothing to merge: name the checkpoints")
    bases = [] if options.base is None else [options.base]
    if is_streamed(options, [*options.checkpoints, *bases], options.output):
        _run_streamed(options, console)
        return
    card = card_path(options.output)
    require_writable(options.output, overwrite=options.overwrite)
    require_writable(card, overwrite=options.overwrite, suffixes=(".md",))
    rule, method = rule_of(options), _method(options)
    paths = [*options.checkpoints, *bases]
    symmetry, module, checkpoints = read_checkpoints(options, paths, console)
    networks = [checkpoint.params for checkpoint in checkpoints]
    base = None if options.base is None else networks.pop()
    task = task_for(options, module, networks[0], checkpoints[0])
    with console.status("aligning and merging"):
        result = rg.merge(
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
    like = checkpoints[0] if base is None else checkpoints[-1]
    like.with_params(result.params).write(options.output, overwrite=options.overwrite)
    save_text(result.record.card, card)
    print(result.record.card)
    print(f"written: {options.output} and {card.name}")


def _run_streamed(options: Merge, console: Console) -> None:
    """All checkpoints aligned to the first one or to the base, and combined entry by entry."""
    out, rule = options.output, rule_of(options)
    require_output(options, out)
    paths = [*([] if options.base is None else [options.base]), *options.checkpoints]
    with job_of(options, paths, out, source=0, console=console) as job:
        first, *others = job.checkpoints
        base = None if options.base is None else first
        networks = others if base is not None else [first, *others]
        stay: list[Element | None] = [] if base is not None else [None]
        weights = options.weights or None
        merged_pieces(networks, [None] * len(networks), job.symmetry, rule=rule, weights=weights, base=base)  # refuses
        if others:
            show_plan(job, out)
        if options.dry_run:
            return
        settings = {"command": "merge", "rule": str(rule), "weights": list(options.weights)}
        card = "regauge.md" if out.suffix != SUFFIX else card_path(out).name
        with staging_of(options, job, out, settings) as staging:
            elements, reports = list(stay), []
            with show_progress(console, is_counted=False) as progress:
                for k in range(1, len(job.checkpoints)):
                    element, report = matched(job, staging, k, progress)
                    elements.append(element)
                    reports.append(report)
            for path, report in zip(paths[1:], reports, strict=True):
                for line in report_lines(f"{path} to {paths[0]}", report):
                    print(line)
            save_text(_streamed_card(paths, rule, options, reports), staging.content / card)
            pieces = merged_pieces(networks, elements, job.symmetry, rule=rule, weights=weights, base=base)
            with console.status("writing"):
                write(job, staging, pieces)
    print(f"written: {out} and {card}")


def _streamed_card(paths: Sequence[Path], rule: Rule, options: Merge, reports: Sequence[dict[str, Any]]) -> str:
    """The card of a merge that streamed: what was aligned to what, and what that gained."""
    rows = [[str(paths[0]), "stays where it is", "", ""]]
    for path, report in zip(paths[1:], reports, strict=True):
        sweeps = str(len(report["history"]))
        rows.append([str(path), f"{report['initial']:.6g}", f"{report['objective']:.6g}", sweeps])
    weights = ", ".join(f"{w:g}" for w in options.weights) or "equal"
    lines = [
        "# Merged network",
        "",
        *markdown_table(
            ["what", "value"],
            [["rule", f"`{rule}`"], ["weights", weights], ["alignment", f"weights, scales {options.scales}, streamed"]],
        ),
        "",
        *markdown_table(["network", "objective before", "after", "sweeps"], rows),
    ]
    return "\n".join(lines) + "\n"


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


def _method(options: Merge) -> Method | None:
    """Weights of many networks at once, or of each against the base, unless another method is asked for."""
    chosen = method_of(options)
    if options.method != "auto" or options.refine:
        return chosen
    if options.base is None:
        return rg.MergeMany(inner=rg.WeightMatching(scales=options.scales), restarts=options.restarts)
    return rg.WeightMatching(restarts=options.restarts, scales=options.scales)
