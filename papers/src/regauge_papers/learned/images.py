"""Figure 4b and the last column of table 6: sine networks of CIFAR-10 images, and losses of their matcher.

References:
    Navon et al. (2024), figure 4, table 6, and appendices E and F.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from regauge.learn import LearnedMatching, MatchingConfig
from regauge.training.optimizers import Adam
from regauge.zoo.presets import cifar10_inrs, siren_architecture
from regauge_papers.experiment import Experiment, Run, Scale
from regauge_papers.learned.study import (
    FROM_IDENTITY,
    QUANTITIES,
    Lessons,
    Networks,
    Population,
    align_pairs,
    learned_ways,
    notes_of,
    rows_of,
    try_matchers,
    untrained_ways,
)
from regauge_papers.table import Table
from regauge_papers.ways import Way

LINE = "Deep-Align"
"""The row of a matcher that is trained without the distance loss, as in the paper for networks of signals."""
LOSSES: Mapping[str, Mapping[str, Any]] = {
    LINE: {"distance": 0.0},
    "Deep-Align by distance": {"line": 0.0},
    "Deep-Align by all losses": {},
}
"""For each row, the loss weights that differ from the loss weights for classifiers."""
PAPER = {LINE: "0.063", "Deep-Align by distance": "0.127", "Deep-Align by all losses": "0.087"}


@dataclass(frozen=True)
class Study:
    """Settings: networks that represent images, and the training of matchers with each set of losses."""

    lessons: Lessons
    notes: tuple[str, ...] = ()


def measure(study: Study, run: Run) -> Table:
    """Train the networks and a matcher with each set of losses, and align two networks of each unseen image."""
    lessons = study.lessons
    (population,) = lessons.populations
    networks = Networks.of(population, run)
    ways = [*untrained_ways(has_classes=False), FROM_IDENTITY]
    found = align_pairs(networks, ways, lessons.examples, run)

    def learned(label: str, matcher: LearnedMatching) -> Sequence[Way]:
        return learned_ways(matcher, label)[: None if label == LINE else 1]

    several = {
        label: replace(lessons, matching=replace(lessons.matching, **weights)) for label, weights in LOSSES.items()
    }
    trained = try_matchers(several, networks, learned, run)
    for one in trained:
        ways += one.ways
        found += one.found
    notes = (
        f"{population.config.count // population.config.copies} images, {population.config.copies} networks of each; "
        "losses are mean squared errors of pixels in [0, 1]",
        *(one.note for one in trained),
        "all matchers learn to recognize changed copies; Deep-Align also lowers the difference between outputs on the "
        "line and the mix of both networks' outputs, another one the distance of the weights, and the last one both",
        *notes_of(networks),
        *study.notes,
    )
    rows = tuple(rows_of(ways, found, PAPER))
    return Table("Learned alignment of images", notes, QUANTITIES, rows, "mean squared error", paired="Weight Matching")


def config(scale: Scale) -> Study:
    """Return the settings: images of CIFAR-10, or the digits for test runs."""
    line: dict[str, Any] = {"line_by": "outputs"}
    if scale == "smoke":
        architecture = siren_architecture(2, 4, 1, depth=2)
        tiny = replace(cifar10_inrs(15), architecture=architecture, data="digits-signals", steps=5, copies=3)
        matching = MatchingConfig(width=8, depth=1, vectors=8, epochs=1, batch=4, checked=2, **line)
        return Study(Lessons((Population("digits-inrs-smoke", tiny, 1),), matching, 64))
    if scale == "cpu":
        small = replace(cifar10_inrs(320), data="cifar10-16-signals", steps=500, optimizer=Adam(lr=1e-3))
        matching = MatchingConfig(depth=2, lr=3e-3, batch=16, epochs=100_000, seconds=40.0, is_cpu_time=True, **line)
        return Study(Lessons((Population("cifar10-inrs", small, 16),), matching, 256), notes=(REDUCED,))
    matching = MatchingConfig(depth=4, lr=5e-4, epochs=300, **line)
    return Study(Lessons((Population("cifar10-inrs", cifar10_inrs(), 1000),), matching, 1024))


REDUCED = (
    "reduced: 64 images of 16 x 16 pixels (the paper: 60,000 of 32 x 32), 500 steps of Adam with 1e-3 (10,000 with "
    "1e-4), and 40 CPU seconds of training for each matcher (300 epochs)"
)
EXPERIMENTS = {
    "learned-images": Experiment("sine networks of CIFAR-10 images: which losses train the matcher", config, measure)
}
