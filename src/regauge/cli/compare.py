"""`regauge compare`: decide whether two checkpoints are the same network, ancestor and descendant, or unrelated."""

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
from regauge.comparison import Database, TensorMap, compare_files, find_checkpoints, open_relatives
from regauge.comparison.comparison_report import require_page
from regauge.comparison.conversion.find_tensor_map import find_layout
from regauge.hub import read_symmetry


def run(options: Compare) -> None:
    """Compare checkpoints and print the verdict, or search a database, or add checkpoints to it."""
    out = None if options.output is None else rg.Output(options.output, options.overwrite)
    require_page(out)
    paths = find_checkpoints(options.checkpoints)
    if options.add and options.database is None:
        raise UsageError("--add needs --database FILE, to which the checkpoints are added")
    if options.database is None and len(paths) < 2:
        raise UsageError(f"{len(paths)} checkpoints are given, but a comparison needs two or more; name another one")
    settings: dict[str, Any] = {
        "model": options.model,
        "symmetry": None if options.symmetry is None else read_symmetry(options.symmetry),
        "tracing": vars(options.inputs),
        "memory": options.memory or None,
    }
    if options.database is not None:
        _ask(options, paths, settings, Database(options.database))
    else:
        (_compare_many if len(paths) > 2 else _compare_two)(options, paths, settings, out)
    if options.output is not None:
        tell_written(options.output)


def _compare_two(options: Compare, paths: Sequence[Path], settings: Mapping[str, Any], out: rg.Output | None) -> None:
    """Compare two networks, including their outputs if data are given, or compare two implementations of a network."""
    with show_progress() as bars:
        layout = find_layout(*paths, progress=bars)
    if layout is not None and layout.is_layout:
        return _tell_layout(layout, out)
    try:
        with show_status("building and tracing the model, and reading the checkpoints"):
            opened = open_relatives(paths, **settings, data=options.data is not None)
    except (KeyError, ValueError):
        if layout is None or not layout.is_telling:
            raise
        return _tell_layout(layout, out)
    tell_notes(opened.networks.notes)
    choosing, task = matching_tasks(options, opened.networks, is_matched=False)
    ways: dict[str, Any] = {"draws": options.draws, "exact": options.exact, "out": out}
    ways["generator"] = torch.Generator().manual_seed(options.seed)
    with show_work("comparing", is_streamed=opened.is_streamed) as progress:
        found = opened.compare(*opened.networks.checkpoints, task=task, progress=progress, **ways)
    facts = found.facts
    tell(f"{found.verdict}: {found.reason}", verdict=found.verdict, reason=found.reason)
    tell_table("numbers", [{"": name, "value": value} for name, value in facts["numbers"].items()], digits=6)
    tell_table("layers", found.layers, "\nshare of A that B explains, before and after alignment")
    tell("", **{name: facts[name] for name in ("tested_groups", "draws", "is_sampled", "tensors")})
    tell_notes((*found.notes, *filter(None, [opened.note, _statistics(choosing, task)])))


def _tell_layout(found: TensorMap, out: rg.Output | None) -> None:
    found.write_page(out)
    tell(f"{found.verdict}: {found}", **found.facts)
    tell_table("tensors", found.rows, digits=2)
    tell_notes(found.notes)


def _statistics(choosing: rg.Task | None, task: rg.Task | None) -> str:
    """Return a sentence that names the data from which batch normalization statistics were recomputed, or ""."""
    if choosing is None or task is None or task.prepare is None:
        return ""
    networks = "losses and barriers were measured after recomputing the statistics of batch normalization from"
    return f"{networks} {choosing.name}, in all networks; the data for measuring were {task.name}"


def _compare_many(options: Compare, paths: Sequence[Path], settings: Mapping[str, Any], out: rg.Output | None) -> None:
    """Compare all networks of each architecture with one another, and list networks that have no counterpart."""
    if options.data is not None:
        raise UsageError("--data is for two checkpoints; leave it out, or compare two")
    chance = torch.Generator().manual_seed(options.seed)
    with show_progress() as progress:
        found = compare_files(paths, **settings, draws=options.draws, generator=chance, out=out, progress=progress)
    facts = found.facts
    tell_notes((*found.notes, *(f"not compared: {sentence(failure)}" for failure in found.failures)))
    tell_table("pairs", facts["pairs"])
    tell(f"\n{found}", **{name: facts[name] for name in ("unrelated", "left_out", "families", "averages", "trees")})


def _ask(options: Compare, paths: Sequence[Path], settings: Mapping[str, Any], database: Database) -> None:
    """Add networks to a database, or compare them with their nearest networks in the database."""
    if options.data is not None or options.output is not None:
        raise UsageError("--database excludes --data and -o; to use these, compare the pair of interest")
    if options.add:
        with show_progress() as progress:
            failures = database.add(paths, **settings, progress=progress)
        tell_notes([sentence(failure) for failure in failures])
        tell(f"{len(database)} networks are in {database.path}", networks=len(database))
        return
    ways: dict[str, Any] = {"draws": options.draws, "exact": options.exact, "memory": settings["memory"]}
    with show_progress() as progress:
        for path in paths:
            chance = torch.Generator().manual_seed(options.seed)
            found = database.search(path, options.nearest, **ways, generator=chance, progress=progress)
            tell_table("nearest", [{"checkpoint": str(path), **row} for row in found.rows], digits=4)
            tell_notes(found.notes)
