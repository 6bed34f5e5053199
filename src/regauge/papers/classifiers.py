"""Populations of image classifiers, and methods compared on pairs of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

import regauge as rg
from regauge.connect import Path
from regauge.core.interpolation import distance
from regauge.core.params import Params
from regauge.data.images import ImageData, cifar10, digits, has_mnist, mnist
from regauge.nets.classification import Training, initialize, split_batches, train
from regauge.papers.experiment import Run
from regauge.papers.line_quantities import AREA, BARRIER, MIDPOINT, mean_curve
from regauge.papers.table import Quantity, Record, Row, Table
from regauge.papers.ways import Way, align
from regauge.training.schedules import Constant

DataName = Literal["digits", "MNIST", "CIFAR-10"]

REPAIR_IMAGES = 5000
EVALUATION_BATCH = 1000
DISTANCE, SECONDS = Quantity("weight distance", 2), Quantity("CPU s", 2)
"""Euclidean distance of the aligned networks, and CPU time of the alignment."""


@dataclass(frozen=True, repr=False)
class Population:
    """Classifiers of one architecture, trained on the same images from different seeds.

    Attributes:
        data: The images.
        architecture: In words; networks are stored under it.
        make: Builds the module.
        training: Settings of the training of each.
        examples: Number of training images: the first of the data set.
        normalization: Mean and standard deviation that pixels in [0, 1] are normalized with.
    """

    data: DataName
    architecture: str
    make: Callable[[], nn.Module] = field(compare=False)
    training: Training
    examples: int
    normalization: tuple[float, float] = (0.0, 1.0)

    @property
    def description(self) -> str:
        """The training in words."""
        training = self.training
        return (
            f"{self.examples:,} training images, {training.epochs} epochs of Adam, learning rate up to "
            f"{training.optimizer.lr:g} and down again, batches of {training.batch}"
        )

    def __repr__(self) -> str:
        fields = f"data={self.data!r}, architecture={self.architecture!r}, training={name_training(self.training)}"
        return f"Population({fields}, examples={self.examples}, normalization={self.normalization})"

    def images(self) -> ImageData:
        """The images as the networks see them."""
        data = {"digits": digits, "MNIST": mnist, "CIFAR-10": cifar10}[self.data]()
        return data.normalized(*self.normalization)

    def judge(self, data: ImageData, count: int, batch: int = EVALUATION_BATCH) -> rg.Task:
        """The loss on the first `count` test images."""
        return rg.Task(self.make(), split_batches(data.test_images[:count], data.test_labels[:count], batch))

    def batches(self, data: ImageData, count: int | None, batch: int) -> list[tuple[Tensor, Tensor]]:
        """The first `count` of the training images, all unless given."""
        count = self.examples if count is None else min(count, self.examples)
        return split_batches(data.train_images[:count], data.train_labels[:count], batch)


@dataclass(frozen=True)
class ClassifierWay(Way):
    """A row of a comparison of classifiers.

    Attributes:
        batch: Images per batch of what the method reads.
        examples: Number of training images that the method reads; all unless given.
        is_repaired: Whether the networks between the ends are repaired, with statistics of the first 5,000 images.
        paper: Printed numbers of the paper, by quantity.
    """

    batch: int = 1000
    examples: int | None = None
    is_repaired: bool = False
    paper: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Methods on independent pairs: no network is in two of them.

    Attributes:
        population: The networks.
        ways: The rows.
        pairs: Number of pairs for each seed.
        seeds: Number of independent sets of pairs.
        points: Networks on each line, both ends included.
        test: Number of test images.
        notes: Departures of the scale.
    """

    population: Population
    ways: tuple[ClassifierWay, ...]
    pairs: int
    seeds: int
    points: int
    test: int = 10_000
    notes: tuple[str, ...] = ()


def name_training(training: Training) -> str:
    """The name of a training by which chance is drawn; renaming would change every documented number."""
    optimizer, schedule = training.optimizer, "constant" if isinstance(training.schedule, Constant) else "cycle"
    settings = f"epochs={training.epochs}, batch={training.batch}, lr={optimizer.lr}"
    return f"Training({settings}, weight_decay={optimizer.weight_decay}, schedule={schedule!r})"


def small_images() -> DataName:
    """The images of test runs: MNIST if it is present, else the digits."""
    return "MNIST" if has_mnist() else "digits"


def networks(population: Population, data: ImageData, seeds: int, count: int, run: Run) -> list[list[Params]]:
    """Train `count` networks for each seed on `data`, the population's images."""

    def one(seed: int, index: int) -> Params:
        def make() -> Params:
            generator = run.generator("network", population, seed, index)
            module = population.make()
            images, labels = data.train_images[: population.examples], data.train_labels[: population.examples]
            start = initialize(module, generator)
            return train(module, start, images, labels, population.training, generator=generator)

        return run.network(population, f"{seed}-{index}", make)

    return run.grid(f"training {population.architecture} on {data.name}", one, range(seeds), range(count))


def compare(
    comparison: Comparison, data: ImageData, run: Run, quantities: tuple[Quantity, ...], notes: tuple[str, ...]
) -> Table:
    """Train the networks, align each pair in every way, and evaluate the line between the two.

    Args:
        comparison: Networks, ways, pairs.
        data: The population's images.
        run: The run.
        quantities: The columns, among "barrier", "AUC", "weight distance" and "CPU s".
        notes: Notes of the table, before those of the comparison.
    """
    population, points = comparison.population, comparison.points
    trained = networks(population, data, comparison.seeds, 2 * comparison.pairs, run)
    symmetry = rg.discover(population.make(), (data.test_images[:4],))

    def one(way: ClassifierWay, seed: int, pair: int) -> Record:
        read = (way.method, way.batch, way.examples)
        line = (points, comparison.test, *(["repaired"] if way.is_repaired else []))

        def make() -> Record:
            task = rg.Task(population.make(), population.batches(data, way.examples, way.batch))
            a, b = trained[seed][2 * pair], trained[seed][2 * pair + 1]
            generator = run.generator("alignment", way.method, seed, pair)
            moved, seconds = align(way.method, a, b, symmetry, task, generator)
            judge = population.judge(data, comparison.test)
            path: Path = rg.connect.Straight()
            if way.is_repaired:
                images = data.train_images[: population.examples][:REPAIR_IMAGES]
                path = rg.connect.Repaired(judge.module, torch.split(images, EVALUATION_BATCH))
            curve = rg.line(a, moved, judge, points=points, path=path)
            return {
                "line": list(curve.table),
                DISTANCE.name: distance(a, moved, symmetry.buffers),
                SECONDS.name: seconds if way.method else None,
            }

        return run.record((population, read, *line), f"{seed}-{pair}", make)

    found = run.grid("aligning", one, comparison.ways, range(comparison.seeds), range(comparison.pairs))
    rows = [
        Row.of(
            way.label,
            records,
            (BARRIER, AREA, MIDPOINT, DISTANCE, SECONDS),
            paper=way.paper,
            curve=mean_curve([record["line"] for seed in records for record in seed]),
        )
        for way, records in zip(comparison.ways, found, strict=True)
    ]
    title = f"{population.architecture} on {data.name}"
    return Table(title, (*notes, *comparison.notes), quantities, tuple(rows), "test cross entropy (nats)")
