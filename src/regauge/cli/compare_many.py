"""`regauge compare` of three checkpoints or more: all pairs, families of related ones, and their trees."""

from collections.abc import Sequence
from functools import partial
from os.path import commonpath
from pathlib import Path

import regauge as rg
from regauge.cli.compare_options import Compare
from regauge.cli.compared import Opened
from regauge.cli.main import sentence
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, tell, tell_table, tell_written
from regauge.comparison import Lineage, compare_many, tree_lines
from regauge.names import VERSION
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.writing import save_text

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def run_many(options: Compare, paths: Sequence[Path]) -> None:
    """Compare networks of one architecture with one another, and say which have another one."""
    if options.data is not None:
        raise UsageError("--data is for two checkpoints; compare the pair of interest with it")
    names = dict(zip(_short(paths), paths, strict=True))
    classes: dict[Shapes, list[str]] = {}
    for name, path in names.items():
        with Checkpoint.open(path) as one:
            classes.setdefault(tuple(sorted((n, t.shape) for n, t in one.stored.items())), []).append(name)
    alone = [own[0] for own in classes.values() if len(own) == 1]
    lineages, failures = [], list[Exception]()
    with show_progress() as progress:
        for own in (own for own in classes.values() if len(own) > 1):
            try:
                opened = Opened.of(options, [names[name] for name in own])
            except (UsageError, ValueError, KeyError) as error:  # Another model, or a damaged network among them.
                failures.append(error)
                alone += own
                continue
            lineages.append(compare_many(own, partial(_compare, opened, own), progress=progress))
    if not lineages and failures:
        raise failures[0]
    if not lineages:
        raise UsageError(f"no two of the {len(names)} checkpoints have tensors of the same names and shapes")
    facts = facts_of(lineages, alone)
    tell_table("pairs", facts["pairs"])  # type: ignore[arg-type]
    for lineage in lineages:
        for tree in lineage.trees:
            tell("\n" + "\n".join(tree_lines(list(tree))))
    strangers = [one for lineage in lineages for family in lineage.families if len(family) == 1 for one in family]
    if strangers:
        tell(f"\nunrelated to all others: {', '.join(strangers)}", unrelated=strangers)
    for failure in failures:
        tell(f"not compared: {sentence(failure)}")
    if alone:
        tell(f"left out, because no other network that was compared has their tensors: {', '.join(alone)}")
    tell("", left_out=alone)
    tell("", families=facts["families"], trees=facts["trees"])
    if options.output is not None:
        from regauge.report.comparison_page import lineage_page

        matrices = {f"{len(one.names)} networks": one.distances.numpy() for one in lineages}
        page = lineage_page(facts | {"version": VERSION, "seed": options.seed}, matrices)
        save_text(page, options.output)
        tell_written(options.output)


def _compare(opened: Opened, names: Sequence[str], a: str, b: str) -> rg.comparison.Comparison:
    return opened.compare(names.index(a), names.index(b))


def facts_of(lineages: Sequence[Lineage], alone: Sequence[str]) -> dict[str, object]:
    """What was found as plain values, for JSON and pages."""
    rows = [
        {
            "a": a,
            "b": b,
            "verdict": found.verdict,
            "distance": found.orbit_distance / found.norm if found.norm else 0.0,
            "explained": found.share_after,
            "p-value": found.p_value,
        }
        for lineage in lineages
        for (a, b), found in lineage.pairs.items()
    ]
    return {
        "pairs": rows,
        "families": [list(family) for lineage in lineages for family in lineage.families],
        "trees": [
            [{"parent": one.parent, "child": one.child, "length": one.length} for one in tree]
            for lineage in lineages
            for tree in lineage.trees
        ],
        "names": [list(lineage.names) for lineage in lineages],
        "left_out": list(alone),
    }


def _short(paths: Sequence[Path]) -> list[str]:
    """Paths without the folder that all are in."""
    folder = Path(commonpath([path.resolve().parent for path in paths]))
    names = [str(path.resolve().relative_to(folder)) for path in paths]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice!r} is given more than once; name each checkpoint once")
    return names
