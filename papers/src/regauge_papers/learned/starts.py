"""Figure 7: a matcher as the initialization of Sinkhorn (by steps and by time) and of weight matching.

References:
    Navon et al. (2024), figure 7 and appendix F; figure 4, the barrier by the number of steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import regauge as rg
from regauge.alignment import Method
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.learn import MatchingConfig
from regauge.report.pictures import Chart, Series
from regauge.zoo import PopulationConfig
from regauge.zoo.presets import mlp_architecture, mnist_mlps, sine_inrs
from regauge_papers.experiment import Experiment, Run, Scale
from regauge_papers.learned.study import (
    BATCH,
    QUANTITIES,
    Lessons,
    Networks,
    Population,
    align_pairs,
    describe_training,
    learned_ways,
    notes_of,
    train_matcher,
)
from regauge_papers.populations import SECONDS
from regauge_papers.table import BARRIER, Quantity, Record, Row, Table, summarize
from regauge_papers.ways import TEMPERED_NOTE, Way

COSINE = Quantity("cosine")
"""The cosine between the parameters of two networks after scales are balanced: the objective of weight matching,
divided by the norms of both networks."""


@dataclass(frozen=True)
class Study:
    """Settings: a matcher, and the numbers of Sinkhorn steps after each initialization."""

    what: str  # the networks, in words
    lessons: Lessons
    steps: tuple[int, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Continued(Method):
    """Weight matching that is initialized by the result of another method."""

    start: Method

    def match(self, problem: Problem) -> Results:
        """See `align`. The method that computes the initial element gets no data."""
        found = self.start.match(replace(problem, task=None))
        return rg.WeightMatching(init=found.element).match(problem)


def measure(study: Study, run: Run) -> Table:
    """Continue every initialization by Sinkhorn, and the matcher also by weight matching."""
    lessons = study.lessons
    networks = Networks.of(lessons.populations[0], run)
    matcher = train_matcher(lessons, [networks], run)
    series = series_of(learned_ways(matcher)[0], study.steps)
    ways = [way for several in series.values() for way in several]
    alone = learned_ways(matcher)[0].method
    assert alone is not None
    ways.append(Way("Deep-Align + Weight Matching", Continued(alone)))
    found = align_pairs(networks, ways, lessons.examples, run, lessons, also=cosine_of)
    quantities = (*QUANTITIES, COSINE)
    rows = tuple(
        Row.of(way.label, [records], quantities, is_drawn=False) for way, records in zip(ways, found, strict=True)
    )
    notes = (
        describe_training(matcher, lessons),
        *(note for note in notes_of(networks) if note != TEMPERED_NOTE),
        f"Sinkhorn: on the loss halfway between the networks, in batches of {BATCH} examples; after no alignment with "
        "a learning rate of 0.3 and little confidence in the start, after others with the settings of this library",
        f"{COSINE.name}: of both networks' parameters with balanced scales, which is what weight matching maximizes",
        "the paper shows these results as figures, without numbers",
        *study.notes,
    )
    known = {row.label: row for row in rows}
    picture = tuple(
        draw_starts({label: [known[way.label] for way in several] for label, several in series.items()}, study.steps)
    )
    title = f"Starts of Sinkhorn and of weight matching: {study.what}"
    return Table(title, notes, quantities, rows, pictures={"starts": picture}, paired="Weight Matching")


def series_of(matcher: Way, steps: Sequence[int]) -> dict[str, list[Way]]:
    """Return, for each initialization, rows without Sinkhorn and with the given numbers of steps."""
    starts = (
        Way("Naive"),
        Way("Weight Matching", rg.WeightMatching()),
        Way("Mixed Matching", rg.alignment.MixedMatching()),
    )
    return {
        start.label: [
            start,
            *(
                replace(start, label=f"{start.label} + Sinkhorn, {count} steps", method=sinkhorn(start.method, count))
                for count in steps
            ),
        ]
        for start in (*starts, matcher)
    }


def sinkhorn(start: Method | None, steps: int) -> rg.Sinkhorn:
    """Return Sinkhorn with a number of steps from an initialization, evaluated at the end."""
    method = rg.Sinkhorn(loss="midpoint", init=start, steps=steps, every=steps)
    return replace(method, confidence=0.02, lr=0.3) if start is None else method


def cosine_of(a: Params, b: Params, symmetry: Symmetry) -> Record:
    """Return the cosine between two networks, each represented by the network of smallest norm in its orbit."""

    def product(left: Params, right: Params) -> float:
        return rg.align(left, right, symmetry, method=rg.WeightMatching(max_sweeps=1)).initial

    return {COSINE.name: product(a, b) / (product(a, a) * product(b, b)) ** 0.5}


def draw_starts(rows: Mapping[str, Sequence[Row]], steps: Sequence[int]) -> tuple[Chart, Chart]:
    """Return charts of the barrier of each initialization by Sinkhorn steps, and by total CPU seconds.

    Barriers far above the barriers of all aligned initializations are not shown.
    """

    def series(label: str, xs: Sequence[float], several: Sequence[Row]) -> Series:
        found = [summarize(row.values[BARRIER.name]) for row in several]
        low, high = zip(*(one.span for one in found), strict=True)
        return Series(label, xs, [one.mean for one in found], low, high)

    by_steps = tuple(series(label, (0, *steps), several) for label, several in rows.items())
    timed = {label: [row for row in several if SECONDS.name in row.values] for label, several in rows.items()}
    by_time = tuple(
        series(label, [summarize(row.values[SECONDS.name]).mean for row in several], several)
        for label, several in timed.items()
    )
    aligned = [one.y[0] for one in by_steps if SECONDS.name in rows[one.label][0].values]
    limits = (0.0, 1.5 * max(aligned)) if any(aligned) else None
    return (
        Chart("By steps", "steps of Sinkhorn", "barrier", by_steps, y_limits=limits),
        Chart("By time", "CPU s", "barrier", by_time, y_limits=limits),
    )


@dataclass(frozen=True)
class Kind:
    """Networks that are aligned from several initializations."""

    what: str  # in words
    folder: str  # of the population
    population: PopulationConfig
    tiny: PopulationConfig  # the population of a test run
    count: int  # networks at the scale "cpu"
    pairs: int  # of them kept for the table
    matching: MatchingConfig
    examples: int


def config(scale: Scale, *, kind: Kind) -> Study:
    """Return the settings: the networks of a kind, and a matcher of these networks."""
    if scale == "smoke":
        small = replace(kind.matching, width=8, depth=1, vectors=8, probes=0, epochs=1, batch=4, checked=2)
        tiny = Population(f"{kind.folder}-start-smoke", kind.tiny, 1)
        return Study(kind.what, Lessons((tiny,), small, 128), (1, 3))
    if scale == "paper":
        whole = Population(kind.folder, kind.population, 100)
        matching = replace(kind.matching, batch=32, epochs=100)
        return Study(kind.what, Lessons((whole,), matching, kind.examples), STEPS)
    population = Population(kind.folder, replace(kind.population, count=kind.count), kind.pairs)
    matching = replace(kind.matching, epochs=100_000, seconds=BUDGET, is_cpu_time=True)
    note = f"reduced: {kind.count} networks, and {BUDGET:.0f} CPU seconds of training"
    return Study(kind.what, Lessons((population,), matching, kind.examples), STEPS, (note,))


STEPS = (3, 10, 30, 100)
"""The numbers of Sinkhorn steps after each initialization. The paper uses up to 1,000 steps."""
BUDGET = 60.0
"""The CPU seconds for training a matcher at the scale "cpu"."""
KINDS = {
    "learned-start": Kind(
        "MLPs 784-128-128-128-10 on MNIST",
        "mnist-mlps",
        mnist_mlps(),
        replace(mnist_mlps(12), architecture=mlp_architecture(64, 8, 8, 10), data="digits", epochs=1),
        count=256,
        pairs=8,
        matching=MatchingConfig(depth=2, probes=128, lr=3e-3, batch=16),
        examples=4096,
    ),
    "learned-start-sines": Kind(
        "sine networks 1-32-32-1 of waves",
        "sines",
        sine_inrs(),
        replace(sine_inrs(12), steps=5),
        count=240,
        pairs=12,
        matching=MatchingConfig(depth=2, lr=3e-3, batch=16, line_by="outputs", distance=0.0),
        examples=512,
    ),
}
EXPERIMENTS = {
    name: Experiment(f"starts of Sinkhorn and of weight matching: {kind.what}", partial(config, kind=kind), measure)
    for name, kind in KINDS.items()
}
