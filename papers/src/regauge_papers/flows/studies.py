"""Populations of paper 000, with flows of this library and flows of the thesis that are fitted to the populations.

The sampler of the thesis does not solve the differential equation of its flow. The Geometric flows of the thesis divide
the last layer by its norm. The division lowers the loss on UCI and raises the loss on MNIST. The published flows are
compared with correct versions.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from regauge import flow
from regauge.flow.priors import PriorSettings
from regauge.flow.thesis import Kind
from regauge.weightspace import RelationalAttention
from regauge.zoo import Checkpoints, PopulationConfig
from regauge.zoo.presets import mlp_architecture, mnist_tiny_mlps, uci_mlps
from regauge_papers.experiment import Scale
from regauge_papers.flows.networks import fewer

STEPS = (2, 5, 10, 20, 50, 100)
"""The numbers of solver steps for which the pictures show the loss of sampled networks."""
PULL = 10.0
"""The strength of guidance for the thesis' flows."""
COMPONENTS = 200
"""The number of principal components for networks with many parameters."""
MEDIUM = flow.Perceptron(384, 4)
"""The net of a flow over principal components."""
PULLS = ((3.0, 0.0), (10.0, 0.0), (30.0, 0.4))
"""Strengths of guidance with the dropout of inputs, for breast cancer. The experiment on thirds of the training cases
(`folds`) chose the last pair."""
STRENGTHS = ((3.0, 0.0), (10.0, 0.0), (20.0, 0.0))
"""Strengths of guidance with the dropout of inputs, for MNIST and CNNs. With the last pair, sampled MNIST networks
disagree no more than trained networks."""
KINDS: tuple[Kind, ...] = ("euclidean", "geometric")
"""The geometries of the thesis' flows."""
TRANSPORT = flow.Coupling(assignment=True)
PAIRINGS = (
    ("", False, flow.Coupling()),
    (", aligned, optimal transport", True, TRANSPORT),
    (", each end aligned to its start", False, flow.Coupling(alignment=True)),
)
"""The variants of the thesis' flows: a description, whether networks are aligned to their mean, and the pairing of
start points with endpoints."""


@dataclass(frozen=True)
class Drawing:
    """Settings of the sampling of networks."""

    label: str
    solver: Literal["heun", "euler", "thesis"] = "heun"
    steps: int = 20
    noise: float = 0.0
    strength: float = 0.0  # of guidance by the examples that the networks were trained on
    dropout: float = 0.0  # share of the values of these examples' inputs that are set to zero
    paper: tuple[str, ...] = ()  # accuracy and loss in the thesis
    is_plotted: bool = True  # in the picture of losses by steps


@dataclass(frozen=True)
class Fitted:
    """A flow, and the settings of sampling from the flow."""

    label: str
    settings: flow.FlowConfig
    drawings: tuple[Drawing, ...]
    seeds: int = 1


@dataclass(frozen=True)
class Study:
    """Settings: a population, flows that are fitted to it, and the number of samples of each flow."""

    what: str
    name: str
    population: PopulationConfig
    flows: tuple[Fitted, ...]
    drawn: int
    head: str  # the last layer, without ".weight"
    steps: tuple[int, ...]  # of Euler's method, for the picture
    target: tuple[str, ...]  # accuracy and loss of trained networks in the thesis
    notes: tuple[str, ...] = field(default=(), compare=False)


def uci(scale: Scale) -> Study:
    """Return the settings: 2,500 runs and four CPU minutes per flow on a laptop; at scale `paper`, 10,000 runs and an
    hour per flow.
    """
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
    prior = flow.MatchedGaussian() if scale == "smoke" else flow.FullGaussian(1e-4)
    own = in_all_values(seconds, scale, prior, PULLS)
    flows = (replace(own, seeds=seeds), by_transport(own), *thesis(seconds, scale, head, paper))
    steps = (2, 4) if scale == "smoke" else STEPS
    return Study("UCI breast cancer", "uci", population, flows, drawn, head, steps, ("0.992", "0.048"), (note,))


