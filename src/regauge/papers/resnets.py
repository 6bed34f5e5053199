"""ResNet20 with batch normalization on CIFAR-10: gains of alignment and of recomputed statistics, by width.

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
from regauge.connect import interpolate
from regauge.core.params import Params
from regauge.data.images import ImageData
from regauge.nets.classification import Training
from regauge.nets.resnet import resnet20
from regauge.papers.classifiers import DataName, Population, networks, small_images
from regauge.papers.experiment import Experiment, Run, Scale
from regauge.papers.line_quantities import AREA, BARRIER, halfway, mean_curve
from regauge.papers.table import Quantity, Record, Row, Table
from regauge.papers.ways import align
from regauge.training.optimizers import AdamW

BATCH = 250
"""Images in one evaluation."""
QUANTITIES = (BARRIER, AREA, Quantity("accuracy halfway", of=halfway("accuracy")))
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
        pairs: Number of independent pairs of each width.
        points: Networks on each line, both ends included.
        read: Number of training images for methods that read data, and for statistics.
        test: Number of test images.
        notes: Departures of the scale.
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
    # A cache of converted weights would keep those of the first step.
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        trained = [networks(population, data, 1, 2 * config.pairs, run)[0] for population in config.populations]
    columns, pairs = range(len(config.widths)), range(config.pairs)

    def judge_end(k: int, end: int) -> Record:
        population = config.populations[k]
        settings = (population, config.test)
        judge = population.judge(data, config.test, BATCH)
        return run.record(settings, f"end-{end}", lambda: dict(judge.evaluate(trained[k][end])))

    def judge_line(k: int, label: str, is_reset: bool, pair: int) -> Record:
        ends = trained[k][2 * pair : 2 * pair + 2]
        inner = _judge_inner(config, config.populations[k], label, is_reset, pair, ends, data, run)["points"]
        first, last = judged[k][2 * pair : 2 * pair + 2]
        return {"line": [{"t": 0.0, **first}, *inner, {"t": 1.0, **last}]}

    judged = run.grid("evaluating networks", judge_end, columns, range(2 * config.pairs))
    found = run.grid("aligning", judge_line, columns, list(METHODS), (False, True), pairs)
    population = config.populations[0]
    accuracies = [fmean(one["accuracy"] for one in ends) for ends in judged]
    rows = [
        Row.of(
            f"x{config.widths[k]}: {label}" + (", new statistics" if is_reset else ""),
            [found[k][m][is_reset]],
            QUANTITIES,
            curve=mean_curve([record["line"] for record in found[k][m][is_reset]]) if k == columns[-1] else (),
        )
        for k in columns
        for m, label in enumerate(METHODS)
        for is_reset in (False, True)
    ]
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
        QUANTITIES,
        tuple(rows),
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


def _judge_inner(
    config: Resnets,
    population: Population,
    label: str,
    is_reset: bool,
    pair: int,
    ends: Sequence[Params],
    data: ImageData,
    run: Run,
) -> Record:
    """Evaluate the networks between the ends of a pair."""

    def make() -> Record:
        judge = population.judge(data, config.test, BATCH)
        read = population.batches(data, config.read, BATCH)
        symmetry = rg.discover(judge.module, (data.test_images[:4],))
        a, b = ends
        generator = run.generator("alignment", METHODS[label], pair)
        moved, _ = align(METHODS[label], a, b, symmetry, rg.Task(judge.module, read), generator)
        points = []
        for k in range(1, config.points - 1):
            t = k / (config.points - 1)
            params = interpolate(a, moved, t)
            if is_reset:
                params = rg.reset_batchnorm(params, judge.module, [images for images, _ in read])
            points.append({"t": t, **judge.evaluate(params)})
        return {"points": points}

    settings = (population, METHODS[label], is_reset, config.points, config.read, config.test)
    return run.record(settings, str(pair), make)


EXPERIMENTS = {
    "resnet20": Experiment("ResNet20 with batch normalization: barriers by width", config, measure),
}
