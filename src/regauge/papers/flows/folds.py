"""How strongly flows of breast cancer are guided (table 7.1), chosen without the cases that they are judged on.

The cases that populations are trained on are cut into three parts. Networks and a flow know two of them, guidance uses
the same two, and drawn networks are judged on the third.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from regauge import flow
from regauge.core.params import Params
from regauge.core.task import Task
from regauge.flow.alignment import align_points, find_reference
from regauge.flow.controls import make_controls
from regauge.flow.space import Representation, Space
from regauge.papers.experiment import Run, Scale
from regauge.papers.flows import quality
from regauge.papers.flows.networks import Networks
from regauge.papers.table import Chart, Quantity, Record, Row, Series, Table
from regauge.zoo.training import Config, Examples, load_examples

QUANTITIES = (Quantity("loss", 4), Quantity("accuracy", 4), Quantity("loss, seen cases", 4))
FOLDS = 3
DROPOUTS = (0.0, 0.1, 0.2, 0.4)
STRENGTHS = (10.0, 30.0, 60.0)
UNGUIDED, HELD_OUT, MEANS = "no guidance", "held-out networks", "means of 16"


@dataclass(frozen=True)
class Study:
    """A population of each fold, the flow that is fitted to it, and how it is guided."""

    population: Config
    settings: flow.Config
    dropouts: tuple[float, ...]
    strengths: tuple[float, ...]
    drawn: int
    steps: int = quality.Drawing.steps


def first() -> Examples:
    """All cases that populations are trained on but the first third of a random order, which is for validation."""
    return _leave_out(0)


def second() -> Examples:
    """As `first`, without the second third."""
    return _leave_out(1)


def third() -> Examples:
    """As `first`, without the last third."""
    return _leave_out(2)


def config(scale: Scale) -> Study:
    """The study of table 7.1 with 1,000 runs and half the seconds for each flow."""
    study = quality.uci(scale)
    settings = study.flows[0].settings
    assert settings.seconds is not None
    if scale == "smoke":
        return Study(study.population, settings, (0.0, 0.2), (3.0, 10.0), study.drawn, 2)
    population = replace(study.population, count=1000)
    return Study(population, replace(settings, seconds=settings.seconds / 2), DROPOUTS, STRENGTHS, 50)


def measure(study: Study, run: Run) -> Table:
    """Train networks and fit a flow for every fold, draw with all kinds of guidance, and judge on the rest."""
    folds = [Fold(study, run, make) for make in (first, second, third)]
    pulls = [(strength, dropout) for dropout in study.dropouts for strength in study.strengths]
    guided = {quality.describe_pull(*pull): pull for pull in pulls}

    def score(label: str, number: int) -> Record:
        fold = folds[number]
        if label in (HELD_OUT, MEANS):
            return fold.judge(fold.held_out if label == HELD_OUT else fold.make_means())
        return fold.judge(fold.draw(*guided.get(label, (0.0, 0.0))))

    labels = (HELD_OUT, MEANS, UNGUIDED, *guided)
    found = dict(zip(labels, run.records("folds", study, score, labels, range(FOLDS)), strict=True))
    rows = [Row.of(label, [records], QUANTITIES) for label, records in found.items()]
    examples = folds[0].examples
    notes = (
        f"{study.population.architecture.name} on breast cancer: three times {study.population.count} runs on two "
        f"thirds of the cases that populations are trained on ({len(examples.inputs)} of "
        f"{len(examples.inputs) + len(examples.validation_inputs)}), judged on the last third; n: thirds",
        f"{study.drawn} networks drawn from each flow in {study.steps} steps of Heun's method, guided by the loss on "
        "the cases that the networks were trained on; strength: the sum of the learning rates of all steps; dropped: "
        "the share of the inputs' values that are set to zero, others in each step",
        "the cases that table 7.1 is judged on are not used here",
    )
    chart = Chart(
        "Networks of breast cancer by strength of guidance",
        "strength of guidance",
        "loss on cases that were left out",
        tuple(
            Series(
                f"{dropout:.0%} of the inputs dropped",
                study.strengths,
                [_mean(found[quality.describe_pull(strength, dropout)]) for strength in study.strengths],
            )
            for dropout in study.dropouts
        )
        + tuple(
            Series(label, study.strengths, [_mean(found[label])] * len(study.strengths), style="dashed")
            for label in (HELD_OUT, MEANS)
        ),
        is_log_x=True,
    )
    return Table(
        "Strength of guidance, by thirds of the training cases",
        notes,
        QUANTITIES,
        tuple(rows),
        pictures={"strengths": (chart,)},
        paired=MEANS,
    )


@dataclass(frozen=True, eq=False)
class Fold:
    """Networks and a flow that know some of the cases."""

    study: Study
    run: Run
    make: Callable[[], Examples]

    @cached_property
    def examples(self) -> Examples:
        """What was seen, and, for validation, what was left out."""
        return self.make()

    @cached_property
    def networks(self) -> Networks:
        """The population."""
        name = self.make.__name__
        settings = replace(self.study.population, data=f"{__name__}:{name}")
        return Networks.of(f"uci-{name}", settings, self.run)

    @property
    def held_out(self) -> Params:
        """Networks that the flow was not fitted to."""
        return self.networks.read("test", self.study.drawn)

    def make_means(self) -> Params:
        """Means of 16 aligned networks."""
        train, chance = self.networks.read("train"), self.run.generator("means", self.make.__name__)
        space = Space.of(train, self.networks.store.require_symmetry(), Representation())
        points = space.enter(train)
        middle = find_reference(space, points)
        points, rest = (align_points(space, middle, own) for own in (points, space.enter(self.held_out)))
        return space.leave(make_controls(space, points, rest, self.study.drawn, chance)[MEANS])

    def draw(self, strength: float, dropout: float) -> Params:
        """Networks from the flow, guided unless the strength is 0."""
        chance = self.run.generator("draw", self.make.__name__)
        guidance = None
        if strength:
            guidance = flow.Guidance(flow.BatchLoss(self._task(is_seen=True), dropout), strength)
        made = self.networks.fit("tokens", self.study.settings)
        return made.sample(self.study.drawn, generator=chance, steps=self.study.steps, guidance=guidance)

    def judge(self, params: Params) -> Record:
        """Mean loss and accuracy on what was left out, and the loss on what was seen."""
        left_out, seen = (self._task(is_seen=is_seen).evaluate_each(params) for is_seen in (False, True))
        return {name: float(values.mean()) for name, values in left_out.items()} | {
            "loss, seen cases": float(seen["loss"].mean())
        }

    def _task(self, *, is_seen: bool) -> Task:
        known = self.examples
        pair = (known.inputs, known.targets) if is_seen else (known.validation_inputs, known.validation_targets)
        return Task(self.networks.store.architecture.module(), [pair])


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


def _mean(records: list[Record]) -> float:
    return sum(float(record["loss"]) for record in records) / len(records)
