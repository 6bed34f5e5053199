"""Five independently trained networks made one: MLPs on MNIST, convolutional networks on CIFAR-10.

References:
    Crisostomi et al. (2024), C2M3: Cycle-Consistent Multi-Model Merging, section 5; Jordan et al. (2023), REPAIR.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import regauge as rg
from regauge.alignment import Method
from regauge.core.interpolation import mean
from regauge.core.params import Params
from regauge.data.images import ImageData
from regauge.nets.classification import Training, split_batches
from regauge.nets.mlp import mlp
from regauge.nets.vgg import VGG
from regauge.papers.classifiers import Population, networks
from regauge.papers.experiment import Experiment, Run, Scale
from regauge.papers.table import Quantity, Record, Row, Table
from regauge.training.optimizers import Adam

BATCH = 1000
"""Images in one evaluation."""
METHODS: dict[str, Method | None] = {
    "mean as trained": None,
    "weight matching to the first": rg.WeightMatching(),
    "activation matching to the first": rg.ActivationMatching(),
    "mixed matching to the first": rg.MixedMatching(),
    "universe, each to the mean of the others": rg.MergeMany(),
    "universe, Frank-Wolfe": rg.FrankWolfe(),
}


@dataclass(frozen=True)
class Merging:
    """Sets of networks, each of which is merged into one.

    Attributes:
        population: The networks.
        networks: How many are merged.
        sets: Independent sets of so many.
        read: Training images for methods that read data, and for repair.
        test: The first so many test images are evaluated.
        notes: What the scale changes.
    """

    population: Population
    networks: int
    sets: int
    read: int
    test: int = 10_000
    notes: tuple[str, ...] = ()


def mnist_config(scale: Scale) -> Merging:
    """784-512-512-512-10, or small networks."""
    if scale == "smoke":
        return _smoke("MLP 64-16-16-10", lambda: mlp(64, 16, 16, 10))
    population = Population(
        "MNIST",
        "MLP 784-512-512-512-10",
        lambda: mlp(784, 512, 512, 512, 10),
        Training(epochs=5, batch=128, optimizer=Adam(1e-3)),
        60_000,
    )
    return Merging(population, networks=5, sets=2 if scale == "cpu" else 10, read=5000)


def cifar10_config(scale: Scale) -> Merging:
    """Three 3 x 3 convolutions of 32, 64 and 64 channels with pooling and a linear layer, or small networks."""
    if scale == "smoke":
        return _smoke(
            "CNN with 4 and 8 channels",
            lambda: VGG((4, "pool", 8, "pool"), (), 10, image=8, in_channels=1, norm="none"),
        )
    population = Population(
        "CIFAR-10",
        "CNN with 32, 64 and 64 channels",
        lambda: VGG((32, "pool", 64, "pool", 64, "pool"), (), 10, image=32, in_channels=3, norm="none"),
        Training(epochs=4 if scale == "cpu" else 20, batch=128, optimizer=Adam(4e-3)),
        25_000 if scale == "cpu" else 50_000,
    )
    return Merging(population, networks=5, sets=1 if scale == "cpu" else 5, read=5000)


def measure(config: Merging, run: Run) -> Table:
    """Train the networks and merge every set of them by every method, with and without repair."""
    population, count = config.population, config.networks
    data = population.images()
    trained = networks(population, data, 1, config.sets * count, run)[0]
    sets = [trained[k * count : (k + 1) * count] for k in range(config.sets)]
    judged = run.each(
        "evaluating networks", [functools.partial(_ends, config, k, sets[k], data, run) for k in range(config.sets)]
    )
    cells = [(label, k) for label in METHODS for k in range(config.sets)]
    found = run.each(
        "merging", [functools.partial(_merged, config, label, k, sets[k], data, run) for label, k in cells]
    )
    of = dict(zip(cells, found, strict=True))
    rows = [_row("the networks, mean", [record["networks"] for record in judged])]
    for label, method in METHODS.items():
        records = [of[label, k] for k in range(config.sets)]
        seconds = None if method is None else [record["seconds"] for record in records]
        rows.append(_row(label, [record["plain"] for record in records], seconds))
        rows.append(_row(f"{label}, repaired", [record["repaired"] for record in records]))
    rows.append(_row("ensemble: mean of the probabilities", [record["ensemble"] for record in judged]))
    training = population.training
    notes = (
        f"{count} networks in each of {config.sets} set(s), {population.examples:,} training images, {training.epochs} "
        f"epochs of Adam, learning rate up to {training.optimizer.lr:g} and down again, batches of {training.batch}",
        f"accuracy and cross entropy (nats) on {min(config.test, len(data.test_labels)):,} test images; methods that "
        f"read data, and repair, read the first {config.read:,} training images",
        *config.notes,
    )
    quantities = (Quantity("accuracy", 4), Quantity("loss"), Quantity("CPU s", 1))
    return Table(f"{count} networks made one: {population.architecture} on {data.name}", notes, quantities, tuple(rows))


def _smoke(architecture: str, make: Callable[[], nn.Module]) -> Merging:
    """Three small networks, hardly trained, on digits."""
    training = Training(epochs=3, batch=64, optimizer=Adam(3e-3))
    population = Population("digits", architecture, make, training, 1000)
    notes = ("a test run on small networks of scikit-learn's digits, which are hardly trained",)
    return Merging(population, networks=3, sets=2, read=200, test=300, notes=notes)


def _judge(config: Merging, data: ImageData) -> rg.Task:
    test = split_batches(data.test_images[: config.test], data.test_labels[: config.test], BATCH)
    return rg.Task(config.population.make(), test)


def _ends(config: Merging, index: int, trained: Sequence[Params], data: ImageData, run: Run) -> Record:
    """The networks themselves, and all of them together."""

    def make() -> Record:
        judge = _judge(config, data)
        metrics = [judge.evaluate(params) for params in trained]
        loss = correct = 0.0
        with torch.no_grad():
            for images, labels in judge.batches:
                chances = torch.stack([judge.run(params, images).double().softmax(-1) for params in trained]).mean(0)
                loss += float(functional.nll_loss(chances.log(), labels, reduction="sum"))
                correct += int((chances.argmax(-1) == labels).sum())
        size = sum(len(labels) for _, labels in judge.batches)
        return {
            "networks": {name: statistics.fmean(one[name] for one in metrics) for name in metrics[0]},
            "ensemble": {"loss": loss / size, "accuracy": correct / size},
        }

    return run.record((config.population, config.networks, config.test), f"networks-{index}", make)


def _merged(config: Merging, label: str, index: int, trained: Sequence[Params], data: ImageData, run: Run) -> Record:
    """The mean of the aligned networks."""
    method = METHODS[label]

    def make() -> Record:
        judge = _judge(config, data)
        images, labels = data.train_images[: config.read], data.train_labels[: config.read]
        task = rg.Task(judge.module, split_batches(images, labels, BATCH))
        symmetry = rg.discover(judge.module, (data.test_images[:4],)) if method is not None else rg.Symmetry(())
        began = time.thread_time()
        generator = run.generator("merging", method, index)
        aligned = rg.align_many(trained, symmetry, method=method, task=task, generator=generator).params
        seconds = time.thread_time() - began
        center = mean(aligned)
        repaired = rg.repair(center, judge.module, aligned, torch.split(images, BATCH)).params
        return {"seconds": seconds, "plain": judge.evaluate(center), "repaired": judge.evaluate(repaired)}

    return run.record((config.population, config.networks, method, config.read, config.test), str(index), make)


def _row(label: str, metrics: Sequence[dict[str, float]], seconds: Sequence[float] | None = None) -> Row:
    values = {name: [[one[name] for one in metrics]] for name in ("accuracy", "loss")}
    return Row(label, values if seconds is None else values | {"CPU s": [list(seconds)]})


EXPERIMENTS = {
    "mnist": Experiment("five MLPs on MNIST made one", mnist_config, measure),
    "cifar10": Experiment("five convolutional networks on CIFAR-10 made one", cifar10_config, measure),
}
