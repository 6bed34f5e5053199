"""Populations of image classifiers, and methods compared on pairs of them."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

import regauge as rg
from regauge.alignment import Method
from regauge.connect import Curve, Path
from regauge.core.interpolation import distance
from regauge.core.params import Params
from regauge.data.images import ImageData, cifar10, digits, has_mnist, mnist
from regauge.nets.classification import Training, initialize, split_batches, train
from regauge.papers.experiment import Run
from regauge.papers.table import Record, Row, Values

DataName = Literal["digits", "MNIST", "CIFAR-10"]

REPAIR_IMAGES = 5000
EVALUATION_BATCH = 1000


@dataclass(frozen=True)
class Population:
    """Classifiers of one architecture, trained on the same images from different seeds.

    Attributes:
        data: The images.
        architecture: In words; networks are stored under it.
        make: Builds the module.
        training: How each is trained.
        examples: The first so many training images are used.
        normalization: Mean and standard deviation that pixels in [0, 1] are normalized with.
    """

    data: DataName
    architecture: str
    make: Callable[[], nn.Module] = field(repr=False, compare=False)
    training: Training
    examples: int
    normalization: tuple[float, float] = (0.0, 1.0)

    def images(self) -> ImageData:
        """The images as the networks see them."""
        data = {"digits": digits, "MNIST": mnist, "CIFAR-10": cifar10}[self.data]()
        return data.normalized(*self.normalization)


@dataclass(frozen=True)
class Entry:
    """One row of a comparison.

    Attributes:
        label: Its name in the table.
        method: How the second network is aligned; None leaves it as it was trained.
        batch: Images per batch of what the method reads.
        examples: It reads the first so many training images; None is all that the networks were trained on.
        is_repaired: Whether the networks between the ends are repaired, with statistics of the first 5,000 images.
        paper: What the paper prints, by quantity.
    """

    label: str
    method: Method | None
    batch: int = 1000
    examples: int | None = None
    is_repaired: bool = False
    paper: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Methods on independent pairs: no network is in two of them.

    Attributes:
        population: The networks.
        entries: The methods.
        pairs: How many, for each seed.
        seeds: How many independent sets of pairs.
        points: Networks on each line, both ends included.
        test: The first so many test images are evaluated.
    """

    population: Population
    entries: tuple[Entry, ...]
    pairs: int
    seeds: int
    points: int
    test: int = 10_000


def small_images() -> DataName:
    """What experiments run on that only show that everything works: MNIST where it is there, else the digits."""
    return "MNIST" if has_mnist() else "digits"


def networks(population: Population, data: ImageData, seeds: int, count: int, run: Run) -> list[list[Params]]:
    """That many trained networks for each seed; `data` are the population's images."""

    def one(seed: int, index: int) -> Params:
        def make() -> Params:
            generator = run.generator("network", population, seed, index)
            module = population.make()
            images, labels = data.train_images[: population.examples], data.train_labels[: population.examples]
            start = initialize(module, generator)
            return train(module, start, images, labels, population.training, generator=generator)

        return run.network(population, f"{seed}-{index}", make)

    steps = [functools.partial(one, seed, index) for seed in range(seeds) for index in range(count)]
    found = run.each(f"training {population.architecture} on {data.name}", steps)
    return [found[seed * count : (seed + 1) * count] for seed in range(seeds)]


def compare(comparison: Comparison, data: ImageData, run: Run) -> tuple[Row, ...]:
    """Train the networks, align each pair with every method, and evaluate the line between the two.

    `data` are the population's images.
    The quantities are "barrier" and "AUC", the area under the excess, both on the test images and not below zero,
    "midpoint" (the loss there), "weight distance" (Euclidean) and "CPU s" (of the alignment).
    """
    trained = networks(comparison.population, data, comparison.seeds, 2 * comparison.pairs, run)
    symmetry = rg.discover(comparison.population.make(), (data.test_images[:4],))
    test = split_batches(data.test_images[: comparison.test], data.test_labels[: comparison.test], EVALUATION_BATCH)
    cells = [
        (entry, seed, pair)
        for seed in range(comparison.seeds)
        for pair in range(comparison.pairs)
        for entry in comparison.entries
    ]

    def one(entry: Entry, seed: int, pair: int) -> Record:
        read = (entry.method, entry.batch, entry.examples)
        line = (comparison.points, comparison.test, *(["repaired"] if entry.is_repaired else []))
        settings = (comparison.population, read, *line)

        def make() -> Record:
            task = rg.Task(comparison.population.make(), _training_batches(comparison.population, data, entry))
            a, b = trained[seed][2 * pair], trained[seed][2 * pair + 1]
            generator = run.generator("alignment", entry.method, seed, pair)
            began = time.thread_time()
            moved = align(entry.method, a, b, symmetry, task, generator)
            seconds = time.thread_time() - began
            judge = rg.Task(comparison.population.make(), test)
            path: Path = rg.connect.Straight()
            if entry.is_repaired:
                images = data.train_images[: comparison.population.examples][:REPAIR_IMAGES]
                path = rg.connect.Repaired(judge.module, torch.split(images, EVALUATION_BATCH))
            curve = rg.line(a, moved, judge, points=comparison.points, path=path)
            return {"seconds": seconds, "distance": distance(a, moved, symmetry.buffers), "line": list(curve.table)}

        return run.record(settings, f"{seed}-{pair}", make)

    records = run.each("aligning", [functools.partial(one, *cell) for cell in cells])
    return tuple(
        _row(entry, comparison, [r for (other, _, _), r in zip(cells, records, strict=True) if other is entry])
        for entry in comparison.entries
    )


def align(
    method: Method | None, a: Params, b: Params, symmetry: rg.Symmetry, task: rg.Task, generator: torch.Generator
) -> Params:
    """The second network where the method brings it; as it is without a method."""
    if method is None:
        return b
    return rg.align(a, b, symmetry, method=method, task=task, generator=generator).params


def mean_curve(curves: Sequence[Curve]) -> tuple[dict[str, float], ...]:
    """The mean of every metric at every point of several lines."""
    return tuple(
        {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
        for rows in zip(*(curve.table for curve in curves), strict=True)
    )


def _training_batches(population: Population, data: ImageData, entry: Entry) -> list[tuple[Tensor, Tensor]]:
    count = population.examples if entry.examples is None else min(entry.examples, population.examples)
    images, labels = data.train_images[:count], data.train_labels[:count]
    return split_batches(images, labels, entry.batch)


def _row(entry: Entry, comparison: Comparison, records: Sequence[Record]) -> Row:
    curves = [Curve(tuple(record["line"])) for record in records]
    per_seed = comparison.pairs

    def grouped(values: Sequence[float]) -> Values:
        return [values[k : k + per_seed] for k in range(0, len(values), per_seed)]

    values = {
        "barrier": grouped([curve.barrier for curve in curves]),
        "AUC": grouped([max(0.0, curve.auc) for curve in curves]),
        "midpoint": grouped([curve.table[len(curve.table) // 2]["loss"] for curve in curves]),
        "weight distance": grouped([record["distance"] for record in records]),
    }
    if entry.method is not None:
        values["CPU s"] = grouped([record["seconds"] for record in records])
    return Row(entry.label, values, entry.paper, mean_curve(curves))
