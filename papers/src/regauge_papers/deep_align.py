"""Paper 001, Equivariant Deep Weight Space Alignment (Deep-Align): methods that align without learning.

References:
    Navon et al. (2024), tables 1, 2 and 4, section 6 and appendix E.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import regauge as rg
from regauge.alignment import Method
from regauge.nets.classification import ClassifierConfig
from regauge.nets.mlp import mlp
from regauge.nets.vgg import VGG
from regauge.training.optimizers import Adam
from regauge.training.schedules import Constant
from regauge_papers.experiment import Experiment, Run, Scale
from regauge_papers.populations import (
    COMPARED,
    SECONDS,
    ClassifierWay,
    Comparison,
    DataName,
    Population,
    compare,
    small_images,
)
from regauge_papers.table import AREA, BARRIER, Table
from regauge_papers.ways import PUBLISHED_ACTIVATIONS, PUBLISHED_WEIGHTS, TEMPERED, TEMPERED_NOTE

Printed = Mapping[str, tuple[str, str]]
"""For each method, the barrier and the AUC as printed in the paper."""

TABLE_1_MNIST = {
    "Naive": ("2.007 ± 0.00", "0.835 ± 0.00"),
    "Weight Matching": ("0.047 ± 0.00", "0.011 ± 0.00"),
    "Activation Matching": ("0.024 ± 0.00", "0.007 ± 0.00"),
    "Sinkhorn": ("0.027 ± 0.00", "0.002 ± 0.00"),
    "WM + Sinkhorn": ("0.012 ± 0.00", "0.000 ± 0.00"),
}
TABLE_1_CIFAR10 = {
    "Naive": ("0.927 ± 0.00", "0.493 ± 0.00"),
    "Weight Matching": ("0.156 ± 0.00", "0.068 ± 0.00"),
    "Activation Matching": ("0.066 ± 0.00", "0.024 ± 0.00"),
    "Sinkhorn": ("0.183 ± 0.00", "0.072 ± 0.00"),
    "WM + Sinkhorn": ("0.137 ± 0.00", "0.050 ± 0.00"),
}
TABLE_2_CIFAR10 = {
    "Naive": ("1.124 ± 0.01", "0.524 ± 0.00"),
    "Weight Matching": ("0.661 ± 0.02", "0.178 ± 0.01"),
    "Activation Matching": ("0.238 ± 0.01", "0.000 ± 0.00"),
    "Sinkhorn": ("0.313 ± 0.01", "0.000 ± 0.00"),
    "WM + Sinkhorn": ("0.333 ± 0.01", "0.000 ± 0.00"),
}

PIXELS: Mapping[DataName, int] = {"digits": 64, "MNIST": 784, "CIFAR-10": 3072}
EXAMPLES: Mapping[DataName, int] = {"digits": 1000, "MNIST": 54_000, "CIFAR-10": 45_000}
"""The number of training images, without the tenth that the paper reserves for validation. The experiments of
`regauge_papers` do not use the reserved images."""
NORMALIZATION: Mapping[DataName, tuple[float, float]] = {
    "digits": (0.0, 1.0),
    "MNIST": (0.1307, 0.3081),
    "CIFAR-10": (0.5, 0.5),
}
"""The mean and standard deviation of pixels in the authors' published code; the paper does not specify them."""
MLP_TRAINING = ClassifierConfig(epochs=5, batch=128, optimizer=Adam(5e-3), schedule=Constant())
"""The paper specifies 5 epochs, batch size 128 and learning rate 5e-3, but no optimizer. The optimizer here is Adam."""
CNN_TRAINING = ClassifierConfig(epochs=20, batch=128, optimizer=Adam(1e-4), schedule=Constant())
"""The paper specifies 20 epochs of Adam with learning rate 1e-4. The batch size here is the batch size of the MLPs."""

SINKHORN_LR = 0.1
"""The learning rate of the paper. With 1,000 steps, a larger learning rate leads to worse optima."""
SINKHORN_BATCH = 256
"""The number of images per step, which the paper does not specify."""
REFINING = 10_000
"""The number of training images for refining a mixed matching."""


def table1_config(scale: Scale, data: DataName, printed: Printed, pairs: int, seeds: int) -> Comparison:
    """Return the settings for MLPs; at scale `paper`, there are 500 pairs of the paper's 1,000 test networks for each
    of three seeds.
    """
    if scale == "smoke":
        small = small_images() if data == "MNIST" else "digits"
        population = mlps(small, width=16, training=replace(MLP_TRAINING, epochs=2))
        return Comparison(population, _ways(printed, iterations=3), pairs=2, seeds=1, points=5, test=500)
    if scale == "paper":
        pairs, seeds = 500, 3
    return Comparison(mlps(data), _ways(printed), pairs, seeds, points=25)


