"""Paper 000, tables 7.1 and 7.2 and figures 7.3 to 7.5: how good and how new networks are that flows draw.

The thesis' sampler does not follow its flow, and its Geometric flows divide the last layer by its norm, which
lowers the loss on UCI and raises it on MNIST. Both stand here beside what is right.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch

from regauge import flow
from regauge.core.params import Params, select
from regauge.flow.alignment import align_points
from regauge.flow.components import Components
from regauge.flow.guiding import descend
from regauge.flow.judging import Judgement
from regauge.flow.priors import PriorSettings
from regauge.flow.thesis import Kind
from regauge.papers.experiment import Run, Scale
from regauge.papers.flows.networks import Networks, fewer, unit_head
from regauge.papers.table import Chart, Picture, Quantity, Record, Row, Series, Table
from regauge.weightspace import RelationalAttention
from regauge.zoo.presets import mlp_architecture, mnist_tiny_mlps, uci_mlps
from regauge.zoo.training import Checkpoints, Config

QUANTITIES = (
    Quantity("accuracy", 4),
    Quantity("loss", 4),
    Quantity("loss / held-out", 3),
    Quantity("nearest", 3),
    Quantity("spread", 3),
    Quantity("two-sample", 3),
    Quantity("divergence", 5),
    Quantity("disagreement", 4),
    Quantity("accuracy of average", 4),
    Quantity("CPU s", 0),
)
STEPS = (2, 5, 10, 20, 50, 100)
"""Of Euler's method, in pictures."""
SIZES = (1, 3, 10, 30, 100)
"""Networks whose probabilities are averaged."""
PULL = 10.0
"""The strength with which the thesis' flows are guided."""
COMPONENTS = 200
"""Of networks with many values."""
MEDIUM = flow.Perceptron(384, 4)
"""The net of a flow of these."""
PULLS = ((3.0, 0.0), (10.0, 0.0), (30.0, 0.4))
"""Strengths of guidance and the dropout of inputs, for breast cancer; thirds of the training cases chose the last."""
STRENGTHS = ((3.0, 0.0), (10.0, 0.0), (20.0, 0.0))
"""Strengths and dropout for MNIST and CNNs; with the last, networks of MNIST disagree no more than trained ones."""
KINDS: tuple[Kind, ...] = ("euclidean", "geometric")
"""The geometries of the thesis' flows."""
TRANSPORT = flow.Coupling(assignment=True)
PAIRINGS = (
    ("", False, flow.Coupling()),
    (", aligned, optimal transport", True, TRANSPORT),
    (", each end aligned to its start", False, flow.Coupling(alignment=True)),
)
"""Of the thesis' flows: words, whether networks are aligned to their middle, and which start belongs to which end."""


@dataclass(frozen=True)
class Drawing:
    """How networks are drawn."""

    label: str
    solver: Literal["heun", "euler", "thesis"] = "heun"
    steps: int = 20
    noise: float = 0.0
    strength: float = 0.0  # of guidance by the examples that the networks were trained on
    dropout: float = 0.0  # share of the values of these examples' inputs that are set to zero
    paper: tuple[str, ...] = ()  # accuracy and loss in the thesis, divergence too on MNIST
    is_plotted: bool = True  # in the picture of losses by steps


@dataclass(frozen=True)
class Fitted:
    """A flow, and how networks are drawn from it."""

    label: str
    settings: flow.Config
    drawings: tuple[Drawing, ...]
    seeds: int = 1


@dataclass(frozen=True)
class Study:
    """A population, flows that are fitted to it, and how many networks are drawn from each."""

    what: str
    name: str
    population: Config
    flows: tuple[Fitted, ...]
    drawn: int
    head: str  # the last layer, without ".weight"
    steps: tuple[int, ...]  # of Euler's method, for the picture
    target: tuple[str, ...]  # accuracy and loss of trained networks in the thesis, divergence too on MNIST
    notes: tuple[str, ...] = field(default=(), compare=False)


