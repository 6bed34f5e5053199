"""ResNet20 with batch normalization on CIFAR-10: what alignment and recomputed statistics are worth, by width.

References:
    Ainsworth, Hayase and Srinivasa (2023), Git Re-Basin, sections 5.2 and 5.4; Jordan et al. (2023), REPAIR, section 4.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import nn

import regauge as rg
from regauge.alignment import Method
from regauge.connect import Curve, interpolate
from regauge.core.params import Params
from regauge.data.images import ImageData
from regauge.nets.classification import Training, split_batches
from regauge.nets.resnet import resnet20
from regauge.papers.classifiers import DataName, Population, align, mean_curve, networks, small_images
from regauge.papers.experiment import Experiment, Run, Scale
from regauge.papers.table import Quantity, Record, Row, Table
from regauge.training.optimizers import AdamW

BATCH = 250
"""Images in one evaluation."""
METHODS: dict[str, Method | None] = {
    "as trained": None,
    "weight matching": rg.WeightMatching(),
    "mixed matching": rg.MixedMatching(),
}


@dataclass(frozen=True)
class Resnets:
    """Pairs of networks of several widths.

    Attributes:
        widths: Multipliers of the 16, 32 and 64 channels.
        populations: The networks of each width.
        pairs: Independent pairs of each width.
        points: Networks on each line, both ends included.
        read: Training images for methods that read data, and for statistics.
        test: The first so many test images are evaluated.
        notes: What the scale changes.
    """

    widths: tuple[int, ...]
    populations: tuple[Population, ...]
    pairs: int
    points: int
    read: int
    test: int
    notes: tuple[str, ...] = ()


def config(scale: Scale) -> Resnets:
    """Widths 1, 2 and 4 on CIFAR-10, trained for two epochs on a CPU; or a network of eight layers."""
    training = Training(epochs=2, batch=64, optimizer=AdamW(5e-3, weight_decay=0.05))
    if scale == "smoke":
        quick = replace(training, epochs=1, batch=32)
        populations = _populations(small_images(), (1,), 1, quick, examples=200)
        notes = ("a test run on small networks, which are hardly trained",)
        return Resnets((1,), populations, pairs=1, points=3, read=50, test=50, notes=notes)
    if scale == "cpu":
        populations = _populations("CIFAR-10", (1, 2, 4), 3, training, examples=25_000)
        return Resnets((1, 2, 4), populations, pairs=1, points=5, read=1000, test=2000)
    populations = _populations("CIFAR-10", (1, 2, 4, 8), 3, replace(training, epochs=30), examples=50_000)
    return Resnets((1, 2, 4, 8), populations, pairs=3, points=25, read=10_000, test=10_000)


def measure(config: Resnets, run: Run) -> Table:
    """Train pairs of every width, align each by every method, evaluate the lines with and without new statistics."""
    data = config.populations[0].images()
    ends = range(2 * config.pairs)
    # A cache of converted weights would keep those of the first step.
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        trained = [networks(population, data, 1, len(ends), run)[0] for population in config.populations]
    columns = range(len(config.widths))
    judged = run.each(
        "evaluating networks",
        [functools.partial(_end, config, k, end, trained[k][end], data, run) for k in columns for end in ends],
    )
    rows = [(label, is_reset) for label in METHODS for is_reset in (False, True)]
    cells = [(k, pair, row) for k in columns for pair in range(config.pairs) for row in rows]
    inner = run.each(
        "aligning",
        [functools.partial(_inner, config, k, pair, *row, trained[k], data, run) for k, pair, row in cells],
    )
    curves: dict[tuple[int, tuple[str, bool]], list[Curve]] = {}
    for (k, pair, row), record in zip(cells, inner, strict=True):
        first, last = judged[len(ends) * k + 2 * pair : len(ends) * k + 2 * pair + 2]
        curve = Curve(({"t": 0.0, **first}, *record["points"], {"t": 1.0, **last}))
        curves.setdefault((k, row), []).append(curve)
    population = config.populations[0]
    accuracies = [fmean(one["accuracy"] for one in judged[len(ends) * k : len(ends) * (k + 1)]) for k in columns]
    notes = (
        f"{population.examples:,} training images, {population.training.epochs} epochs of AdamW in bfloat16 (weights "
        f"and their updates in float32), learning rate up to {population.training.optimizer.lr:g} and down again, "
        f"batches of {population.training.batch}, weight decay {population.training.optimizer.weight_decay:g}",
        "mean accuracy of the networks: "
        + ", ".join(f"{value:.3f} (x{width})" for width, value in zip(config.widths, accuracies, strict=True)),
        f"{config.pairs} pair(s) of each width, {config.points} points of each line, the first "
        f"{min(config.test, len(data.test_labels)):,} test images; methods and statistics read the first "
        f"{config.read:,} training images",
        "batch normalization follows every convolution, so that repair means new statistics and nothing else",
        *config.notes,
    )
    return Table(
        f"{population.architecture.removesuffix(f', width x{config.widths[0]}')} on {data.name}",
        notes,
        (Quantity("barrier"), Quantity("AUC"), Quantity("accuracy halfway")),
        tuple(_row(config, k, row, curves[k, row]) for k in columns for row in rows),
        f"test cross entropy (nats), width x{config.widths[-1]}",
    )


def _populations(
    data: DataName, widths: tuple[int, ...], blocks: int, training: Training, *, examples: int
) -> tuple[Population, ...]:
    channels = 3 if data == "CIFAR-10" else 1

    def make(width: int) -> nn.Module:
        return resnet20(width=width, in_channels=channels, blocks=blocks)

    return tuple(
        Population(
            data,
            f"ResNet{6 * blocks + 2} with batch normalization, width x{width}",
            functools.partial(make, width),
            training,
            examples,
        )
        for width in widths
    )


def _judge(config: Resnets, column: int, data: ImageData) -> rg.Task:
    test = split_batches(data.test_images[: config.test], data.test_labels[: config.test], BATCH)
    return rg.Task(config.populations[column].make(), test)


def _end(config: Resnets, column: int, index: int, params: Params, data: ImageData, run: Run) -> Record:
    """One trained network on the test images."""
    settings = (config.populations[column], config.test)
    return run.record(settings, f"end-{index}", lambda: dict(_judge(config, column, data).evaluate(params)))


def _inner(
    config: Resnets,
    column: int,
    pair: int,
    label: str,
    is_reset: bool,
    trained: Sequence[Params],
    data: ImageData,
    run: Run,
) -> Record:
    """The networks between the ends of a pair."""

    def make() -> Record:
        judge = _judge(config, column, data)
        read = split_batches(data.train_images[: config.read], data.train_labels[: config.read], BATCH)
        symmetry = rg.discover(judge.module, (data.test_images[:4],))
        a, b = trained[2 * pair : 2 * pair + 2]
        generator = run.generator("alignment", METHODS[label], pair)
        moved = align(METHODS[label], a, b, symmetry, rg.Task(judge.module, read), generator)
        points = []
        for k in range(1, config.points - 1):
            t = k / (config.points - 1)
            params = interpolate(a, moved, t)
            if is_reset:
                params = rg.reset_batchnorm(params, judge.module, [images for images, _ in read])
            points.append({"t": t, **judge.evaluate(params)})
        return {"points": points}

    settings = (config.populations[column], METHODS[label], is_reset, config.points, config.read, config.test)
    return run.record(settings, str(pair), make)


def _row(config: Resnets, column: int, row: tuple[str, bool], curves: Sequence[Curve]) -> Row:
    """One method at one width; the picture shows the last width."""
    label, is_reset = row
    middle = config.points // 2
    values = {
        "barrier": [[curve.barrier for curve in curves]],
        "AUC": [[max(0.0, curve.auc) for curve in curves]],
        "accuracy halfway": [[curve.table[middle]["accuracy"] for curve in curves]],
    }
    is_last = column == len(config.widths) - 1
    name = f"x{config.widths[column]}: {label}" + (", new statistics" if is_reset else "")
    return Row(name, values, curve=mean_curve(curves) if is_last else ())


EXPERIMENTS = {
    "resnet20": Experiment("ResNet20 with batch normalization: barriers by width", config, measure),
}
