"""`regauge compare`: are checkpoints the same network, one the other's descendant, or neither?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import regauge as rg
from regauge.cli.compare_options import Compare
from regauge.cli.main import sentence
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_notes, tell_table, tell_written
from regauge.cli.streaming import show_work
from regauge.cli.tasks import matching_tasks
from regauge.comparison import compare_files, find_checkpoints, open_relatives, tree_lines
from regauge.comparison.comparison_report import require_page
from regauge.hub import read_symmetry


def run(options: Compare) -> None:
    """Print the verdict with the evidence, and write the page."""
    out = None if options.output is None else rg.Output(options.output, options.overwrite)
    require_page(out)
    paths = find_checkpoints(options.checkpoints)
    if len(paths) < 2:
        raise UsageError(f"{len(paths)} checkpoints are given; two or more are compared")
    settings: dict[str, Any] = {
        "model": options.model,
        "symmetry": None if options.symmetry is None else read_symmetry(options.symmetry),
        "tracing": vars(options.inputs),
        "memory": options.memory or None,
    }
    (_compare_many if len(paths) > 2 else _compare_two)(options, paths, settings, out)
    if options.output is not None:
        tell_written(options.output)


def _compare_two(options: Compare, paths: Sequence[Path], settings: Mapping[str, Any], out: rg.Output | None) -> None:
    """Compare two networks, with their outputs on data if there are any."""
    with show_status("building and tracing the model, and reading the checkpoints"):
        opened = open_relatives(paths, **settings, data=options.data is not None)
    tell_notes(opened.networks.notes)
    choosing, task = matching_tasks(options, opened.networks, is_matched=False)
    with show_work("comparing", is_streamed=opened.is_streamed) as progress:
        a, b = opened.networks.checkpoints
        chance = torch.Generator().manual_seed(options.seed)
        ways: dict[str, Any] = {"draws": options.draws, "exact": options.exact, "generator": chance}
        found = opened.compare(a, b, task=task, out=out, progress=progress, **ways)
    facts = found.facts
    tell(f"{found.verdict}: {found.reason}", verdict=found.verdict, reason=found.reason)
    tell_table("numbers", [{"": name, "value": value} for name, value in facts["numbers"].items()], digits=6)
    tell_table("layers", found.layers, "\nshare of A that B explains, as stored and after alignment")
    tell("", **{name: facts[name] for name in ("tested_groups", "draws", "is_sampled", "tensors")})
    tell_notes((*found.notes, *filter(None, [opened.note, _statistics(choosing, task)])))


def _statistics(choosing: rg.Task | None, task: rg.Task | None) -> str:
    """A sentence on the data that gave the statistics of batch normalization; empty if none were recomputed."""
    if choosing is None or task is None or task.prepare is None:
        return ""
    return (
        "losses and barriers are those of networks whose statistics of batch normalization were recomputed from "
        f"{choosing.name}, the ends too; judged by {task.name}"
    )


def _compare_many(options: Compare, paths: Sequence[Path], settings: Mapping[str, Any], out: rg.Output | None) -> None:
    """Compare networks of one architecture with one another, and say which have another one."""
    if options.data is not None:
        raise UsageError("--data is for two checkpoints; compare the pair of interest with it")
    chance = torch.Generator().manual_seed(options.seed)
    with show_progress() as progress:
        found = compare_files(paths, **settings, draws=options.draws, generator=chance, out=out, progress=progress)
    facts = found.facts
    tell_notes(found.notes)
    tell_table("pairs", facts["pairs"])
    for lineage in found.lineages:
        for tree in lineage.trees:
            tell("\n" + "\n".join(tree_lines(list(tree))))
        for average in lineage.averages:
            tell(f"\n{average}")
    if found.unrelated:
        tell(f"\nunrelated to all others: {', '.join(found.unrelated)}", unrelated=found.unrelated)
    for failure in found.failures:
        tell(f"not compared: {sentence(failure)}")
    if found.left_out:
        names = ", ".join(found.left_out)
        tell(f"left out, because no other network that was compared has their tensors: {names}")
    tell("", **{name: facts[name] for name in ("left_out", "families", "averages", "trees")})