def uci(scale: Scale) -> Study:
    """2,500 runs and four CPU minutes for a flow on a laptop; 10,000 runs and an hour at the paper's scale."""
    count, seconds = {"smoke": (40, 0.3), "cpu": (2500, 240.0), "paper": (10_000, 3600.0)}[scale]
    population = replace(uci_mlps(count), checkpoints=Checkpoints(every=80, warmup=160))
    if scale == "smoke":
        population = replace(fewer(population, count, 2), architecture=mlp_architecture(30, 4, 4, 2))
    head = "layers.2"
    paper = {
        "euclidean": {"": ("0.998", "0.101"), PAIRINGS[1][0]: ("0.993", "0.053")},
        "geometric": {"": ("0.992", "0.019"), PAIRINGS[1][0]: ("0.991", "0.020")},
    }
    note = "held-out examples: 114 cases; the thesis has 57, one of which is 1.75%"
    drawn, seeds = (8, 1) if scale == "smoke" else (500, 3)
    prior = flow.MatchedGaussian() if scale == "smoke" else flow.FullGaussian()
    own = in_all_values(seconds, scale, prior, PULLS)
    flows = (replace(own, seeds=seeds), by_transport(own), *thesis(seconds, scale, head, paper))
    steps = (2, 4) if scale == "smoke" else STEPS
    return Study("UCI breast cancer", "uci", population, flows, drawn, head, steps, ("0.992", "0.048"), (note,))


def mnist(scale: Scale) -> Study:
    """5,000 runs of five epochs on a laptop, of which only the ends are kept; 50 runs of 25 epochs in the paper."""
    count, epochs, seconds = {"smoke": (40, 1, 0.3), "cpu": (5000, 5, 480.0), "paper": (3000, 25, 7200.0)}[scale]
    population = fewer(mnist_tiny_mlps(), count, epochs)
    if scale == "smoke":
        population = replace(population, architecture=mlp_architecture(64, 4, 10), data="digits")
    paper = {
        "euclidean": {"": ("0.737", "0.814", "0.00102"), PAIRINGS[1][0]: ("0.757", "0.753", "0.00085")},
        "geometric": {"": ("0.737", "1.457", "0.00073"), PAIRINGS[1][0]: ("0.786", "1.443", "0.00093")},
    }
    drawn = 8 if scale == "smoke" else 100
    components = in_components(seconds, scale)
    tokens = in_all_values(seconds, scale, flow.MatchedGaussian())
    flows = (components, by_transport(components), tokens, *thesis(seconds, scale, "layers.1", paper))
    steps = (2, 4) if scale == "smoke" else STEPS
    note = f"ends of {count} runs of {epochs} epochs; the thesis has checkpoints of 50 runs of 25"
    return Study(
        population.data,
        "mnist",
        population,
        flows,
        drawn,
        "layers.1",
        steps,
        ("0.933", "0.231", "0.00002"),
        (note,),
    )


def mnist_long(scale: Scale) -> Study:
    """One flow to 20,000 runs with more components, a larger net, and what is left of two CPU hours; not guided."""
    count, seconds = {"smoke": (40, 0.3), "cpu": (20_000, 3600.0), "paper": (50_000, 14_400.0)}[scale]
    known = mnist(scale)
    long = in_components(seconds, scale, 2 * COMPONENTS, flow.Perceptron(512, 4))
    first = long.drawings[0]
    short = (
        Drawing(f"{first.label}, {steps} steps of Euler's method", "euler", steps, is_plotted=False)
        for steps in ((2,) if scale == "smoke" else (10, 5, 2))
    )
    note = f"ends of {count} runs of {known.population.epochs} epochs"
    return replace(
        known,
        name="mnist-long",
        population=replace(known.population, count=count),
        flows=(replace(long, drawings=(first, *short)),),
        notes=(note,),
    )


def in_all_values(
    seconds: float, scale: Scale, prior: PriorSettings, pulls: tuple[tuple[float, float], ...] = ()
) -> Fitted:
    """The flow of this library for few values: of aligned networks, with tokens that are units."""
    settings = replace(
        _common(seconds, scale),
        representation=flow.Representation("flat"),
        net=flow.Tokens(8, 1, 2) if scale == "smoke" else flow.Tokens(64, 3),
        prior=prior,
        balance=1.0,
    )
    return Fitted("tokens", settings, _drawings("flow of velocities", pulls))


