"""Methods compared on pairs of image classifiers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

import regauge as rg
from regauge.core.interpolation import distance
from regauge.papers.experiment import Run
from regauge.papers.populations import Examples, Population, networks
from regauge.papers.table import AREA, BARRIER, MIDPOINT, Quantity, Record, Row, Table
from regauge.papers.ways import Way

DISTANCE, SECONDS = Quantity("weight distance", 2), Quantity("CPU s", 2)
"""Euclidean distance of the aligned networks, and CPU time of the alignment."""


@dataclass(frozen=True)
class ClassifierWay(Way):
    """A row of a comparison of classifiers."""

    batch: int = 1000  # images per batch of what the method reads
    examples: int | None = None  # training images that the method reads; all unless given
    paper: Mapping[str, str] = field(default_factory=dict)  # printed numbers of the paper, by quantity


@dataclass(frozen=True)
class Comparison:
    """Methods on independent pairs: no network is in two of them."""

    population: Population
    ways: tuple[ClassifierWay, ...]
    pairs: int  # for each seed
    seeds: int  # independent sets of pairs
    points: int  # networks on each line, both ends included
    test: int = 10_000  # test images
    read: int = 5000  # training images whose statistics repair restores
    batch: int = 1000  # images in one evaluation
    notes: tuple[str, ...] = ()  # departures of the scale


def compare(
    comparison: Comparison, data: Examples, run: Run, quantities: tuple[Quantity, ...], notes: tuple[str, ...]
) -> Table:
    """Tabulate the lines between the two networks of every pair, for every way, in these columns."""
    rows = [
        Row.of(way.label, records, (BARRIER, AREA, MIDPOINT, DISTANCE, SECONDS), paper=way.paper)
        for way, records in zip(comparison.ways, measure_lines(comparison, data, run), strict=True)
    ]
    title = f"{comparison.population.architecture} on {data.name}"
    return Table(title, (*notes, *comparison.notes), quantities, tuple(rows), "test cross entropy (nats)")


def measure_lines(comparison: Comparison, data: Examples, run: Run) -> Sequence[Sequence[Sequence[Record]]]:
    """Train the networks, align each pair in every way, and evaluate the line between the two."""
    population, test = comparison.population, comparison.test
    trained = networks(population, data, run, range(comparison.seeds), range(2 * comparison.pairs))
    symmetry = rg.discover(population.make(), data.few)

    def measure(way: ClassifierWay, seed: int, pair: int) -> Record:
        module = population.make()
        a, b = trained[seed][2 * pair : 2 * pair + 2]
        task = rg.Task(module, data.batches(way.examples, way.batch))
        generator = run.generator("alignment", way.method, seed, pair)
        moved, seconds = way.align(a, b, symmetry, task, generator)
        judge = data.judge(module, test, comparison.batch)
        path = way.path(module, torch.split(data.inputs[: comparison.read], comparison.batch))
        curve = rg.line(a, moved, judge, points=comparison.points, path=path)
        return {
            "line": list(curve.table),
            DISTANCE.name: distance(a, moved, symmetry.buffers),
            SECONDS.name: seconds if way.method else None,
        }

    settings = (population, comparison.points, test, comparison.read, comparison.batch)
    return run.records("aligning", settings, measure, comparison.ways, range(comparison.seeds), range(comparison.pairs))
