"""Table 1 on MNIST and figure 4a of paper 001: a matcher for each kind of networks, beside methods without training."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from regauge.learn import MatchingConfig
from regauge.papers.experiment import Run, Scale
from regauge.papers.learned.study import (
    QUANTITIES,
    Lessons,
    Networks,
    Population,
    align_pairs,
    describe_training,
    learned_ways,
    notes_of,
    rows_of,
    train_matcher,
    untrained_ways,
)
from regauge.papers.table import Table
from regauge.papers.ways import Way
from regauge.zoo.presets import mlp_architecture, mnist_mlps, sine_inrs
from regauge.zoo.training import Config


@dataclass(frozen=True)
class Study:
    """A population, how a matcher is trained on it, and what it is compared with."""

    what: str  # the networks, in words
    lessons: Lessons
    paper: Mapping[str, str] = field(default_factory=dict)  # printed barriers, by the label of the row
    notes: tuple[str, ...] = ()
    further: tuple[Way, ...] = ()  # rows without training that other tables do not have


def measure(study: Study, run: Run) -> Table:
    """Train the networks and the matcher, and align pairs of networks that it has not seen in every way."""
    lessons = study.lessons
    networks = Networks.of(lessons.populations[0], run)
    matcher = train_matcher(lessons, [networks], run)
    without = (*untrained_ways(has_classes=not networks.examples.is_signals), *study.further)
    trained = learned_ways(matcher, has_classes=not networks.examples.is_signals)
    found = align_pairs(networks, without, lessons.examples, run)
    found += align_pairs(networks, trained, lessons.examples, run, lessons)
    rows = rows_of((*without, *trained), found, study.paper)
    notes = (describe_training(matcher, lessons), *notes_of(networks), *study.notes)
    return Table(f"Learned alignment of {study.what}", notes, QUANTITIES, tuple(rows), paired="Weight Matching")


def config(scale: Scale, *, name: str, what: str, population: Config, paper: Mapping[str, str]) -> Study:
    """A population of that name, as large as the scale allows."""
    is_signals = name == "sines"
    line: dict[str, Any] = {"line_by": "outputs", "distance": 0.0} if is_signals else {}
    if scale == "smoke":
        matching = MatchingConfig(width=8, depth=1, vectors=8, epochs=1, batch=8, checked=2, **line)
        tiny = replace(population, architecture=mlp_architecture(64, 8, 8, 10), data="digits")
        short: dict[str, Any] = {"steps": 5} if is_signals else {"epochs": 1}
        kept = Population(f"{name}-smoke", replace(population if is_signals else tiny, count=24, **short), 2)
        return Study(what, Lessons((kept,), matching, 200), paper)
    count, seconds, pairs = (
        (2000 if is_signals else 640, 900.0, 16) if scale == "cpu" else (population.count, None, 100)
    )
    matching = MatchingConfig(
        depth=2,
        probes=0 if is_signals else 128,
        lr=3e-3,
        batch=16,
        epochs=100_000,
        seconds=seconds,
        is_cpu_time=True,
        **line,
    )
    if scale == "paper":
        matching = replace(matching, batch=32, epochs=100, is_cpu_time=False)
    kept = Population(name, replace(population, count=count), pairs)
    return Study(what, Lessons((kept,), matching, 8192), paper, (REDUCED,))


REDUCED = "reduced at the scale cpu: fewer networks, and 15 CPU minutes of training; the paper has thousands, on a GPU"
STUDIES = {
    "learned-mnist": ("mnist-mlps", "MLPs 784-128-128-128-10 on MNIST", mnist_mlps(), {
        "Naive": "2.007", "Weight Matching": "0.047", "Deep-Align": "0.005", "Deep-Align + Sinkhorn": "0.000",
    }),
    "learned-sines": ("sines", "sine networks 1-32-32-1 of waves", sine_inrs(), {}),
}  # fmt: skip
"""For each experiment the folder of the population, what it is in words, its training, and the paper's barriers."""
