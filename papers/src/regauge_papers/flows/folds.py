"""Guidance of flows on breast cancer (table 7.1), whose strength is chosen without the test cases.

The training cases of populations are divided into three parts. Networks, a flow and the guidance are trained on two
parts. The guidance with the least loss on the third part is chosen. The test cases are used only to measure the chosen
guidance.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from regauge import flow
from regauge.core.params import Params
from regauge.core.task import Task
from regauge.flow.alignment import align_points, find_reference
from regauge.flow.judging import make_controls
from regauge.flow.manifold import Points
from regauge.flow.novelty import nearest, spread
from regauge.flow.representation import Representation
from regauge.flow.space import Space
from regauge.report.pictures import Chart, Series
from regauge.zoo import Examples, PopulationConfig, load_examples
from regauge_papers.experiment import Run, Scale
from regauge_papers.flows import studies
from regauge_papers.flows.networks import Networks
from regauge_papers.table import Quantity, Record, Row, Table

QUANTITIES = (
    Quantity("loss", 4),
    Quantity("loss, seen cases", 4),
    Quantity("loss, test cases", 4),
    Quantity("accuracy, test cases", 4),
    Quantity("nearest", 3),
    Quantity("spread", 3),
)
FOLDS = 3
"""The number of parts of the training cases. In turn, networks are trained without each of the parts."""
DROPOUTS = (0.0, 0.1, 0.2, 0.4)
"""The shares of input values that are set to zero during guidance."""
STRENGTHS = (10.0, 30.0, 60.0)
"""The strengths of guidance. A strength is the sum of the learning rates of all steps."""
UNGUIDED, HELD_OUT, MEANS = "no guidance", "held-out networks", "means of 16"


@dataclass(frozen=True)
class Study:
    """Settings: a population of each fold, the flow that is fitted to it, and the guidance."""

    population: PopulationConfig
    settings: flow.FlowConfig
    dropouts: tuple[float, ...]
    strengths: tuple[float, ...]
    drawn: int
    steps: int = studies.Drawing.steps


def first() -> Examples:
    """Return the training cases; the first third, in a random order, is reserved for validation."""
    return _leave_out(0)


def second() -> Examples:
    """Return the training cases; the second third, in the same order, is reserved for validation."""
    return _leave_out(1)


def third() -> Examples:
    """Return the training cases; the last third, in the same order, is reserved for validation."""
    return _leave_out(2)


def config(scale: Scale) -> Study:
    """Return the settings: the flow of table 7.1, with 1,000 runs and 30 CPU seconds for each third of the training
    cases.
    """
    study = studies.uci(scale)
    settings = study.flows[0].settings
    if scale == "smoke":
        return Study(study.population, settings, (0.0, 0.2), (3.0, 10.0), study.drawn, 2)
    population = replace(study.population, count=1000)
    return Study(population, replace(settings, seconds=30.0), DROPOUTS, STRENGTHS, 50)


def measure(study: Study, run: Run) -> Table:
    """Train networks and fit a flow for every fold, sample with every guidance, and evaluate the samples on the
    left-out cases and the test cases.
    """
    folds = [Fold(study, run, make) for make in (first, second, third)]
    pulls = [(strength, dropout) for dropout in study.dropouts for strength in study.strengths]
    guided = {studies.describe_pull(*pull): pull for pull in pulls}

    def score(label: str, number: int) -> Record:
        fold = folds[number]
        if label in (HELD_OUT, MEANS):
            return fold.judge(fold.held_out if label == HELD_OUT else fold.make_means())
        return fold.judge(fold.draw(*guided.get(label, (0.0, 0.0))))

    labels = (HELD_OUT, MEANS, UNGUIDED, *guided)
    found = dict(zip(labels, run.records("thirds", study, score, labels, range(FOLDS)), strict=True))
    rows = [Row.of(label, [records], QUANTITIES) for label, records in found.items()]
    examples = folds[0].examples
    notes = (
        f"{study.population.architecture.name} on breast cancer: three times {study.population.count} runs on two "
        f"thirds of the cases that populations are trained on ({len(examples.inputs)} of "
        f"{len(examples.inputs) + len(examples.validation_inputs)}), judged on the last third; n: thirds",
        f"{study.drawn} networks drawn from each flow in {study.steps} steps of Heun's method, guided by the loss on "
        "the cases that the networks were trained on; strength: the sum of the learning rates of all steps; dropped: "
        "the share of the inputs' values that are set to zero, others in each step",
        "loss: on the third that was left out, by which guidance is chosen; test cases: the 114 of table 7.1; nearest: "
        "median distance to the nearest training network; spread: mean distance of two; in units of held-out networks, "
        "after pairs are aligned",
    )
    panels = tuple(_draw(study, found, name) for name in ("loss", "loss, test cases"))
    return Table(
        "Strength of guidance, by thirds of the training cases",
        notes,
        QUANTITIES,
        tuple(rows),
        pictures={"strengths": panels},
        paired=MEANS,
    )


@dataclass(frozen=True, eq=False)
class Fold:
    """Networks and a flow that are trained on some of the cases."""

    study: Study
    run: Run
    make: Callable[[], Examples]

    @cached_property
    def examples(self) -> Examples:
        """The cases of the fold: seen cases for training, left-out cases for validation."""
        return self.make()

    @cached_property
    def networks(self) -> Networks:
        """The population."""
        name = self.make.__name__
        settings = replace(self.study.population, data=f"{__name__}:{name}")
        return Networks.of(f"uci-{name}", settings, self.run)

    @cached_property
    def held_out(self) -> Params:
        """Networks to which the flow was not fitted."""
        return self.networks.read("test", self.study.drawn)

    @cached_property
    def space(self) -> Space:
        """The space in which networks are compared."""
        return Space.of(self.networks.read("train"), self.networks.store.require_symmetry(), Representation("sphere"))

    @cached_property
    def middle(self) -> Tensor:
        """The network of the fold to which all other networks are aligned."""
        return find_reference(self.space, self.space.enter(self.networks.read("train")))

    @cached_property
    def train(self) -> Points:
        """The aligned training networks."""
        return self.align(self.networks.read("train"))

    @cached_property
    def units(self) -> tuple[float, float]:
        """The distances of held-out networks to the nearest training network, and to one another."""
        return self._measure(self.align(self.held_out))

    def align(self, params: Params) -> Points:
        """Return the points of networks, aligned to the mean of the training networks."""
        return align_points(self.space, self.middle, self.space.enter(params))

    def make_means(self) -> Params:
        """Return networks whose weights are the means of 16 aligned networks."""
        chance = self.run.generator("means", self.make.__name__)
        made = make_controls(self.space, self.train, self.units[0], self.study.drawn, chance)
        return self.space.leave(made[MEANS])

    def draw(self, strength: float, dropout: float) -> Params:
        """Sample networks from the flow, with guidance unless the strength is 0."""
        chance = self.run.generator("draw", self.make.__name__)
        guidance = None
        if strength:
            seen = Task(self.networks.store.architecture.module(), [(self.examples.inputs, self.examples.targets)])
            guidance = flow.Guidance(flow.BatchLoss(seen, dropout), strength)
        made = self.networks.fit("tokens", self.study.settings)
        return made.sample(self.study.drawn, generator=chance, steps=self.study.steps, guidance=guidance)

    def judge(self, params: Params) -> Record:
        """Measure the quality of networks on each part of the data, and their novelty and spread."""
        known = self.examples
        parts = {
            "": [(known.validation_inputs, known.validation_targets)],
            ", seen cases": [(known.inputs, known.targets)],
            ", test cases": self.networks.task(data="breast-cancer").batches,
        }
        module = self.networks.store.architecture.module()
        found: Record = {}
        for words, batches in parts.items():
            metrics = Task(module, batches).evaluate_each(params)
            found |= {f"{name}{words}": float(values.mean()) for name, values in metrics.items()}
        pairs = zip(("nearest", "spread"), self._measure(self.align(params)), self.units, strict=True)
        return found | {name: value / unit for name, value, unit in pairs}

    def _measure(self, points: Points) -> tuple[float, float]:
        return float(nearest(self.space, points, self.train)[0].median()), spread(self.space, points)


def _leave_out(number: int) -> Examples:
    known = load_examples("breast-cancer")
    places = torch.randperm(len(known.inputs), generator=torch.Generator().manual_seed(0)) % FOLDS
    kept, rest = places != number, places == number
    return Examples(
        f"{known.name} without third {number + 1}",
        known.inputs[kept],
        known.targets[kept],
        known.inputs[rest],
        known.targets[rest],
    )


def _draw(study: Study, found: Mapping[str, list[Record]], name: str) -> Chart:
    """Return a chart of a loss by guidance strength, for each share of dropped inputs and for unguided networks."""

    def mean(label: str) -> float:
        return statistics.fmean(record[name] for record in found[label])

    guided = tuple(
        Series(
            f"{dropout:.0%} of the inputs dropped",
            study.strengths,
            [mean(studies.describe_pull(strength, dropout)) for strength in study.strengths],
        )
        for dropout in study.dropouts
    )
    others = tuple(
        Series(label, study.strengths, [mean(label)] * len(study.strengths), style="dashed")
        for label in (HELD_OUT, MEANS)
    )
    title = "Cases that were left out" if name == "loss" else "Test cases"
    return Chart(title, "strength of guidance", "loss", (*guided, *others), is_log_x=True)
