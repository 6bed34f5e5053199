"""Positive scales of ReLU units, chosen by descent after an alignment; paper 001 does not change scales.

A hidden ReLU unit may be multiplied by any positive number if the outgoing weights are divided by this number. Paper
001 and the methods in its tables match only the orders of units. This experiment takes the order from weight matching
or mixed matching, and fits scales by descent on the midpoint loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import regauge as rg
from regauge.zoo import PopulationConfig
from regauge.zoo.presets import cifar10_mlps, fashion_mlps, mlp_architecture, mnist_mlps
from regauge_papers.experiment import Experiment, Run, Scale
from regauge_papers.learned import mlps
from regauge_papers.learned.study import (
    QUANTITIES,
    Networks,
    Population,
    align_pairs,
    notes_of,
    rescaled,
    rows_of,
    untrained_ways,
)
from regauge_papers.table import Table
from regauge_papers.ways import TEMPERED_NOTE, Way

PAIRS = {"smoke": 1, "cpu": 8, "paper": 50}
TEMPERED_WEIGHTS = "Weight Matching, temperature fitted"


@dataclass(frozen=True)
class Study:
    """Settings: populations by description, and the training examples for methods that use data."""

    tested: Mapping[str, Population]
    examples: int


def config(scale: Scale) -> Study:
    """Return the settings: MLPs with three hidden layers, of three widths on MNIST and on two other data sets."""
    kinds: dict[str, tuple[str, PopulationConfig]] = {
        f"MNIST, width {width}": (f"mnist-mlps-{width}", _of_width(width)) for width in (32, 128, 512)
    }
    kinds["Fashion-MNIST, width 128"] = ("fashion-mlps", fashion_mlps())
    kinds["CIFAR-10, width 128"] = ("cifar10-mlps", cifar10_mlps())
    few = partial(mlps.population, scale, count=2 * PAIRS[scale])
    tested = {what: replace(few(*kind), pairs=PAIRS[scale]) for what, kind in kinds.items()}
    if scale == "smoke":
        tested = dict(list(tested.items())[:1])
    return Study(tested, mlps.EXAMPLES[scale])


def measure(study: Study, run: Run) -> Table:
    """Align pairs of every population, with and without scales."""
    ways = (
        *untrained_ways(has_classes=True),
        Way(TEMPERED_WEIGHTS, rg.WeightMatching(), is_tempered=True),
        Way("Mixed Matching + scales", rescaled(rg.alignment.MixedMatching())),
        Way("Naive + scales", rescaled(None)),
    )
    rows = []
    for place, population in study.tested.items():
        networks = Networks.of(population, run)
        rows += rows_of(ways, align_pairs(networks, ways, study.examples, run), group=place)
    what, _, *more = notes_of(networks)
    notes = (
        what,
        f"methods with data see {study.examples:,} training examples",
        "scales: 30 steps on the loss halfway, as many as Sinkhorn has; the order of units stays what it was",
        f"{TEMPERED_WEIGHTS}: the control, since larger activations halfway are also larger outputs",
        *(note for note in more if note == TEMPERED_NOTE),
    )
    return Table("Positive scales of MLPs", notes, QUANTITIES, tuple(rows), paired="Weight Matching")


def _of_width(width: int) -> PopulationConfig:
    return replace(mnist_mlps(), architecture=mlp_architecture(784, width, width, width, 10))


EXPERIMENTS = {"scales": Experiment("MLPs: what positive scales do, beside orders of units alone", config, measure)}
