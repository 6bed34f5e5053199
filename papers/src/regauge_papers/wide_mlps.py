"""Pairs of wide MLPs on MNIST, the first networks that were found to have no barrier after alignment.

References:
    Ainsworth, Hayase and Srinivasa (2023), Git Re-Basin, section 5.1.
"""

from dataclasses import replace

import regauge as rg
from regauge.nets.classification import ClassifierConfig
from regauge.nets.mlp import mlp
from regauge.training.optimizers import AdamW
from regauge_papers.experiment import Experiment, Run, Scale
from regauge_papers.populations import (
    DISTANCE,
    SECONDS,
    ClassifierWay,
    Comparison,
    DataName,
    Population,
    compare,
    small_images,
)
from regauge_papers.table import BARRIER, Quantity, Table, halfway
from regauge_papers.ways import PUBLISHED_ACTIVATIONS, PUBLISHED_WEIGHTS, TEMPERED, TEMPERED_NOTE

QUANTITIES = (
    replace(BARRIER, digits=4),
    Quantity("loss halfway", 4, of=halfway("loss")),
    Quantity("accuracy halfway", 4, of=halfway("accuracy")),
    DISTANCE,
    SECONDS,
)
WAYS = (
    ClassifierWay("Naive", None),
    ClassifierWay(TEMPERED, is_tempered=True),
    ClassifierWay("Weight Matching", PUBLISHED_WEIGHTS),
    ClassifierWay("Weight Matching, balanced", rg.WeightMatching()),
    ClassifierWay("Activation Matching", PUBLISHED_ACTIVATIONS, examples=10_000),
    ClassifierWay("Mixed Matching", rg.alignment.MixedMatching(), examples=10_000),
)


def config(scale: Scale) -> Comparison:
    """Return the settings: five pairs 784-512-512-512-10, or small networks."""
    training = ClassifierConfig(epochs=5, batch=128, optimizer=AdamW(2e-3, weight_decay=0.1))
    if scale == "smoke":
        return Comparison(_population(small_images(), 16, training, 1000), WAYS, pairs=2, seeds=1, points=5, test=500)
    pairs = 5 if scale == "cpu" else 20
    return Comparison(_population("MNIST", 512, training, 60_000), WAYS, pairs=pairs, seeds=1, points=25)


def measure(config: Comparison, run: Run) -> Table:
    """Measure every method on every pair."""
    population, training = config.population, config.population.training
    data = population.read(run)
    notes = (
        f"{population.architecture} on {data.name}; {population.examples:,} images for training, "
        f"{training.epochs} epochs of AdamW, learning rate to {training.optimizer.lr:g} and down again, weight decay "
        f"{training.optimizer.weight_decay:g}, batches of {training.batch}",
        f"losses are cross entropies in nats on {min(config.test, len(data.test_targets)):,} test images, at "
        f"{config.points} equally spaced points of each line",
        "Weight Matching begins at the identity, Activation Matching takes products that are not centered, and both "
        "keep scales, as published; balanced scales and the mixture are ours. What reads data reads 10,000 training "
        "images",
        TEMPERED_NOTE,
    )
    return compare(config, data, run, QUANTITIES, notes)


def _population(data: DataName, width: int, training: ClassifierConfig, examples: int) -> Population:
    pixels = 64 if data == "digits" else 784
    widths = (pixels, width, width, width, 10)
    return Population(data, f"MLP {'-'.join(map(str, widths))}", lambda: mlp(*widths), training, examples)


EXPERIMENTS = {"pairs": Experiment("wide MLPs on MNIST: barriers of five pairs", config, measure, takes_device=True)}
