"""Merging of five independently trained networks into one: MLPs on MNIST, convolutional networks on CIFAR-10.

References:
    Crisostomi et al. (2024), C2M3: Cycle-Consistent Multi-Model Merging, section 5; Jordan et al. (2023), REPAIR.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn import functional

import regauge as rg
from regauge.alignment import Method
from regauge.core.interpolation import mean
from regauge.nets.classification import ClassifierConfig
from regauge.nets.mlp import mlp
from regauge.nets.vgg import VGG
from regauge.training.optimizers import Adam
from regauge_papers.experiment import CPU, Experiment, Run, Scale
from regauge_papers.populations import Population, networks
from regauge_papers.table import Quantity, Record, Row, Table

BATCH = 1000
"""The number of images that are evaluated at a time."""
QUANTITIES = (Quantity("accuracy", 4), Quantity("loss"), Quantity("CPU s", 1))
METHODS: dict[str, Method | None] = {
    "mean as trained": None,
    "weight matching to the first": rg.WeightMatching(),
    "activation matching to the first": rg.ActivationMatching(),
    "mixed matching to the first": rg.alignment.MixedMatching(),
    "universe, each to the mean of the others": rg.alignment.MergeMany(),
    "universe, Frank-Wolfe": rg.FrankWolfe(),
}


@dataclass(frozen=True)
class Merging:
    """Settings: sets of networks, each of which is merged into one network."""

    population: Population
    networks: int  # that are merged
    sets: int  # independent sets of networks
    read: int  # training images for methods that read data, and for repair
    test: int = 10_000  # test images


def mnist_config(scale: Scale) -> Merging:
    """Return the settings: MLPs 784-512-512-512-10, or small networks."""
    if scale == "smoke":
        return _smoke("MLP 64-16-16-10", lambda: mlp(64, 16, 16, 10))
    population = Population(
        "MNIST",
        "MLP 784-512-512-512-10",
        lambda: mlp(784, 512, 512, 512, 10),
        ClassifierConfig(epochs=5, batch=128, optimizer=Adam(1e-3)),
        60_000,
    )
    return Merging(population, networks=5, sets=2 if scale == "cpu" else 10, read=5000)


def cifar10_config(scale: Scale) -> Merging:
    """Return the settings: three 3 x 3 convolutions (32, 64, 64 channels) with pooling and a linear layer, or smaller
    networks.
    """
    if scale == "smoke":
        return _smoke(
            "CNN with 4 and 8 channels",
            lambda: VGG((4, "pool", 8, "pool"), (), 10, image=8, in_channels=1, norm="none"),
        )
    population = Population(
        "CIFAR-10",
        "CNN with 32, 64 and 64 channels",
        lambda: VGG((32, "pool", 64, "pool", 64, "pool"), (), 10, image=32, in_channels=3, norm="none"),
        ClassifierConfig(epochs=4 if scale == "cpu" else 20, batch=128, optimizer=Adam(4e-3)),
        25_000 if scale == "cpu" else 50_000,
    )
    return Merging(population, networks=5, sets=1 if scale == "cpu" else 5, read=5000)


def measure(config: Merging, run: Run) -> Table:
    """Train the networks and merge every set of them by every method, with and without repair."""
    population, count = config.population, config.networks
    data, module = population.read(run), run.bring(population.make())
    trained = networks(population, data, run, range(1), range(config.sets * count))[0]
    sets = [trained[k * count : (k + 1) * count] for k in range(config.sets)]
    judge = data.judge(module, config.test, BATCH)

    def judge_set(index: int) -> Record:
        """Evaluate the networks of a set separately, and as an ensemble."""
        metrics = [judge.evaluate(params) for params in sets[index]]
        loss = correct = 0.0
        with torch.no_grad():
            for images, labels in judge.batches:
                logits = torch.stack([judge.run(params, images) for params in sets[index]])
                chances = logits.double().softmax(-1).mean(0)
                loss += float(functional.nll_loss(chances.log(), labels, reduction="sum"))
                correct += int((chances.argmax(-1) == labels).sum())
        size = sum(len(labels) for _, labels in judge.batches)
        return {
            "networks": {name: statistics.fmean(one[name] for one in metrics) for name in metrics[0]},
            "ensemble": {"loss": loss / size, "accuracy": correct / size},
        }

    @cache
    def find_symmetry() -> rg.Symmetry:
        return rg.discover(population.make(), data.few)

    def merge(label: str, index: int) -> Record:
        """Evaluate the mean of the aligned networks."""
        method, batches = METHODS[label], data.batches(config.read, BATCH)
        symmetry = rg.Symmetry(()) if method is None else find_symmetry()
        began = time.thread_time()
        aligned = rg.align_many(
            sets[index],
            symmetry,
            method=method,
            task=rg.Task(module, batches),
            generator=run.generator("merging", method, index),
        ).params
        seconds = {} if method is None or run.device != CPU else {"CPU s": time.thread_time() - began}
        center = mean(aligned)
        repaired = rg.repair(center, module, aligned, [images for images, _ in batches]).params
        return {"plain": judge.evaluate(center) | seconds, "repaired": judge.evaluate(repaired)}

    settings = (population, count, config.test)
    judged = run.records("evaluating networks", settings, judge_set, range(config.sets))
    merged = run.records("merging", (*settings, config.read), merge, list(METHODS), range(config.sets))

    def row(label: str, records: Sequence[Record], key: str) -> Row:
        return Row.of(label, [[record[key] for record in records]], QUANTITIES)

    rows = [row("the networks, mean", judged, "networks")]
    for label, records in zip(METHODS, merged, strict=True):
        rows += [row(label, records, "plain"), row(f"{label}, repaired", records, "repaired")]
    rows.append(row("ensemble: mean of the probabilities", judged, "ensemble"))
    notes = (
        f"{count} networks in each of {config.sets} set(s), {population.description}",
        f"accuracy and cross entropy (nats) on {min(config.test, len(data.test_targets)):,} test images; methods that "
        f"read data, and repair, read the first {config.read:,} training images",
    )
    return Table(f"{count} networks made one: {population.architecture} on {data.name}", notes, QUANTITIES, tuple(rows))


def _smoke(architecture: str, make: Callable[[], nn.Module]) -> Merging:
    """Return three small networks with a short training on digits."""
    training = ClassifierConfig(epochs=3, batch=64, optimizer=Adam(3e-3))
    population = Population("digits", architecture, make, training, 1000)
    return Merging(population, networks=3, sets=2, read=200, test=300)


EXPERIMENTS = {
    "mnist": Experiment("five MLPs on MNIST made one", mnist_config, measure, takes_device=True),
    "cifar10": Experiment(
        "five convolutional networks on CIFAR-10 made one", cifar10_config, measure, takes_device=True
    ),
}