def mnist(scale: Scale) -> Study:
    """Return the settings: final networks of 5,000 runs of five epochs on a laptop; the paper has 50 runs of 25
    epochs.
    """
    count, epochs, seconds = {"smoke": (40, 1, 0.3), "cpu": (5000, 5, 480.0), "paper": (3000, 25, 7200.0)}[scale]
    population = fewer(mnist_tiny_mlps(), count, epochs)
    if scale == "smoke":
        population = replace(population, architecture=mlp_architecture(64, 4, 10), data="digits")
    paper = {
        "euclidean": {"": ("0.737", "0.814"), PAIRINGS[1][0]: ("0.757", "0.753")},
        "geometric": {"": ("0.737", "1.457"), PAIRINGS[1][0]: ("0.786", "1.443")},
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
        ("0.933", "0.231"),
        (note,),
    )


def mnist_long(scale: Scale) -> Study:
    """Return the settings for one unguided flow to the networks of 20,000 runs, with more components and a larger net.

    The flow is trained for the time that remains of two CPU hours.
    """
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
    """Return the flow of this library for few values: aligned networks, with units as tokens."""
    settings = replace(
        _common(seconds, scale),
        representation=flow.Representation("flat"),
        net=flow.Tokens(8, 1, 2) if scale == "smoke" else flow.Tokens(64, 3),
        prior=prior,
        balance=1.0,
    )
    return Fitted("tokens", settings, _drawings(scale, "flow of velocities", pulls))


def in_components(seconds: float, scale: Scale, count: int = COMPONENTS, net: flow.Perceptron = MEDIUM) -> Fitted:
    """Return the flow of this library for many values, in the principal components of aligned networks."""
    if scale == "smoke":
        count, net = 3, flow.Perceptron(8, 1)
    settings = replace(
        _common(seconds, scale),
        representation=flow.Representation("keep", components=count),
        net=net,
        lr=2e-3,
        batch=128,
    )
    return Fitted("components", settings, _drawings(scale, f"flow of {count} components", STRENGTHS))


def by_transport(fitted: Fitted) -> Fitted:
    """Return the unguided flow whose training pairs samples of the prior with networks by optimal transport in each
    batch.
    """
    drawing = fitted.drawings[0]
    return replace(
        fitted,
        label=f"{fitted.label}, optimal transport",
        settings=replace(fitted.settings, coupling=TRANSPORT),
        drawings=(replace(drawing, label=f"{drawing.label}, optimal transport"),),
    )


def _common(seconds: float, scale: Scale) -> flow.FlowConfig:
    return flow.FlowConfig(
        representation=flow.Representation("sphere"),
        prior=flow.MatchedGaussian(),
        net=flow.Perceptron(),
        is_aligned=True,
        seconds=seconds,
        is_cpu_time=True,
        epochs=2 if scale == "smoke" else 3000,
        average=0.998,
        lr=3e-3,
    )


def _drawings(scale: Scale, label: str, pulls: tuple[tuple[float, float], ...]) -> tuple[Drawing, ...]:
    first = Drawing(label, steps=3) if scale == "smoke" else Drawing(label)
    guided = (
        replace(first, label=f"{label}, {describe_pull(*pull)}", strength=pull[0], dropout=pull[1]) for pull in pulls
    )
    return first, *guided


def describe_pull(strength: float, dropout: float) -> str:
    """Return a description of guidance with a strength and a dropout."""
    return f"guided, strength {strength:g}" + (f", {dropout:.0%} of the inputs dropped" if dropout else "")


def thesis(
    seconds: float, scale: Scale, head: str, paper: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> tuple[Fitted, ...]:
    """Return the flows of the thesis at a smaller width, sampled by its sampler and by the equation of the flow.

    If a flow pairs prior samples and networks at random, guided samples by the equation are added.

    Args:
        seconds: CPU seconds for each flow.
        scale: The scale of the experiment.
        head: The name of the last layer, without ".weight".
        paper: Accuracy and loss in the thesis, by kind of flow and by the text in `PAIRINGS`.
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