def sinkhorn_config(scale: Scale, data: DataName, printed: Printed, pairs: int) -> Comparison:
    """Return the settings for the first pairs of table 1, with a row for each change of our Sinkhorn re-basin."""
    whole = table1_config(scale, data, printed, pairs, 1)
    return replace(whole, ways=_sinkhorn_ways(printed, 3 if scale == "smoke" else 1000))


def table2_config(scale: Scale) -> Comparison:
    """Return the settings for the CNN of table 4 on CIFAR-10. On a CPU, the CNN has half of the channels and is trained
    on a fifth of the images.
    """
    short = replace(CNN_TRAINING, epochs=4, optimizer=Adam(1e-3))
    if scale == "smoke":
        population = cnns("digits", replace(short, epochs=1), examples=500, narrow=8)
        return Comparison(population, _ways(TABLE_2_CIFAR10, iterations=2), pairs=1, seeds=1, points=3, test=100)
    if scale == "cpu":
        population = cnns("CIFAR-10", short, examples=10_000, narrow=2)
        ways = _ways(TABLE_2_CIFAR10, iterations=100)
        notes = (
            "reduced: half the channels, 10,000 training images, 4 epochs of Adam with 1e-3 (the paper: 20 epochs with "
            "1e-4 on all), 100 iterations of Sinkhorn (1,000), 2,000 test images, 2 pairs",
        )
        return Comparison(population, ways, pairs=2, seeds=1, points=11, test=2000, notes=notes)
    population = cnns("CIFAR-10", CNN_TRAINING, examples=EXAMPLES["CIFAR-10"])
    return Comparison(population, _ways(TABLE_2_CIFAR10), pairs=125, seeds=3, points=25)


def mlps(data: DataName, *, width: int = 128, training: ClassifierConfig = MLP_TRAINING) -> Population:
    """Return a population of MLPs with three hidden layers of a width."""
    widths = (PIXELS[data], width, width, width, 10)
    return Population(
        data, f"MLP {'-'.join(map(str, widths))}", lambda: mlp(*widths), training, EXAMPLES[data], NORMALIZATION[data]
    )


