"""Populations of networks: their training, and the comparison of methods on pairs of networks."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

import regauge as rg
from regauge.core.interpolation import distance
from regauge.core.params import Params
from regauge.core.progress import Progress
from regauge.data.images import ImageData, cifar10, cifar100, digits, fashion_mnist, has_mnist, mnist
from regauge.nets.augmentation import Augmentation
from regauge.nets.classification import ClassifierConfig, initialize, split_batches, train
from regauge.training.optimizers import Adam, AdamW
from regauge.training.schedules import Constant
from regauge_papers.experiment import CPU, Run
from regauge_papers.table import AREA, BARRIER, MIDPOINT, Quantity, Record, Row, Table
from regauge_papers.ways import Way

DataName = Literal["digits", "MNIST", "MNIST, normalized", "Fashion-MNIST", "CIFAR-10", "CIFAR-100"]
IMAGES: dict[DataName, Callable[[], ImageData]] = {
    "digits": digits,
    "MNIST": mnist,
    "MNIST, normalized": lambda: mnist().normalized(0.1307, 0.3081),
    "Fashion-MNIST": fashion_mnist,
    "CIFAR-10": cifar10,
    "CIFAR-100": cifar100,
}
DISTANCE, SECONDS = Quantity("weight distance", 2), Quantity("CPU s", 2)
"""Euclidean distance of the aligned networks, and CPU time of the alignment."""


@functools.cache
def images(name: DataName) -> ImageData:
    """Return the images of the data set with a given name. The images are read only once."""
    return IMAGES[name]()


def small_images() -> DataName:
    """Return the images of test runs: MNIST if it is present, otherwise the digits."""
    return "MNIST" if has_mnist() else "digits"


@dataclass(frozen=True)
class Examples:
    """Examples: inputs `[n, ...]`, and targets that are classes `[n]` or the next symbols `[n, token]`."""

    name: str
    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor

    @classmethod
    def of(cls, data: ImageData, count: int | None = None) -> "Examples":
        """Return the first `count` training images (by default all training images), and all test images."""
        images, labels = data.train_images[:count], data.train_labels[:count]
        return cls(data.name, images, labels, data.test_images, data.test_labels)

    @property
    def few(self) -> tuple[Tensor]:
        """Return a few inputs on the CPU, with which a module is traced."""
        return (self.test_inputs[:4].cpu(),)

    def batches(self, count: int | None, size: int) -> list[tuple[Tensor, Tensor]]:
        """Return the first `count` training examples, by default all, in batches."""
        return split_batches(self.inputs[:count], self.targets[:count], size)

    def judge(self, module: nn.Module, count: int, size: int) -> rg.Task:
        """Return the task with the loss on the first `count` test examples."""
        return rg.Task(module, split_batches(self.test_inputs[:count], self.test_targets[:count], size))


@dataclass(frozen=True, repr=False)
class Population:
    """Networks of one architecture, trained on the same examples from different seeds."""

    data: str  # the examples, in words
    architecture: str  # in words; networks are stored under it
    make: Callable[[], Any] = field(compare=False)  # builds the module
    training: ClassifierConfig
    examples: int | None = None  # training examples: the first of the data set; all by default
    normalization: tuple[float, float] = (0.0, 1.0)  # mean and standard deviation of pixels in [0, 1]
    load: Callable[[], Examples] | None = field(default=None, compare=False)  # reads others than the images `data`
    initialize: Callable[[Any, torch.Generator], Params] = field(default=initialize, compare=False)
    is_bfloat16: bool = False  # whether networks are trained in it (see `Run.has_bfloat16`); weights remain float32
    augmentation: Augmentation | None = None  # of training images

    def __repr__(self) -> str:
        fields = f"data={self.data!r}, architecture={self.architecture!r}, training={name_training(self.training)}"
        if self.load is None:
            fields += f", examples={self.examples}, normalization={self.normalization}"
        if self.augmentation is not None:
            fields += f", augmentation={self.augmentation}"
        return f"Population({fields})"

    @property
    def description(self) -> str:
        """A description of the training."""
        training = self.training
        return (
            f"{self.examples:,} training images, {training.epochs} epochs of Adam, learning rate up to "
            f"{training.optimizer.lr:g} and down again, batches of {training.batch}"
        )

    def read(self, run: Run) -> Examples:
        """Return the examples in the form that the networks read, on the device of the run."""
        if self.load is not None:
            found = self.load()
        else:
            found = Examples.of(images(self.data).normalized(*self.normalization), self.examples)
        parts = (found.inputs, found.targets, found.test_inputs, found.test_targets)
        return Examples(found.name, *run.bring(parts))


def name_training(training: ClassifierConfig) -> str:
    """Return the name of a training, which determines random numbers and files. Therefore, a change of names changes
    recorded results.

    Adam without decay and AdamW have a short name if the schedule is constant or the default of `ClassifierConfig`. The
    name of any other training contains all settings. The name of the class is `Training`, as when the recorded results
    were made.
    """
    optimizer, is_constant = training.optimizer, training.schedule == Constant()
    lr, decay = optimizer.lr, optimizer.weight_decay
    plain = Adam(lr) if optimizer == Adam(lr) else AdamW(lr, weight_decay=decay)
    if training != replace(
        training, optimizer=plain, schedule=Constant() if is_constant else ClassifierConfig().schedule
    ):
        names = ("steps", "epochs", "batch", "optimizer", "schedule")
        return f"Training({', '.join(f'{name}={getattr(training, name)!r}' for name in names)})"
    schedule = "constant" if is_constant else "cycle"
    settings = f"epochs={training.epochs}, batch={training.batch}, lr={lr}"
    return f"Training({settings}, weight_decay={decay}, schedule={schedule!r})"


def networks(population: Population, data: Examples, run: Run, *axes: Sequence[int]) -> list[Any]:
    """Train networks with all combinations of the given numbers, nested as in `Run.grid`."""

    # The precision is part of the key under which networks are kept; random numbers do not depend on it.
    settings = (population, "bfloat16") if population.is_bfloat16 and run.has_bfloat16 else population

    def one(unit: Progress, *numbers: int) -> Params:
        key = "-".join(map(str, numbers))

        def make() -> Params:
            generator = run.generator("network", population, *numbers)
            module = population.make()
            start = run.bring(population.initialize(module, generator))
            with run.autocast(is_bfloat16=population.is_bfloat16):
                return train(
                    run.bring(module),
                    start,
                    data.inputs,
                    data.targets,
                    population.training,
                    generator=generator,
                    augmentation=population.augmentation,
                    state=run.state(settings, key),
                    progress=unit,
                )

        return run.network(settings, key, make)

    return run.grid(f"training {population.architecture} on {data.name}", one, *axes)


@dataclass(frozen=True)
class ClassifierWay(Way):
    """A row of a comparison of classifiers."""

    batch: int = 1000  # images per batch of what the method reads
    examples: int | None = None  # training images that the method reads; all by default
    paper: Mapping[str, str] = field(default_factory=dict)  # printed numbers of the paper, by quantity


@dataclass(frozen=True)
class Comparison:
    """Settings: methods on disjoint pairs of networks."""

    population: Population
    ways: tuple[ClassifierWay, ...]
    pairs: int  # for each seed
    seeds: int  # independent sets of pairs
    points: int  # networks on each line, both ends included
    test: int = 10_000  # test images
    read: int = 5000  # training images whose statistics repair restores
    batch: int = 1000  # images in one evaluation
    notes: tuple[str, ...] = ()  # departures of the scale


COMPARED = "Weight Matching"
"""The row with which all other rows are compared, pair by pair."""


def compare(
    comparison: Comparison, data: Examples, run: Run, quantities: tuple[Quantity, ...], notes: tuple[str, ...]
) -> Table:
    """Return a table of the given columns, with a row for each method, measured on the lines between the networks of
    all pairs.
    """
    recorded = {one.name: one for one in (BARRIER, AREA, MIDPOINT, DISTANCE, SECONDS, *quantities)}
    rows = [
        Row.of(way.label, records, tuple(recorded.values()), paper=way.paper)
        for way, records in zip(comparison.ways, measure_lines(comparison, data, run), strict=True)
    ]
    title = f"{comparison.population.architecture} on {data.name}"
    paired = next((way.label for way in comparison.ways if way.label == COMPARED), "")
    notes = (*notes, *comparison.notes)
    return Table(title, notes, quantities, tuple(rows), "test cross entropy (nats)", paired=paired)


def measure_lines(comparison: Comparison, data: Examples, run: Run) -> Sequence[Sequence[Sequence[Record]]]:
    """Train the networks, align each pair by each method, and evaluate the lines."""
    population, test = comparison.population, comparison.test
    trained = networks(population, data, run, range(comparison.seeds), range(2 * comparison.pairs))
    symmetry = rg.discover(population.make(), data.few)

    def measure(way: ClassifierWay, seed: int, pair: int) -> Record:
        module = run.bring(population.make())
        a, b = trained[seed][2 * pair : 2 * pair + 2]
        task = rg.Task(module, data.batches(way.examples, way.batch))
        generator = run.generator("alignment", way.method, seed, pair)
        moved, seconds = way.align(a, b, symmetry, task, generator)
        judge = data.judge(module, test, comparison.batch)
        path = way.path(module, torch.split(data.inputs[: comparison.read], comparison.batch))
        few = rg.Task(module, data.batches(comparison.read, comparison.batch))
        curve = rg.line(a, moved, way.judge(judge, few), points=comparison.points, path=path)
        return {
            "line": list(curve.table),
            DISTANCE.name: distance(a, moved, symmetry.buffers),
            SECONDS.name: seconds if way.method and run.device == CPU else None,
        }

    settings = (population, comparison.points, test, comparison.read, comparison.batch)
    return run.records("aligning", settings, measure, comparison.ways, range(comparison.seeds), range(comparison.pairs))