def in_components(seconds: float, scale: Scale, count: int = COMPONENTS, net: flow.Perceptron = MEDIUM) -> Fitted:
    """The flow of this library for many values: in the principal components of aligned networks."""
    if scale == "smoke":
        count, net = 3, flow.Perceptron(8, 1)
    settings = replace(
        _common(seconds, scale),
        representation=flow.Representation("keep", components=count),
        net=net,
        lr=2e-3,
        batch=128,
    )
    return Fitted("components", settings, _drawings(f"flow of {count} components", STRENGTHS))


def by_transport(fitted: Fitted) -> Fitted:
    """The same flow, unguided, fitted with the starts of a batch assigned to its ends."""
    drawing = fitted.drawings[0]
    return replace(
        fitted,
        label=f"{fitted.label}, optimal transport",
        settings=replace(fitted.settings, coupling=TRANSPORT),
        drawings=(replace(drawing, label=f"{drawing.label}, optimal transport"),),
    )


def _common(seconds: float, scale: Scale) -> flow.Config:
    return flow.Config(
        net=flow.Perceptron(),
        is_aligned=True,
        seconds=seconds,
        is_cpu_time=True,
        epochs=2 if scale == "smoke" else 3000,
        average=0.998,
        lr=3e-3,
    )


def _drawings(label: str, pulls: tuple[tuple[float, float], ...]) -> tuple[Drawing, ...]:
    guided = (Drawing(f"{label}, {describe_pull(*pull)}", strength=pull[0], dropout=pull[1]) for pull in pulls)
    return Drawing(label), *guided


def describe_pull(strength: float, dropout: float) -> str:
    """Guidance of this strength and dropout, in words."""
    return f"guided, strength {strength:g}" + (f", {dropout:.0%} of the inputs dropped" if dropout else "")


