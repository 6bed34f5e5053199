"""`regauge compare` of three checkpoints or more: all pairs, families of related ones, and their trees."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from os.path import commonpath
from pathlib import Path

import regauge as rg
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.writing import save_text
from regauge.cli.compare_options import Compare
from regauge.cli.compared import Opened
from regauge.cli.main import sentence
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, tell, tell_table, tell_written
from regauge.comparison import Average, Lineage, compare_many, named_parents, tree_lines
from regauge.comparison.common import find_common
from regauge.core.families import connected
from regauge.core.progress import Progress
from regauge.names import VERSION

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
    places, failures = _open(options, names, list(classes.values()))
    alone = [name for name in names if name not in places]
    if not places and failures:
        raise failures[0]
    with show_progress() as progress:
        lineages = [_lineage(places, own, progress) for own in _together(places)]
    if not lineages:
        raise UsageError(f"no two of the {len(names)} checkpoints have tensors of the same names and shapes")
    facts = facts_of(lineages, alone)
    tell_table("pairs", facts["pairs"])  # type: ignore[arg-type]
    for lineage in lineages:
        for tree in lineage.trees:
            tell("\n" + "\n".join(tree_lines(list(tree))))
        for average in lineage.averages:
            tell(_average_line(average))
    strangers = [one for lineage in lineages for family in lineage.families if len(family) == 1 for one in family]
    if strangers:
        tell(f"\nunrelated to all others: {', '.join(strangers)}", unrelated=strangers)
    for failure in failures:
        tell(f"not compared: {sentence(failure)}")
    if alone:
        tell(f"left out, because no other network that was compared has their tensors: {', '.join(alone)}")
    tell("", left_out=alone)
    tell("", families=facts["families"], averages=facts["averages"], trees=facts["trees"])
    if options.output is not None:
        from regauge.report.comparison_page import lineage_page

        matrices = {f"{len(one.names)} networks": one.distances.numpy() for one in lineages}
        page = lineage_page(facts | {"version": VERSION, "seed": options.seed}, matrices)
        save_text(page, options.output)
        tell_written(options.output)


@dataclass(frozen=True)
class Place:
    """A checkpoint and the opened ones among which it is: those with its shapes, or others."""

    opened: Opened
    checkpoint: Checkpoint
    is_own: bool


def _open(
    options: Compare, names: dict[str, Path], classes: Sequence[Sequence[str]]
) -> tuple[dict[str, Place], list[Exception]]:
    """The places of all checkpoints that have something in common with another one, and why others were not opened."""
    places, failures, rest = dict[str, Place](), list[Exception](), list[str]()
    lead = next((own for own in classes if len(own) > 1), classes[0])
    for own in classes:
        if len(own) > 1 or own is lead:
            try:
                opened = Opened.of(options, [names[name] for name in own])
            except (UsageError, ValueError, KeyError) as error:  # Another model, or a damaged network among them.
                failures.append(error)
                rest += own
                continue
            places |= {n: Place(opened, one, True) for n, one in zip(own, opened.networks.checkpoints, strict=True)}
        else:
            rest += own
    for opened in {id(place.opened): place.opened for place in places.values()}.values():
        for name in [name for name in rest if name not in places]:
            with suppress(ValueError, KeyError):
                places[name] = Place(opened, opened.read_other(Checkpoint.open(names[name])), False)
    if len(places) == 1:
        places = {}
    return {name: places[name] for name in names if name in places}, failures


def _together(places: dict[str, Place]) -> list[list[str]]:
    """The names of networks of which some can be compared, in their order."""
    pairs = [(a, b) for a, b in combinations(places, 2) if _can_compare(places[a], places[b])]
    return [[name for name in places if name in part] for part in connected([{a, b} for a, b in pairs])]


def _can_compare(one: Place, two: Place) -> bool:
    if one.opened is two.opened and one.is_own and two.is_own:
        return True
    symmetry, has_widths = one.opened.networks.symmetry, not one.opened.is_streamed
    return find_common(one.checkpoint, two.checkpoint, symmetry, has_widths=has_widths) is not None


def _lineage(places: dict[str, Place], names: list[str], progress: Progress) -> Lineage:
    parents = named_parents({name: places[name].checkpoint for name in names})
    return compare_many(names, partial(_compare, places), parents=parents, progress=progress)


def _average_line(one: Average) -> str:
    """A sentence on the networks of which a network is an average."""
    made = ", ".join(f"{name} ({weight:.0%})" for name, weight in zip(one.parents, one.weights, strict=True))
    why = "its provenance names them" if one.is_told else "its weights lie between theirs"
    return f"\n{one.child} is made of {made}: {why}"


def _compare(places: dict[str, Place], a: str, b: str) -> rg.comparison.Comparison | None:
    one, two = places[a], places[b]
    return one.opened.compare(one.checkpoint, two.checkpoint) if _can_compare(one, two) else None


def facts_of(lineages: Sequence[Lineage], alone: Sequence[str]) -> dict[str, object]:
    """The comparisons as plain values, for JSON and pages."""
    rows = [
        {
            "a": a,
            "b": b,
            "verdict": found.verdict,
            "distance": found.orbit_distance / found.norm if found.norm else 0.0,
            "explained": found.share_after,
            "p-value": found.p_value,
            "compared": found.compared,
        }
        for lineage in lineages
        for (a, b), found in lineage.pairs.items()
    ]
    return {
        "pairs": rows,
        "families": [list(family) for lineage in lineages for family in lineage.families],
        "averages": [
            {"child": one.child, "parents": list(one.parents), "weights": list(one.weights), "is_told": one.is_told}
            for lineage in lineages
            for one in lineage.averages
        ],
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