def cnns(data: DataName, training: ClassifierConfig, *, examples: int, narrow: int = 1) -> Population:
    """Return a population of the network of table 4, or of a network with fewer channels."""
    channels = [c // narrow for c in (16, 32, 32, 64, 64, 128, 128)]
    image, in_channels = (32, 3) if data == "CIFAR-10" else (8, 1)
    plan: list[int | Literal["pool"]] = [*channels[:3], "pool", *channels[3:5], "pool", *channels[5:], "pool"]

    def make() -> VGG:
        return VGG(plan, (), 10, image=image, in_channels=in_channels, norm="none")

    return Population(data, f"CNN {'-'.join(map(str, plan))}", make, training, examples, NORMALIZATION[data])


def measure(config: Comparison, run: Run) -> Table:
    """Measure every method on every pair."""
    population, training = config.population, config.population.training
    data = population.read(run)
    notes: tuple[str, ...] = (
        f"{population.architecture} on {data.name}, pixels normalized as in the published code; "
        f"{population.examples:,} images for training, "
        f"{training.epochs} epochs of Adam with {training.optimizer.lr:g}, batches of {training.batch}",
        f"{config.seeds} x {config.pairs} pairs of {2 * config.pairs} networks each, none in two pairs; losses are "
        f"cross entropies in nats on {min(config.test, len(data.test_targets)):,} test images, at {config.points} "
        "equally spaced points of each line",
        "barrier: largest excess of the loss over the straight line between the losses of the two networks; AUC: its "
        "integral, not below zero",
        f"Sinkhorn reads batches of {SINKHORN_BATCH} images, with the paper's constant learning rate "
        f"{SINKHORN_LR:g} unless a row says otherwise",
        "Weight Matching begins at the identity and keeps scales, as published",
    )
    if any(way.is_tempered for way in config.ways):
        notes += (
            "Activation Matching takes products that are not centered and keeps scales, as published; balanced scales, "
            "the start at the barycenter and correlations are ours. Mixed Matching and its refinement, on "
            f"{REFINING:,} images, are not in the paper",
            TEMPERED_NOTE,
        )
    else:
        notes += (
            "ours begins with a confidence of 0.1 and returns the best of what it judges (its start, the identity, and "
            "its plans rounded at two times) by the loss on all training images at three points of the line; the "
            "published one begins with 0.02 and returns the last",
        )
    return compare(config, data, run, (BARRIER, AREA, SECONDS), notes)


def _ways(printed: Printed, *, iterations: int = 1000) -> tuple[ClassifierWay, ...]:
    """Return the rows that need no learning. If the methods get data, include a row for regauge's default method."""

    def way(label: str, method: Method | None, batch: int = 1000) -> ClassifierWay:
        barrier, auc = printed[label]
        return ClassifierWay(label, method, batch=batch, paper={"barrier": barrier, "AUC": auc})

    every = min(iterations, rg.Sinkhorn.every)

    def sinkhorn(init: Method | None) -> rg.Sinkhorn:
        return rg.Sinkhorn(loss="random", init=init, steps=iterations, every=every, lr=SINKHORN_LR, kept=0)

    mixed = rg.alignment.MixedMatching()
    refined = rg.Sinkhorn(loss="midpoint", init=mixed, steps=min(iterations, rg.Sinkhorn.steps), every=every)
    return (
        way("Naive", None),
        ClassifierWay(TEMPERED, is_tempered=True),
        way("Weight Matching", PUBLISHED_WEIGHTS),
        way("Activation Matching", PUBLISHED_ACTIVATIONS),
        way("Sinkhorn", sinkhorn(None), SINKHORN_BATCH),
        way("WM + Sinkhorn", sinkhorn(PUBLISHED_WEIGHTS), SINKHORN_BATCH),
        ClassifierWay("Weight Matching, balanced", rg.WeightMatching()),
        ClassifierWay("Activation Matching, correlations", rg.ActivationMatching()),
        ClassifierWay("Balanced WM + Sinkhorn", sinkhorn(rg.WeightMatching()), batch=SINKHORN_BATCH),
        ClassifierWay("Mixed Matching", mixed),
        ClassifierWay("Mixed + Sinkhorn, midpoint", refined, batch=SINKHORN_BATCH, examples=REFINING),
    )


def _sinkhorn_ways(printed: Printed, iterations: int) -> tuple[ClassifierWay, ...]:
    """Return rows with Sinkhorn after weight matching: with the settings of table 1, with the published settings, with
    single changes, and with other learning rates.
    """
    every = min(iterations, rg.Sinkhorn.every)
    ours = rg.Sinkhorn(loss="random", init=PUBLISHED_WEIGHTS, steps=iterations, every=every, lr=SINKHORN_LR, kept=0)
    published = replace(ours, confidence=0.02, keeps="last")
    methods = {
        "WM + Sinkhorn, as in table 1": ours,
        "confidence 0.02": replace(ours, confidence=published.confidence),
        "the last element": replace(ours, keeps=published.keeps),
        "confidence 0.02, the last element": published,
        "learning rate 0.03": replace(ours, lr=0.03),
        "learning rate 0.3": replace(ours, lr=0.3),
        "learning rate 1": replace(ours, lr=1.0),
    }
    barrier, auc = printed["WM + Sinkhorn"]
    return (
        ClassifierWay(COMPARED, PUBLISHED_WEIGHTS),
        *(
            ClassifierWay(
                label,
                method,
                batch=SINKHORN_BATCH,
                paper={"barrier": barrier, "AUC": auc} if method is published else {},
            )
            for label, method in methods.items()
        ),
    )


EXPERIMENTS = {
    "table1": Experiment(
        "MLPs on MNIST: barrier and AUC of five methods",
        partial(table1_config, data="MNIST", printed=TABLE_1_MNIST, pairs=7, seeds=3),
        measure,
        takes_device=True,
    ),
    "table1-cifar10": Experiment(
        "MLPs on CIFAR-10: barrier and AUC of five methods",
        partial(table1_config, data="CIFAR-10", printed=TABLE_1_CIFAR10, pairs=5, seeds=1),
        measure,
        takes_device=True,
    ),
    "sinkhorn": Experiment(
        "what Sinkhorn re-basin after weight matching owes to our changes, on MNIST",
        partial(sinkhorn_config, data="MNIST", printed=TABLE_1_MNIST, pairs=7),
        measure,
        takes_device=True,
    ),
    "sinkhorn-cifar10": Experiment(
        "the same on CIFAR-10",
        partial(sinkhorn_config, data="CIFAR-10", printed=TABLE_1_CIFAR10, pairs=5),
        measure,
        takes_device=True,
    ),
    "table2": Experiment(
        "the CNN of table 4 on CIFAR-10: barrier and AUC of five methods", table2_config, measure, takes_device=True
    ),
}