def thesis(
    seconds: float, scale: Scale, head: str, paper: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> tuple[Fitted, ...]:
    """The thesis' flows at a smaller width, drawn with its sampler and with the flow's own equation.

    Those of independent starts are guided, too, by the equation.

    Args:
        seconds: CPU seconds for each flow.
        scale: Of the experiment.
        head: The last layer, without ".weight".
        paper: Accuracy, loss and divergence in the thesis, by kind of flow and by the words of `PAIRINGS`.
    """
    small = flow.Metanetwork(RelationalAttention(heads=2), 8, 1)
    steps = 2 if scale == "smoke" else 100
    made = []
    for kind, (words, is_aligned, coupling) in itertools.product(KINDS, PAIRINGS):
        unit = {} if kind == "euclidean" else {"head": f"{head}.weight", "head_bias": f"{head}.bias"}
        settings = flow.thesis_config(
            kind,
            **unit,
            net=small if scale == "smoke" else flow.Metanetwork(RelationalAttention(), 16, 3),
            seconds=seconds,
            is_cpu_time=True,
            epochs=2 if scale == "smoke" else 3000,
            is_aligned=is_aligned,
            coupling=coupling,
        )
        name = f"thesis' {kind} flow{words}"
        drawings = (
            Drawing(f"{name}, its sampler", "thesis", steps, paper=paper[kind].get(words, ())),
            Drawing(f"{name}, its equation", "euler", steps),
        )
        made.append(Fitted(f"{kind}{words}", settings, drawings))
        if not words:
            guided = Drawing(f"{name}, {describe_pull(PULL, 0.0)}, its equation", "euler", steps, strength=PULL)
            made.append(replace(made[-1], drawings=(guided,)))
    return tuple(made)


def measure(study: Study, run: Run) -> Table:
    """Fit the flows, draw from them, and judge."""
    networks = Networks.of(study.name, study.population, run)
    known = Known(study, networks)
    controls: dict[str, Record] = {}
    rows, curves, averages = [], {}, {}
    for fitted in study.flows:
        for drawing in fitted.drawings:
            settings = (study.name, study.population, fitted, drawing, study.drawn)
            found = run.records(
                f"drawn: {drawing.label}", settings, partial(known.judge, fitted, drawing), range(fitted.seeds)
            )
            paper = dict(zip(("accuracy", "loss", "divergence"), drawing.paper, strict=False))
            rows.append(Row.of(drawing.label, [[one["generated"]] for one in found], QUANTITIES, paper=paper))
            averages[drawing.label] = found[0]["averages"]
            if drawing.is_plotted:
                curves[drawing.label] = found[0]["steps"]
            controls |= found[0]["others"]
    paper = dict(zip(("accuracy", "loss", "divergence"), study.target, strict=False))
    rows.append(Row.of("held-out networks", [[controls.pop("held-out")]], QUANTITIES, paper=paper))
    rows += [Row.of(name, [[record]], QUANTITIES) for name, record in controls.items()]
    counts = {name: len(part) for name, part in networks.parts.items()}
    notes = (
        f"{study.population.architecture.name} on {study.what}: {counts['train']} networks for training, "
        f"{counts['test']} held out, divided by run; {study.drawn} networks drawn from each flow; "
        f"seeds of this library's flow: {study.flows[0].seeds}",
        *study.notes,
        "nearest: median distance to the nearest training network; spread: mean distance of two; in units of held-out "
        "networks, after alignment; divergence: Jensen-Shannon, of two networks' class probabilities, mean over "
        "examples and pairs, where the thesis compares sets of outputs by a density estimate; disagreement: the "
        "share of examples that two networks put into different classes",
    )
    if any(drawing.strength for fitted in study.flows for drawing in fitted.drawings):
        notes += (
            "guided: by the loss on the examples that the networks were trained on, at the predicted end; strength: "
            "the sum of the learning rates of all steps; dropped: that share of the inputs' values is set to zero, "
            "others in each step; controls of this library's flow take as many gradient steps with the same losses at "
            "the same rates",
        )
    if any(fitted.settings.representation.components for fitted in study.flows):
        notes += (
            "rest drawn anew: what components leave over of held-out networks is drawn as for networks of a flow; a "
            "perfect flow of components would draw networks as good as these",
        )
    if any(fitted.settings.predicts == "end" for fitted in study.flows):
        last = study.flows[-1].settings
        notes += (
            "its sampler: ends are predicted, and `end - start` is followed in place of `(end - x) / (1 - t)`",
            "unit last layer: what Geometric flows draw, and trained networks made so; the loss changes, classes do "
            "not",
            f"thesis' flows: one seed, width {last.net.width}, where the thesis has 64 or 32, and "  # type: ignore[attr-defined]
            f"{last.seconds:.0f} CPU seconds, where it has 6 to 40 hours of a GPU",
        )
    pictures = {
        "steps": _draw("Networks by steps of Euler's method", "steps", "loss", study.steps, curves),
        "averages": _draw("Averages of class probabilities", "networks", "accuracy", SIZES, averages),
    }
    return Table(f"Networks drawn from flows: {study.what}", notes, QUANTITIES, tuple(rows), pictures=pictures)


@dataclass(frozen=True, eq=False)
class Known:
    """What drawn networks are compared with."""

    study: Study
    networks: Networks

    @cached_property
    def task(self) -> Any:
        """On the examples for testing."""
        return self.networks.task()

    @cached_property
    def learned(self) -> Any:
        """On the examples that the networks were trained on."""
        return self.networks.task("learned")

    @cached_property
    def held_out(self) -> Params:
        """Networks that no flow was fitted to."""
        return self.networks.read("test", self.study.drawn)

    def judge(self, fitted: Fitted, drawing: Drawing, seed: int) -> Record:
        """Draw networks from a flow, and compare them with others."""
        settings = fitted.settings
        began = time.process_time()
        made = self.networks.fit(f"{fitted.label} {seed}", settings)
        seconds = time.process_time() - began
        chance = self.networks.run.generator("draw", drawing.label, seed)
        drawn = self._draw(made, drawing, self.study.drawn, drawing.steps, chance)
        found = flow.judge(
            drawn, self.networks.read("train"), self.held_out, self.networks.store.require_symmetry(), self.task
        )
        others = {score.name: self._record(found, score.name) for score in found.scores[1:]}
        if settings.representation.head_form == "unit":
            names = f"{self.study.head}.weight", f"{self.study.head}.bias"
            metrics = self.task.evaluate_each(unit_head(self.held_out, *names))
            others["held-out networks, unit last layer"] = {k: float(v.mean()) for k, v in metrics.items()}
        if isinstance(made.space, Components):
            metrics = self.task.evaluate_each(self._with_rest_anew(made.space))
            others["held-out networks, rest drawn anew"] = {k: float(v.mean()) for k, v in metrics.items()}
        if drawing.strength and drawing.solver == "heun" and not seed:
            others |= self._descended(made, drawing)
        trained = {"CPU s": seconds} if seconds > 0.5 * (settings.seconds or 0) else {}
        return {
            "generated": self._record(found, "generated") | trained,
            "others": others,
            "averages": self._averages(drawn),
            "steps": self._steps(made, drawing) if drawing.is_plotted and not seed else [],
        }

    def _draw(self, made: flow.Flow, drawing: Drawing, count: int, steps: int, chance: torch.Generator) -> Params:
        loss = flow.BatchLoss(self.learned, drawing.dropout)
        guidance = flow.Guidance(loss, drawing.strength) if drawing.strength else None
        return made.sample(
            count, generator=chance, steps=steps, solver=drawing.solver, noise=drawing.noise, guidance=guidance
        )

    def _with_rest_anew(self, components: Components) -> Params:
        """Held-out networks, but for what components leave over of them, which is drawn as for networks of a flow."""
        space = components.networks
        points = align_points(space, components.mean.float(), space.enter(self.held_out))
        chance = self.networks.run.generator("rest")
        return components.with_rest(len(points), chance).leave(components.reduce(points))

    def _descended(self, made: flow.Flow, drawing: Drawing) -> dict[str, Record]:
        """The starts of the flow, and copies, after as many gradient steps as guide the flow, at the same rates."""
        chance = self.networks.run.generator("descend", drawing.label)
        train = self.networks.read("train")
        places = torch.randint(len(self.networks.parts["train"]), (self.study.drawn,), generator=chance)
        firsts = {
            "starts of the flow": made.draw_starts(self.study.drawn, chance),
            "copies": select(train, places),
        }
        found, steps = {}, 2 * drawing.steps  # Heun's method has two gradients a step
        for name, first in firsts.items():
            loss = flow.BatchLoss(self.learned, drawing.dropout)
            moved = descend(loss, first, steps=steps, rate=drawing.strength / steps)
            judged = flow.judge(moved, train, self.held_out, self.networks.store.require_symmetry(), self.task)
            label = f"{name}, {steps} gradient steps, {drawing.strength:g}" + (", dropped" if drawing.dropout else "")
            found[label] = self._record(judged, "generated")
        return found

    def _record(self, found: Judgement, name: str) -> Record:
        score = asdict(found[name])
        return {
            "accuracy": score["accuracy"],
            "loss": score["loss"],
            "loss / held-out": score["loss"] / found["held-out"].loss,
            "nearest": score["distance"],
            "spread": score["spread"],
            "two-sample": score["two_sample"],
            "divergence": score["divergence"],
            "disagreement": score["disagreement"],
            "accuracy of average": score["average_accuracy"],
        }

    def _averages(self, drawn: Params) -> list[float]:
        """The accuracy of the averaged probabilities of the first few networks."""
        totals: list[float] = []
        for size in SIZES:
            right = count = 0
            few = select(drawn, slice(0, size))
            for inputs, classes in self.task.batches:
                outputs = torch.func.vmap(self.task.run, in_dims=(0, None))(few, inputs).softmax(-1).mean(0)
                right, count = right + int((outputs.argmax(-1) == classes).sum()), count + len(classes)
            totals.append(right / count)
        return totals

    def _steps(self, made: flow.Flow, drawing: Drawing) -> list[float]:
        """The mean loss of networks by the number of steps."""
        euler = replace(drawing, solver="thesis" if drawing.solver == "thesis" else "euler")
        found = []
        for steps in self.study.steps:
            chance = self.networks.run.generator("steps", drawing.label)
            drawn = self._draw(made, euler, min(100, self.study.drawn), steps, chance)
            found.append(float(self.task.evaluate_each(drawn)["loss"].mean()))
        return found


def _draw(title: str, x_label: str, y_label: str, xs: Sequence[int], curves: Mapping[str, Sequence[float]]) -> Picture:
    """A chart of this library's flows, and one of the thesis' for each way of drawing from them."""
    groups: dict[str, list[Series]] = {}
    for label, values in curves.items():
        way = label.rpartition(", ")[2] if label.startswith("thesis") else ""
        groups.setdefault(way, []).append(Series(label.removesuffix(f", {way}"), xs, values))
    return tuple(
        Chart(
            f"Thesis' flows, {way}" if way else title,
            x_label,
            y_label,
            tuple(series),
            is_log_x=True,
            is_log_y=y_label == "loss",
        )
        for way, series in groups.items()
    )
