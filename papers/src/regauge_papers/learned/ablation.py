"""Table 6 of paper 001: matchers that are trained with two or three losses."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from regauge.zoo.presets import cifar10_mlps, mnist_mlps
from regauge_papers.experiment import Experiment, Run, Scale
from regauge_papers.learned import mlps
from regauge_papers.learned.study import (
    QUANTITIES,
    Lessons,
    Networks,
    align_pairs,
    learned_ways,
    notes_of,
    rows_of,
    try_matchers,
    untrained_ways,
)
from regauge_papers.table import Table

OBJECTIVES: Mapping[str, Mapping[str, Any]] = {
    "supervised and line": {"distance": 0.0},
    "supervised and distance": {"line": 0.0},
    "all three": {},
}
"""For each row, the loss weights that differ from the defaults of `MatchingConfig`."""
PAPER = {"MNIST": ("0.007", "0.061", "0.005"), "CIFAR-10": ("0.070", "0.343", "0.078")}
POPULATIONS = {"MNIST": ("mnist-mlps", mnist_mlps(), None), "CIFAR-10": ("cifar10-mlps", cifar10_mlps(), 96)}
"""For each data set: the name of the folder, the training, and the number of networks at the scale `cpu` (None: the
default)."""


@dataclass(frozen=True)
class Study:
    """Settings: a matcher for each choice of losses, all trained on the same networks."""

    data: str
    lessons: Mapping[str, Lessons]  # by the losses, in words


def config(scale: Scale, *, data: str) -> Study:
    """Return the settings: MLPs with three hidden layers of 128 units."""
    folder, population, count = POPULATIONS[data]
    lessons = mlps.lessons(scale, mlps.population(scale, folder, population, count=count if scale == "cpu" else None))
    return Study(
        data,
        {
            label: replace(lessons, matching=replace(lessons.matching, **weights))
            for label, weights in OBJECTIVES.items()
        },
    )


def measure(study: Study, run: Run) -> Table:
    """Train the matchers, and align the same pairs with each matcher."""
    first = next(iter(study.lessons.values()))
    networks = Networks.of(first.populations[0], run)
    without = untrained_ways(has_classes=True, is_refined=False)
    rows = rows_of(without, align_pairs(networks, without, first.examples, run))
    trained = try_matchers(study.lessons, networks, lambda _, one: learned_ways(one, is_refined=False), run)
    for one, printed in zip(trained, PAPER[study.data], strict=True):
        rows += rows_of(one.ways, one.found, {f"{one.label}: Deep-Align": printed}, one.label)
    matching = first.matching
    notes = (
        f"supervised: units of a changed copy are recognized (weight {matching.supervised:g} where a loss is not left "
        f"out); line: the loss at a random point between two networks ({matching.line:g}); distance: between their "
        "parameters, relative (0.1)",
        *(one.note for one in trained),
        "whatever they are trained with, the weights of the lowest barrier on pairs for validation are kept",
        *notes_of(networks),
        mlps.REDUCED,
    )
    title = f"Losses that train a matcher of {networks.store.architecture.name} on {networks.examples.name}"
    return Table(title, notes, QUANTITIES, tuple(rows), paired="Weight Matching")


EXPERIMENTS = {
    name: Experiment(f"MLPs on {data}: losses that train a matcher (table 6)", partial(config, data=data), measure)
    for name, data in {"learned-ablation": "MNIST", "learned-ablation-cifar10": "CIFAR-10"}.items()
}
