"""Figure 8 of paper 001 for MLPs: the barrier by the number of networks, by training time, and by net."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from regauge.report.pictures import Chart, Picture, Series, Style
from regauge_papers.experiment import Experiment, Run, Scale
from regauge_papers.learned import mlps
from regauge_papers.learned.study import (
    QUANTITIES,
    Lessons,
    Networks,
    align_pairs,
    learned_ways,
    notes_of,
    rows_of,
    try_matchers,
    untrained_ways,
)
from regauge_papers.table import BARRIER, Row, Table, summarize

LARGEST = "largest"
"""The label of the matcher that is on all curves."""
DASHED = ("Weight Matching", "Mixed Matching")
"""Rows without training that the pictures also show."""


@dataclass(frozen=True)
class Point:
    """A matcher as a point of a curve in figure 8, such as its number of training networks."""

    x: float
    lessons: Lessons

    def label(self, axis: str) -> str:
        """Return the position in words."""
        return f"{axis} {self.x:g}"


@dataclass(frozen=True)
class Study:
    """Settings: curves of matchers; the matcher with the largest training set is a point of all curves."""

    curves: Mapping[str, Sequence[Point]]  # by what varies, in words
    largest: Lessons


def config(scale: Scale) -> Study:
    """Return the settings: matchers of MLPs 784-128-128-128-10 on MNIST."""
    lessons = mlps.lessons(scale, mlps.mnist(scale))
    matching = lessons.matching
    counts = {"smoke": (8,), "cpu": (16, 100), "paper": (100, 400, 1800)}[scale]
    shares = {"smoke": (), "cpu": (0.25, 0.5), "paper": (0.05, 0.2)}[scale]
    widths = {"smoke": (4,), "cpu": (16,), "paper": (16, 32)}[scale]
    limit = "seconds" if matching.seconds else "epochs"
    whole = matching.seconds or matching.epochs

    def point(x: float, **changes: Any) -> Point:
        return Point(x, replace(lessons, matching=replace(matching, **changes)))

    return Study(
        {
            "networks": [Point(count, replace(lessons, networks=count)) for count in counts],
            limit: [point(share * whole, **{limit: type(whole)(share * whole)}) for share in shares],
            "width": [point(width, width=width) for width in widths],
            "depth": [point(depth, depth=depth) for depth in range(1, matching.depth)],
        },
        lessons,
    )


def measure(study: Study, run: Run) -> Table:
    """Train the matchers of all curves, and align the same pairs with each matcher."""
    networks = Networks.of(study.largest.populations[0], run)
    without = untrained_ways(has_classes=True)
    rows = rows_of(without, align_pairs(networks, without, study.largest.examples, run))
    known = {row.label: row for row in rows}
    several = {point.label(axis): point.lessons for axis, points in study.curves.items() for point in points}
    trained = try_matchers({LARGEST: study.largest, **several}, networks, lambda _, one: learned_ways(one), run)
    learned = {one.label: rows_of(one.ways, one.found, group=one.label) for one in trained}
    rows += [row for group in learned.values() for row in group]
    pictures: dict[str, Picture] = {}
    for axis, points in study.curves.items():
        found = {point.x: learned[point.label(axis)] for point in points}
        found[_place(study.largest, axis, len(networks.split["train"]))] = learned[LARGEST]
        pictures[axis] = (_chart(axis, found, known),)
    settings = study.largest.matching
    notes = (
        f"the largest matcher has {settings.depth} layers of width {settings.width} and learns from all networks; each "
        "of the others differs from it in what its label says",
        *(one.note for one in trained),
        *notes_of(networks),
        mlps.REDUCED,
        "the paper's figure 8 is of sine networks, by pairs for training: with 1,800 its matcher comes to the barrier "
        "of Sinkhorn from nothing, and from 100 on it is a better start than none; it prints no numbers",
    )
    title = f"A matcher of {networks.store.architecture.name} by networks, time and size"
    return Table(title, notes, QUANTITIES, tuple(rows), pictures=pictures, paired="Weight Matching")


def _place(lessons: Lessons, axis: str, networks: int) -> float:
    """Return the position on a curve of the matcher that is trained on all networks."""
    return float(networks if axis == "networks" else getattr(lessons.matching, axis))


def _chart(axis: str, found: Mapping[float, Sequence[Row]], known: Mapping[str, Row]) -> Chart:
    """Return a chart of barriers with standard errors, of each use of a matcher and of untrained methods."""
    places = sorted(found)
    series = [
        _series(rows[0].label.rpartition(": ")[2], places, rows, "line")
        for rows in zip(*(found[x] for x in places), strict=True)
    ]
    ends = (places[0], places[-1]) if len(places) > 1 else (places[0] / 2, places[0])
    series += [_series(label, ends, (known[label], known[label]), "dashed") for label in DASHED]
    return Chart(f"Barrier by {axis}", axis, "barrier", tuple(series), is_log_x=True)


def _series(label: str, places: Sequence[float], rows: Sequence[Row], style: Style) -> Series:
    summaries = [summarize(row.values[BARRIER.name]) for row in rows]
    lows, highs = zip(*(one.span for one in summaries), strict=True)
    return Series(label, places, [one.mean for one in summaries], lows, highs, style)


EXPERIMENTS = {
    "learned-samples": Experiment("MLPs on MNIST: a matcher by networks, time and size (figure 8)", config, measure)
}
