"""Paper 000, tables 7.3 and 7.4 and figure 7.6: a flow guided to another task, as a start there, at other widths."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

import regauge as rg
from regauge import flow
from regauge.core.params import Params
from regauge.core.task import Task
from regauge.flow.guiding import descend
from regauge.papers.experiment import Run, Scale
from regauge.papers.flows.networks import Networks, fewer
from regauge.papers.table import Chart, Quantity, Record, Row, Series, Table
from regauge.training.initialization import draw_start, initialize
from regauge.weightspace import MessagePassing
from regauge.zoo.presets import mlp_architecture, mnist_tiny_mlps
from regauge.zoo.training import Config

QUANTITIES = (
    Quantity("accuracy there", 4),
    Quantity("loss there", 4),
    Quantity("accuracy here", 4),
    Quantity("loss here", 4),
)
WIDTHS = (Quantity("accuracy", 4), Quantity("loss", 4))
PAPER = {"accuracy there": "0.754", "loss there": "0.764"}
"""Table 7.3, Euclidean, with a strength of 0.1."""


@dataclass(frozen=True)
class Study:
    """A population, the flow that is fitted to it, and where it is used."""

    population: Config
    settings: flow.Config
    other: str  # the other task
    strengths: tuple[float, ...]
    steps: int
    drawn: int
    wide: int  # hidden units of other networks
    wide_steps: int  # of Heun's method, for these
    wide_strength: float = 20.0  # of guidance, for these


def config(scale: Scale) -> Study:
    """An equivariant flow of MLPs 784-10-10 on MNIST, used on Fashion-MNIST and for 32 hidden units."""
    count, epochs, seconds = {"smoke": (40, 1, 0.3), "cpu": (5000, 5, 480.0), "paper": (3000, 25, 7200.0)}[scale]
    population = fewer(mnist_tiny_mlps(), count, epochs)
    settings = flow.Config(
        representation=flow.Representation("keep"),
        net=flow.Metanetwork(MessagePassing(), 32, 3),
        seconds=seconds,
        is_cpu_time=True,
        epochs=3000,
        batch=32,
    )
    if scale == "smoke":
        population = replace(population, architecture=mlp_architecture(64, 4, 10), data="digits")
        settings = replace(settings, net=flow.Metanetwork(MessagePassing(), 8, 1), epochs=2)
        return Study(population, settings, "digits", (0.1, 10.0), 4, 6, 6, 2)
    return Study(population, settings, "fashion-mnist", (0.1, 10.0), 128, 50, 32, 50)


def guidance(study: Study, run: Run) -> Table:
    """Guide the flow by the loss of another task, beside as many gradient steps without a flow."""
    networks = Networks.of("mnist", study.population, run)
    there, here = networks.task(data=study.other), networks.task()
    learned = networks.task("train", study.other)
    labels = ["no guidance", "random networks"]
    for strength in study.strengths:
        labels += [f"guided, strength {strength:g}", f"drawn, then {study.steps} steps, {strength:g}"]
        labels += [f"random, then {study.steps} steps, {strength:g}"]

    def score(label: str) -> Record:
        made = networks.fit("for others", study.settings)
        drawn = _kinds(study, networks, made, learned, run)[label]()
        scores = {"there": _scores(there, drawn), "here": _scores(here, drawn)}
        return {f"{name} {place}": value for place, found in scores.items() for name, value in found.items()}

    settings = (study, "guidance")
    found = run.records("guidance", settings, score, labels)
    rows = [
        Row.of(label, [[record]], QUANTITIES, paper=PAPER if label == "guided, strength 0.1" else {})
        for label, record in zip(labels, found, strict=True)
    ]
    notes = (
        f"a flow of {study.population.architecture.name} on {networks.data} (here), guided by the loss on the examples "
        f"for training of {study.other} (there); {study.drawn} networks each, {study.steps} steps of Euler's method",
        "strength: the sum of the learning rates of all steps; as many gradient steps with the same learning rate and "
        "batches stand beside, from drawn networks and from random ones",
        "the thesis' numbers are those of a strength of 0.1, and cannot be had so: they equal those of its table 7.2 "
        "on MNIST; its gradient was added in the wrong order of values",
    )
    curves = run.record((study, "starts"), "starts", lambda: _starts(study, networks, learned, there, run))
    series = tuple(Series(label, curves["steps"], curves[label]) for label in ("drawn", "random"))
    panel = Chart("Training there from two starts", "gradient steps", "loss", series)
    return Table("A flow of one task, guided to another", notes, QUANTITIES, tuple(rows), pictures={"starts": (panel,)})


def widths(study: Study, run: Run) -> Table:
    """Draw networks of another width from the flow, guided by the task or not."""
    networks = Networks.of("mnist", study.population, run)
    inputs, hidden, outputs = study.population.architecture.settings["widths"]
    wide, wider, steps = (inputs, study.wide, outputs), f"{study.wide} units", study.wide_steps
    learned, strength = networks.task("learned", widths=wide), f"strength {study.wide_strength:g}"
    after = f"then {2 * steps} gradient steps, {strength}, {wider}"
    narrow, drawn, guided, improved, starts, descended, fresh, trained = labels = (
        f"drawn, {hidden} units",
        f"drawn, {wider}",
        f"guided, {strength}, {wider}",
        f"drawn, {after}",
        f"where these begin, {wider}",
        f"where these begin, {after}",
        f"random networks, {after}",
        f"trained, {hidden} units",
    )

    def score(label: str) -> Record:
        if label == trained:
            return _scores(networks.task(), networks.read("test", study.drawn))
        made, chance = networks.fit("for others", study.settings), run.generator("widths")
        if label == narrow:
            return _scores(networks.task(), made.sample(study.drawn, generator=chance, steps=steps))
        made = made.resize(rg.discover(mlp_architecture(*wide).module(), (torch.randn(2, inputs),)))
        loss = flow.BatchLoss(learned)
        if label == fresh:
            found = _random(study, run, wide)
        elif label in (starts, descended):
            found = made.draw_starts(study.drawn, chance)
        else:
            pull = flow.Guidance(loss, study.wide_strength) if label == guided else None
            found = made.sample(study.drawn, generator=chance, steps=steps, guidance=pull)
        if label in (improved, descended, fresh):  # as many as Heun's method has gradients
            found = descend(loss, found, steps=2 * steps, rate=study.wide_strength / (2 * steps))
        return _scores(networks.task(widths=wide), found)

    found = run.records("widths", (study, "widths"), score, labels)
    papers: Mapping[str, Mapping[str, str]] = {
        drawn: {"accuracy": "0.890", "loss": "1.030"},
        guided: {"accuracy": "0.886", "loss": "1.031"},
    }
    pairs = zip(labels, found, strict=True)
    rows = [Row.of(label, [[record]], WIDTHS, paper=papers.get(label)) for label, record in pairs]
    notes = (
        f"a flow of {study.population.architecture.name} on {networks.data} draws networks with {study.wide} hidden "
        f"units; {study.drawn} networks each, {steps} steps of Heun's method",
        "guided: by the loss on the images for training, at the predicted end; strength: the sum of the learning rates "
        "of all steps; as many gradient steps at the same rate, from what is drawn, from where the flow begins, and "
        "from random networks, stand beside",
        "the thesis' numbers are those of its Geometric flow, with a last layer of norm one",
    )
    return Table("A flow at another width", notes, WIDTHS, tuple(rows))


def _kinds(study: Study, networks: Networks, made: flow.Flow, learned: Task, run: Run) -> dict[str, partial[Params]]:
    """How networks of every kind are made."""

    def draw(guidance: flow.Guidance | None = None) -> Params:
        chance = run.generator("guidance")
        return made.sample(study.drawn, generator=chance, steps=study.steps, solver="euler", guidance=guidance)

    def train(start: str, strength: float) -> Params:
        first = draw() if start == "drawn" else _random(study, run)
        return descend(flow.BatchLoss(learned), first, steps=study.steps, rate=strength / study.steps)

    found: dict[str, partial[Params]] = {"no guidance": partial(draw), "random networks": partial(_random, study, run)}
    for strength in study.strengths:
        loss = flow.BatchLoss(learned)
        found[f"guided, strength {strength:g}"] = partial(draw, flow.Guidance(loss, strength))
        for start in ("drawn", "random"):
            found[f"{start}, then {study.steps} steps, {strength:g}"] = partial(train, start, strength)
    return found


def _random(study: Study, run: Run, widths: tuple[int, ...] | None = None) -> Params:
    """Networks as the population began, or as it would have begun with other widths."""
    architecture = mlp_architecture(*widths) if widths else study.population.architecture
    starts = [draw_start(study.population.initialization, run.seed, k) for k in range(study.drawn)]
    return initialize(architecture, starts, torch.float32)


def _starts(study: Study, networks: Networks, learned: Task, there: Task, run: Run) -> Record:
    """The loss on the other task while networks are trained on it, from drawn and from random ones."""
    made = networks.fit("for others", study.settings)
    first = {
        "drawn": made.sample(study.drawn, generator=run.generator("starts"), steps=study.steps),
        "random": _random(study, run),
    }
    every, count = max(1, study.steps // 8), 8
    found: Record = {"steps": [every * k for k in range(count + 1)]}
    for label, params in first.items():
        loss, losses = flow.BatchLoss(learned), [_scores(there, params)["loss"]]
        for _ in range(count):
            params = descend(loss, params, steps=every, rate=0.1)
            losses.append(_scores(there, params)["loss"])
        found[label] = losses
    return found


def _scores(task: Task, params: Params) -> dict[str, float]:
    return {name: float(values.mean()) for name, values in task.evaluate_each(params).items()}
