"""ResNet20 with batch normalization on CIFAR-10: benefit of alignment and of recomputed statistics, by width.

References:
    Ainsworth, Hayase and Srinivasa (2023), Git Re-Basin, sections 5.2 and 5.4; Jordan et al. (2023), REPAIR, section 4.
"""

import functools
from dataclasses import replace
from statistics import fmean
from typing import Any

import regauge as rg
from regauge.nets.augmentation import Augmentation
from regauge.nets.classification import ClassifierConfig
from regauge.nets.resnet import resnet20
from regauge.training.optimizers import SGD, AdamW, Optimizer
from regauge.training.schedules import OneCycle
from regauge_papers.experiment import Experiment, Run, Scale
from regauge_papers.populations import ClassifierWay, Comparison, DataName, Population, measure_lines, small_images
from regauge_papers.table import AREA, BARRIER, Quantity, Row, Table, halfway
from regauge_papers.ways import TEMPERED, TEMPERED_NOTE

BATCH = 250
"""The number of images that are evaluated at a time."""
QUANTITIES = (BARRIER, AREA, Quantity("accuracy halfway", of=halfway("accuracy")))
METHODS = {
    "as trained": None,
    "weight matching": rg.WeightMatching(scales="recompute"),
    "mixed matching": rg.alignment.MixedMatching(scales="recompute"),
}
LONG = ClassifierConfig(
    epochs=24,
    batch=128,
    optimizer=SGD(0.2, momentum=0.9, weight_decay=5e-4, is_nesterov=True),
    schedule=OneCycle(rise=0.25),
)
"""The training in `trained_config`. For networks of width 1, three epochs of SGD with the settings in `LONG` reach a
test accuracy of 76%, and three epochs of AdamW reach 73%."""
Resnets = dict[int, Comparison]
"""The settings for pairs of networks, by width. The width multiplies the 16, 32 and 64 channels."""


def config(scale: Scale) -> Resnets:
    """Return the settings: widths 1, 2 and 4 on CIFAR-10, trained for two epochs on a CPU; for test runs, networks with
    eight layers.
    """
    training = ClassifierConfig(epochs=2, batch=64, optimizer=AdamW(5e-3, weight_decay=0.05))
    if scale == "smoke":
        quick = replace(training, epochs=1, batch=32)
        return {1: _pairs(small_images(), 1, 1, quick, 200, pairs=1, points=3, read=50, test=50)}
    if scale == "cpu":
        sizes: dict[str, Any] = {"pairs": 1, "points": 5, "read": 1000, "test": 2000}
        return {width: _pairs("CIFAR-10", width, 3, training, 25_000, **sizes) for width in (1, 2, 4)}
    long, sizes = replace(training, epochs=30), {"pairs": 3, "points": 25, "read": 10_000, "test": 10_000}
    return {width: _pairs("CIFAR-10", width, 3, long, 50_000, **sizes) for width in (1, 2, 4, 8)}


def trained_config(scale: Scale) -> Resnets:
    """Return the settings: width 2, 24 epochs on a CPU, all images shifted and mirrored; or a smaller network."""
    if scale == "smoke":
        quick = replace(LONG, epochs=1, batch=32)
        sizes: dict[str, Any] = {"pairs": 1, "points": 3, "read": 50, "test": 50}
        return {1: _pairs(small_images(), 1, 1, quick, 200, augmentation=Augmentation(1), **sizes)}
    counts = {2: 1} if scale == "cpu" else dict.fromkeys((1, 2, 4, 8), 3)
    long = LONG if scale == "cpu" else replace(LONG, epochs=100)
    sizes = {"points": 11, "read": 5000, "test": 4000 if scale == "cpu" else 10_000, "augmentation": Augmentation()}
    return {width: _pairs("CIFAR-10", width, 3, long, 50_000, pairs=n, **sizes) for width, n in counts.items()}


def measure(config: Resnets, run: Run) -> Table:
    """Train pairs of every width, align them by each method, and evaluate lines with and without new statistics."""
    rows, accuracies, last = [], [], max(config)
    for width, comparison in config.items():
        data = comparison.population.read(run)
        found = measure_lines(comparison, data, run)
        rows += [
            Row.of(f"x{width}: {way.label}", records, QUANTITIES, is_drawn=width == last)
            for way, records in zip(comparison.ways, found, strict=True)
        ]
        ends = [record["line"][end]["accuracy"] for seed in found[0] for record in seed for end in (0, -1)]
        accuracies.append(f"{fmean(ends):.3f} (x{width})")
    population, training = comparison.population, comparison.population.training
    lengths = {width: one.population.training.epochs for width, one in config.items()}
    epochs = ", ".join(f"{count} (x{width})" for width, count in lengths.items())
    changes = "" if population.augmentation is None else f", {population.augmentation} at random"
    notes = (
        f"{population.examples:,} training images{changes}, "
        f"{training.epochs if len(set(lengths.values())) == 1 else epochs} epochs of {_name(training.optimizer)} in "
        f"{run.half_precision}, learning rate up to {training.optimizer.lr:g} and down "
        f"again, batches of {training.batch}, weight decay {training.optimizer.weight_decay:g}",
        "mean accuracy of the networks: " + ", ".join(accuracies),
        f"{comparison.pairs} pair(s) of each width, {comparison.points} points of each line, the first "
        f"{min(comparison.test, len(data.test_targets)):,} test images; methods and statistics read the first "
        f"{comparison.read:,} training images",
        "batch normalization follows every convolution, so that repair means new statistics and nothing else",
        TEMPERED_NOTE,
    )
    title = f"{population.architecture.removesuffix(f', width x{last}')} on {data.name}"
    return Table(title, notes, QUANTITIES, tuple(rows), f"test cross entropy (nats), width x{last}")


def _name(optimizer: Optimizer) -> str:
    """Return the description of an optimizer."""
    return f"SGD with momentum {optimizer.momentum:g}" if isinstance(optimizer, SGD) else type(optimizer).__name__


def _pairs(
    data: DataName,
    width: int,
    blocks: int,
    training: ClassifierConfig,
    examples: int,
    *,
    read: int,
    augmentation: Augmentation | None = None,
    **sizes: Any,
) -> Comparison:
    """Return the settings for pairs of one width, aligned by every method."""
    make = functools.partial(resnet20, width=width, in_channels=3 if data == "CIFAR-10" else 1, blocks=blocks)
    architecture = f"ResNet{6 * blocks + 2} with batch normalization, width x{width}"
    population = Population(data, architecture, make, training, examples, is_bfloat16=True, augmentation=augmentation)
    ways = tuple(
        ClassifierWay(label + suffix, method, is_repaired=bool(suffix), batch=BATCH, examples=read)
        for label, method in METHODS.items()
        for suffix in ("", ", new statistics")
    )
    ways = (*ways, ClassifierWay(TEMPERED, is_tempered=True, batch=BATCH, examples=read))
    return Comparison(population, ways, seeds=1, batch=BATCH, read=read, **sizes)


EXPERIMENTS = {
    "resnet20": Experiment("ResNet20 with batch normalization: barriers by width", config, measure, takes_device=True),
    "resnet20-trained": Experiment(
        "the same, of networks that are trained to the end",
        trained_config,
        measure,
        takes_device=True,
    ),
}
