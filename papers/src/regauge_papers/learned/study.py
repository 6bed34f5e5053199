"""Common parts of experiments on learned alignment: populations, matchers, and aligned pairs.

References:
    Navon et al. (2024), section 6 and appendix E.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

import regauge as rg
from regauge import learn
from regauge.alignment import Method
from regauge.alignment.descent_method import DescentMethod
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.params import Params, select
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import cross_entropy
from regauge.learn import MatchingConfig
from regauge.storage import Store
from regauge.zoo.training.config import ClassHalves, PopulationConfig
from regauge.zoo.training.examples import Examples, load_examples
from regauge_papers.experiment import Run, make_once
from regauge_papers.populations import SECONDS
from regauge_papers.table import AREA, BARRIER, Record, Row
from regauge_papers.ways import TEMPERED, TEMPERED_NOTE, Way
from regauge_papers.zoo_populations import train_population

POINTS = 11
"""The number of networks on each line, including both endpoints."""
BATCH = 512
"""The number of examples in a batch. With batches of 128 examples, the final loss of Sinkhorn on MNIST is three times
as high, and matchers get worse."""
QUANTITIES = (BARRIER, AREA, SECONDS)
"""The columns of tables."""


@dataclass(frozen=True)
class Population:
    """Networks of one kind, and the number of networks that no matcher sees."""

    folder: str  # beginning of the name of its folder
    config: PopulationConfig
    pairs: int  # of networks, kept for the table; of signals one of each
    judged: int | None = None  # examples kept from training that lines are judged on; all by default


@dataclass(frozen=True)
class Lessons:
    """Populations, examples and settings for the training of a matcher."""

    populations: tuple[Population, ...]
    matching: MatchingConfig
    examples: int  # for training, that the networks are run on; methods with data see as many
    networks: int | None = None  # of each population that it learns from; all that are not kept by default


@dataclass(frozen=True, eq=False)
class Networks:
    """The networks of a population, with their training examples."""

    population: Population
    store: Store
    examples: Examples

    @classmethod
    def of(cls, population: Population, run: Run) -> "Networks":
        """Return the population, trained now or by an earlier run."""
        store = train_population(population.folder, population.config, run)
        return cls(population, store, load_examples(population.config.data))

    @cached_property
    def split(self) -> dict[str, NDArray[np.int64]]:
        """The indices of networks: the last networks are for the table, the networks before them for validation, and
        all others for training.

        Networks of the same signal are neighbors, and two networks of each of the last signals form a pair. Networks of
        the two halves of the classes alternate.
        """
        rows, order = self.store.rows, np.arange(len(self.store))
        if self.examples.is_signals:
            order = order[np.argsort(rows["signal"], kind="stable")]
        elif isinstance(self.population.config.subset, ClassHalves):
            halves = [order[np.asarray(rows["half"]) == half] for half in (0, 1)]
            order = np.stack([half[: min(map(len, halves))] for half in halves], 1).flatten()
        views = max(2, self.population.config.copies)
        tested, kept = views * self.population.pairs, views * max(2, len(order) // (20 * views))
        return {
            "test": order[-tested:].reshape(-1, views)[:, :2].flatten(),
            "validation": order[-tested - kept : -tested],
            "train": order[: -tested - kept],
        }

    @cached_property
    def tested(self) -> Params:
        """The networks that form the pairs of the table."""
        return self.store.read(self.split["test"])

    def pair(self, number: int) -> tuple[Params, Params]:
        """Return a pair of networks that is reserved for the table."""
        return select(self.tested, 2 * number), select(self.tested, 2 * number + 1)

    def task(self, count: int, number: int = 0, *, is_kept: bool = False) -> rg.Task:
        """Return a task on some training or held-out examples; for signals, on the signal of a pair."""
        known = self.examples
        inputs = known.validation_inputs[: self.population.judged] if is_kept else known.inputs[:count]
        targets = known.validation_targets if is_kept else known.targets
        if known.is_signals:
            targets = targets[int(self.store.rows["signal"][self.split["test"][2 * number]])]
        batches = list(zip(torch.split(inputs, BATCH), torch.split(targets[: len(inputs)], BATCH), strict=True))
        criterion = functional.mse_loss if targets.is_floating_point() else cross_entropy
        return rg.Task(self.store.architecture.module(), batches, criterion)


def train_matcher(lessons: Lessons, several: Sequence[Networks], run: Run) -> learn.LearnedMatching:
    """Return the matcher for the populations in `lessons`, trained now or by an earlier run."""
    is_signals, stores = several[0].examples.is_signals, [one.store for one in several]
    path = run.place("matchers", (lessons, BATCH))
    state = path.with_name(f"{path.stem}.partial.safetensors")

    def write() -> None:
        made = learn.fit_matching(
            stores,
            config=lessons.matching,
            task=[one.task(lessons.examples) for one in several],
            generator=run.generator("matcher", lessons.matching),
            split=join_splits(several, lessons.networks),
            pair_by="signal" if is_signals else None,
            inputs=several[0].examples.inputs[:512],
            state=state,
            progress=run.progress,
        )
        made.save(path, overwrite=True)
        state.unlink(missing_ok=True)

    make_once(path, write)
    return learn.load_matching(path, module=stores[0].architecture.module() if lessons.matching.probes else None)


@dataclass(frozen=True, eq=False)
class Trained:
    """A matcher with its results on pairs that it has not seen."""

    label: str
    lessons: Lessons
    matcher: learn.LearnedMatching
    ways: Sequence[Way]
    found: list[list[Record]]  # for each way a record of each pair

    @property
    def note(self) -> str:
        """Return a note on the training of the matcher, for a table."""
        return f"{self.label}: {describe_training(self.matcher, self.lessons)}"


def try_matchers(
    lessons: Mapping[str, Lessons],
    networks: Networks,
    ways: Callable[[str, learn.LearnedMatching], Sequence[Way]],
    run: Run,
) -> list[Trained]:
    """Train a matcher for each entry of `lessons`, and align the pairs of a population with each matcher.

    Args:
        lessons: The populations and training settings (`Lessons`) of each matcher, by the label of the matcher.
        networks: The population of the lessons.
        ways: A function that returns the rows of a matcher, given its label.
        run: The run that stores matchers and measurements; processes that share a run train different matchers.
    """

    def one(_: Progress, label: str) -> Trained:
        own = lessons[label]
        matcher = train_matcher(own, [networks], run)
        tried = ways(label, matcher)
        return Trained(label, own, matcher, tried, align_pairs(networks, tried, own.examples, run, own))

    # Silent: each training shows its own progress, and one takes much longer than another.
    return replace(run, progress=no_progress).grid("matchers", one, list(lessons))


def join_splits(several: Sequence[Networks], most: int | None) -> dict[str, NDArray[np.int64]]:
    """Return the joint split of several populations, with at most `most` training networks of each."""
    starts = np.cumsum([0, *(len(one.store) for one in several)])
    return {
        part: np.concatenate(
            [
                start + (one.split[part][:most] if part == "train" else one.split[part])
                for start, one in zip(starts[:-1], several, strict=True)
            ]
        )
        for part in ("train", "validation", "test")
    }


def untrained_ways(*, has_classes: bool, is_refined: bool = True) -> tuple[Way, ...]:
    """Return the rows without training: the rows of the paper, mixed matching, and for classifiers a fitted
    temperature.

    Rows that are refined by the midpoint loss are included only if `is_refined`.
    """
    return (
        Way("Naive"),
        *([Way(TEMPERED, is_tempered=True)] if has_classes else []),
        Way("Weight Matching", rg.WeightMatching()),
        Way("Mixed Matching", rg.alignment.MixedMatching()),
        *([Way("Mixed + Sinkhorn, midpoint", _refined(rg.alignment.MixedMatching()))] if is_refined else []),
        *([Way("Weight Matching + scales", rescaled(rg.WeightMatching()))] if has_classes and is_refined else []),
    )


def learned_ways(
    matcher: learn.LearnedMatching,
    label: str = "Deep-Align",
    *,
    is_refined: bool = True,
    has_classes: bool = False,
    is_detailed: bool = False,
) -> tuple[Way, ...]:
    """Return the rows of a matcher. With `is_detailed`, further rows have one sweep without data, and ten times the
    steps.
    """
    return (
        Way(label, _Alone(matcher)),
        *([Way(f"{label} and a sweep", _Alone(matcher, sweeps=1))] if is_detailed else []),
        Way(f"{label} and sweeps, judged", matcher),
        *([Way(f"{label} + Sinkhorn", _refined(matcher))] if is_refined else []),
        *([Way(f"{label} + Sinkhorn, 300 steps", _refined(matcher, steps=300))] if is_detailed else []),
        *([Way(f"{label} + scales", rescaled(_Alone(matcher)))] if has_classes and is_refined else []),
    )


FROM_IDENTITY = Way("Sinkhorn", rg.Sinkhorn(loss="midpoint", init=None, confidence=0.02, lr=0.3, steps=100, kept=0))
"""Sinkhorn, initialized at the identity. The paper uses 1,000 steps with a learning rate of 0.1."""


def _refined(init: Method, steps: int = 30) -> Method:
    return rg.Sinkhorn(loss="midpoint", init=init, steps=steps)


def rescaled(init: Method | None) -> Method:
    """Return a method that fits only scales to a given order of units, in as many steps as Sinkhorn takes."""
    return rg.ContinuousDescent("midpoint", init=init, steps=30)


@dataclass(frozen=True, repr=False)
class _Alone(Method):
    """Matching by the vectors of a learned matcher, optionally followed by sweeps; no data are used."""

    matcher: learn.LearnedMatching
    sweeps: int = 0

    def __repr__(self) -> str:
        return "Alone()"

    def match(self, problem: Problem) -> Results:
        return replace(self.matcher, sweeps=self.sweeps).match(replace(problem, task=None))


def align_pairs(
    networks: Networks,
    ways: Sequence[Way],
    examples: int,
    run: Run,
    lessons: Lessons | None = None,
    *,
    also: Callable[[Params, Params, Symmetry], Record] | None = None,
) -> list[list[Record]]:
    """Align the pairs of a population by each method, and evaluate the lines between them.

    At the scale "smoke", methods that descend take four steps.

    Args:
        networks: The population.
        ways: The methods that align pairs.
        examples: The number of training examples for methods that use data.
        run: The run that stores measurements.
        lessons: The populations and training settings of the matcher, if the methods use a matcher.
        also: A further measurement, given the first network, the moved second network and their symmetry.

    Returns:
        For each method, a record of each pair.
    """
    symmetry = networks.store.require_symmetry()
    ways = [replace(way, method=_shorten(way.method)) for way in ways] if run.scale == "smoke" else ways

    def one(way: Way, number: int) -> Record:
        a, b = networks.pair(number)
        task, judge = (networks.task(examples, number, is_kept=kept) for kept in (False, True))
        moved, seconds = way.align(a, b, symmetry, task, run.generator("alignment", way.label, number))
        curve = rg.line(a, moved, way.judge(judge, task), points=POINTS)
        more = also(a, moved, symmetry) if also else {}
        return {"line": list(curve.table), SECONDS.name: seconds if way.method else None, **more}

    settings = (networks.population, examples, lessons, BATCH)
    return run.records("aligning", settings, one, ways, range(networks.population.pairs))


def _shorten(method: Method | None) -> Method | None:
    return replace(method, steps=4, every=2) if isinstance(method, DescentMethod) else method


def rows_of(
    ways: Sequence[Way], found: Sequence[Sequence[Record]], paper: Mapping[str, str] | None = None, group: str = ""
) -> list[Row]:
    """Return a row for each method, labelled by group and method, with the barrier that the paper has for the label."""
    labels = [f"{group}: {way.label}" if group else way.label for way in ways]
    return [
        Row.of(label, [records], QUANTITIES, paper={"barrier": (paper or {}).get(label, "")}, is_drawn=not group)
        for label, records in zip(labels, found, strict=True)
    ]


def notes_of(networks: Networks) -> tuple[str, ...]:
    """Return notes on the evaluation of pairs."""
    examples = networks.examples
    where = "all examples" if examples.validation_inputs is examples.inputs else "examples kept from training"
    return (
        f"{networks.population.pairs} pairs of networks that no matcher has seen; losses on {where}, at {POINTS} "
        "points of each line",
        *_tell_accuracy(networks),
        "CPU s: of one pair alone; in batches of `rg.alignment.align_pairs` matchers take a fraction of it",
        *([] if networks.examples.is_signals else [TEMPERED_NOTE]),
    )


def _tell_accuracy(networks: Networks) -> tuple[str, ...]:
    """Return a note on the accuracy of the networks if they are classifiers."""
    if not networks.examples.is_classification:
        return ()
    found = np.asarray(networks.store.rows["validation_accuracy"], np.float64)
    return (
        f"accuracy of the networks on these examples: {found.mean():.3f}, from {found.min():.3f} to {found.max():.3f}",
    )


def describe_training(matcher: learn.LearnedMatching, lessons: Lessons) -> str:
    """Describe the training of a matcher in words."""
    return (
        f"a matcher trained on {matcher.about['networks']['train']} networks for {matcher.about['seconds']:.0f} "
        f"seconds: {matcher.about['steps']} steps of {lessons.matching.batch} pairs, with {lessons.examples:,} "
        "training examples"
    )
