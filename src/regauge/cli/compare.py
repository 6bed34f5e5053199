"""`regauge compare`: are checkpoints the same network, one the other's descendant, or neither?"""

from collections.abc import Sequence
from pathlib import Path

import torch

import regauge as rg
from regauge.checkpoints.alignments import SUFFIX as ALIGNMENT
from regauge.checkpoints.formats.file_formats import weight_suffixes
from regauge.checkpoints.formats.location import locate
from regauge.checkpoints.writing import require_writable, save_text
from regauge.cli.compare_many import run_many
from regauge.cli.compare_options import Compare
from regauge.cli.compared import Opened
from regauge.cli.options import UsageError
from regauge.cli.output import tell, tell_notes, tell_table, tell_written
from regauge.cli.streaming import show_work
from regauge.names import VERSION


def run(options: Compare) -> None:
    """Print the verdict with the evidence, and write the page."""
    if options.output is not None:
        require_writable(options.output, overwrite=options.overwrite, suffixes=(".html",))
    paths = find_checkpoints(options.checkpoints)
    if len(paths) < 2:
        raise UsageError(f"{len(paths)} checkpoints are given; two or more are compared")
    if len(paths) > 2:
        run_many(options, paths)
        return
    a, b = paths
    opened = Opened.of(options, paths)
    with show_work("comparing", is_streamed=opened.is_streamed) as progress:
        first, second = opened.networks.checkpoints
        found = opened.compare(first, second, progress)
    facts = facts_of(found)
    tell(f"{found.verdict}: {found.reason}", verdict=found.verdict, reason=found.reason)
    numbers = {name: value for name, value in found.numbers.items() if value is not None}
    tell_table("numbers", [{"": name, "value": value} for name, value in numbers.items()], digits=6)
    tell_table("layers", found.layers, "\nshare of A that B explains, as stored and after alignment")
    tell("", **{name: facts[name] for name in ("tested_groups", "draws", "tensors")})
    tell_notes((*found.notes, *filter(None, [opened.note, opened.statistics])))
    if options.output is not None:
        from regauge.report.comparison_page import comparison_page

        page = comparison_page(facts | {"a": str(a), "b": str(b), "version": VERSION, "seed": options.seed})
        save_text(page, options.output)
        tell_written(options.output)


def find_checkpoints(paths: Sequence[Path]) -> list[Path]:
    """The checkpoints that are named; for a folder without one those in it, as files and as folders."""
    found: list[Path] = []
    for path in paths:
        inside = [] if not path.is_dir() or _is_checkpoint(path) else sorted(path.iterdir())
        if path.is_dir() and inside and not any(map(_is_checkpoint, inside)):
            raise UsageError(f"there is no checkpoint in the folder {str(path)!r}, nor in the folders in it")
        found += [one for one in inside if _is_checkpoint(one)] or [path]
    return found


def _is_checkpoint(path: Path) -> bool:
    """Whether a path is a folder with a checkpoint, or a file of weights."""
    if not path.is_dir():
        return path.suffix in weight_suffixes(is_read=True) and not path.name.endswith(ALIGNMENT)
    try:
        locate(path)
    except (OSError, ValueError):
        return False
    return True


def facts_of(found: rg.comparison.Comparison) -> dict[str, object]:
    """A comparison as plain values, for JSON and pages."""
    return {
        "verdict": found.verdict,
        "reason": found.reason,
        "numbers": {name: value for name, value in found.numbers.items() if value is not None},
        "layers": found.layers,
        "tensors": [
            {"tensor": one.name, "size": torch.Size(one.shape).numel(), "before": one.before, "after": one.after}
            for one in found.shares
        ],
        "tested_groups": list(found.tested_groups),
        "draws": found.draws,
        "notes": list(found.notes),
    }
