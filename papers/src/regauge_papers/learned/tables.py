"""Table 1 on MNIST and figure 4a of paper 001: a matcher for each kind of networks, and untrained methods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from regauge.learn import LearnedMatching, MatchingConfig
from regauge.report.pictures import Chart, Series
from regauge.zoo import PopulationConfig
from regauge.zoo.presets import mlp_architecture, mnist_mlps, sine_inrs
from regauge_papers.experiment import Run, Scale
from regauge_papers.learned.study import (
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

COURSE = "Held-out pairs during training"
"""The title of the picture."""


@dataclass(frozen=True)
class Study:
    """Settings: a population, the training of a matcher on it, and the compared methods."""

    what: str  # the networks, in words
    lessons: Lessons
    paper: Mapping[str, str] = field(default_factory=dict)  # printed barriers, by the label of the row
    notes: tuple[str, ...] = ()
    further: tuple[Way, ...] = ()  # rows without training that other tables do not have
    others: Mapping[str, Lessons] = field(default_factory=dict)  # of further matchers, by the beginning of their rows
    is_detailed: bool = False  # whether there are rows of one sweep without data, and of a long Sinkhorn


def measure(study: Study, run: Run) -> Table:
    """Train the networks and the matchers, and align unseen pairs of networks by each method."""
    networks = Networks.of(study.lessons.populations[0], run)
    has_classes, examples = not networks.examples.is_signals, study.lessons.examples
    ways = [*untrained_ways(has_classes=has_classes), *study.further]
    found = align_pairs(networks, ways, examples, run)

    def learned(label: str, matcher: LearnedMatching) -> Sequence[Way]:
        return learned_ways(matcher, label, has_classes=has_classes, is_detailed=study.is_detailed)

    trained = try_matchers({"Deep-Align": study.lessons, **study.others}, networks, learned, run)
    for one in trained:
        ways += one.ways
        found += one.found
    courses = tuple(_course(one.label, one.matcher) for one in trained)
    return Table(
        f"Learned alignment of {study.what}",
        (*(one.note for one in trained), *notes_of(networks), *study.notes),
        QUANTITIES,
        tuple(rows_of(ways, found, study.paper)),
        pictures={"training": (Chart(COURSE, "step", "barrier halfway, training data", courses),)},
        paired="Weight Matching",
    )


def _course(label: str, matcher: LearnedMatching) -> Series:
    """Return a chart of the validation barrier after each epoch."""
    course = matcher.about["course"]
    return Series(label, [row["step"] for row in course], [row["midpoint excess"] for row in course])


def config(scale: Scale, *, name: str, what: str, population: PopulationConfig, paper: Mapping[str, str]) -> Study:
    """Return the settings: a population whose size depends on the scale."""
    is_signals = name == "sines"
    line: dict[str, Any] = {"line_by": "outputs", "distance": 0.0} if is_signals else {}
    if scale == "smoke":
        matching = MatchingConfig(width=8, depth=1, vectors=8, epochs=1, batch=8, checked=2, **line)
        tiny = replace(population, architecture=mlp_architecture(64, 8, 8, 10), data="digits")
        short: dict[str, Any] = {"steps": 5} if is_signals else {"epochs": 1}
        kept = Population(f"{name}-smoke", replace(population if is_signals else tiny, count=24, **short), 2)
        lessons = Lessons((kept,), matching, 200)
        others = {} if is_signals else {SMALL: replace(lessons, matching=replace(matching, width=4))}
        return Study(what, lessons, paper, others=others, is_detailed=not is_signals)
    count, seconds, pairs = (
        (2000, 900.0 if is_signals else 4200.0, 16) if scale == "cpu" else (population.count, None, 100)
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
    lessons = Lessons((Population(name, replace(population, count=count), pairs),), matching, 8192)
    several = {SMALL: replace(matching, width=32, probes=64, seconds=seconds and seconds / 3)}
    if seconds:
        several[SHORT] = replace(matching, seconds=seconds / 40)
    others = {} if is_signals else {label: replace(lessons, matching=one) for label, one in several.items()}
    return Study(what, lessons, paper, (REDUCED,), others=others, is_detailed=not is_signals)


SMALL, SHORT = "Small net", "Short training"
"""The rows of two further matchers: a matcher that reads networks in half of the time, and a matcher that is trained
for a fortieth of the time."""
REDUCED = "reduced at the scale cpu: 2,000 networks, and minutes of training; the paper has 8,000, on a GPU"
STUDIES = {
    "learned-mnist": ("mnist-mlps", "MLPs 784-128-128-128-10 on MNIST", mnist_mlps(), {
        "Naive": "2.007", "Weight Matching": "0.047", "Deep-Align": "0.005", "Deep-Align + Sinkhorn": "0.000",
    }),
    "learned-sines": ("sines", "sine networks 1-32-32-1 of waves", sine_inrs(), {}),
}  # fmt: skip
"""For each experiment: the folder of the population, a description, the training, and the paper's barriers."""
