"""Paper 000, tables 7.3 and 7.4 and figure 7.6: flows guided to another task, used as initialization, and resized."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

import regauge as rg
from regauge import flow
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.flow.guiding import descend
from regauge.report.pictures import Chart, Series
from regauge.training.initialization import draw_start, initialize
from regauge.weightspace import MessagePassing
from regauge.zoo import PopulationConfig
from regauge.zoo.presets import mlp_architecture
from regauge_papers.experiment import Run, Scale
from regauge_papers.flows import studies
from regauge_papers.flows.networks import Networks
from regauge_papers.table import Quantity, Record, Row, Table

QUANTITIES = (
    Quantity("accuracy there", 4),
    Quantity("loss there", 4),
    Quantity("accuracy here", 4),
    Quantity("loss here", 4),
)
WIDTHS = (Quantity("accuracy", 4), Quantity("loss", 4))
WEAK = 0.1
"""The strength of guidance in the thesis."""
GUIDED: Mapping[str, tuple[str, str]] = {"euclidean": ("0.754", "0.764"), "geometric": ("0.730", "1.470")}
"""The accuracy and loss in table 7.3 of the thesis, by kind of flow."""
WIDE: Mapping[str, tuple[str, str]] = {"euclidean": ("0.826", "0.830"), "geometric": ("0.890", "1.030")}
"""The accuracy and loss in table 7.4 of the thesis, without guidance, by kind of flow."""
WIDE_GUIDED: Mapping[str, tuple[str, str]] = {"euclidean": ("0.842", "0.796"), "geometric": ("0.886", "1.031")}
RATE = 1e-3
"""The learning rate of Adam in figure 7.6."""

Makers = Mapping[str, Callable[[], Params]]
"""For each row of a table, a function that makes the networks of the row."""


@dataclass(frozen=True)
class Source:
    """A flow with its name in tables, the label under which it is fitted, and its settings."""

    name: str
    label: str
    settings: flow.FlowConfig
    kind: str = ""  # "euclidean" or "geometric", for the thesis' flows

    def fit(self, networks: Networks) -> flow.Flow:
        """Return the flow, fitted now or by an earlier run."""
        return networks.fit(self.label, self.settings)


@dataclass(frozen=True)
class Study:
    """Settings: a population, flows that are fitted to it, and the tasks and widths for which they are used."""

    population: PopulationConfig
    own: Source  # the flow of this library
    thesis: tuple[Source, ...]
    other: str  # the other task
    strengths: tuple[float, ...]
    steps: int  # of Euler's method, for the other task
    drawn: int
    wide: int  # hidden units of other networks
    wide_steps: int  # gradients, for these
    wide_strength: float = 20.0  # of guidance, for these


def config(scale: Scale) -> Study:
    """Return the settings: equivariant flows of MLPs 784-10-10 on MNIST, for Fashion-MNIST and 32 hidden units.

    The flows of the thesis are the same as in the experiment `mnist`.
    """
    known = studies.mnist(scale)
    settings = flow.FlowConfig(
        representation=flow.Representation("keep"),
        prior=flow.MatchedGaussian(),
        net=flow.Metanetwork(MessagePassing(), 32, 3),
        is_aligned=False,
        seconds=known.flows[0].settings.seconds,
        is_cpu_time=True,
        epochs=3000,
        batch=32,
    )
    if scale == "smoke":
        settings = replace(settings, net=flow.Metanetwork(MessagePassing(), 8, 1), epochs=2)
    by_label = {fitted.label: fitted.settings for fitted in known.flows}
    thesis = tuple(Source(f"thesis' {kind} flow", f"{kind} 0", by_label[kind], kind) for kind in studies.KINDS)
    own = Source("flow of velocities", "for others", settings)
    if scale == "smoke":
        return Study(known.population, own, thesis, "digits", (WEAK, 10.0), 4, 6, 6, 4)
    return Study(known.population, own, thesis, "fashion-mnist", (WEAK, 10.0), 128, 50, 32, 100)


def guidance(study: Study, run: Run) -> Table:
    """Guide flows by the loss of another task, and compare with the same number of gradient steps without a flow."""
    networks = Networks.of("mnist", study.population, run)
    there, here = networks.task(data=study.other), networks.task()
    learned = networks.task("train", study.other)

    def draw(source: Source, strength: float = 0.0) -> Params:
        pull = flow.Guidance(flow.BatchLoss(learned), strength) if strength else None
        made, chance = source.fit(networks), run.generator("guidance")
        return made.sample(study.drawn, generator=chance, steps=study.steps, solver="euler", guidance=pull)

    fresh = partial(_random, study, run)
    makers: dict[str, Callable[[], Params]] = {"random networks": fresh}
    for strength in study.strengths:
        pull = f"strength {strength:g}"
        makers[f"random networks, then {study.steps} gradient steps, {pull}"] = partial(
            _improve, fresh, learned, study.steps, strength
        )
    papers: dict[str, Mapping[str, str]] = {}
    for source in (study.own, *study.thesis):
        makers[f"{source.name}: no guidance"] = partial(draw, source)
        for strength in study.strengths:
            pull = f"strength {strength:g}"
            label = f"{source.name}: guided, {pull}"
            makers[label] = partial(draw, source, strength)
            if source.kind and strength == WEAK:
                papers[label] = dict(zip(("accuracy there", "loss there"), GUIDED[source.kind], strict=True))
            if source == study.own:
                makers[f"{source.name}: drawn, then {study.steps} gradient steps, {pull}"] = partial(
                    _improve, partial(draw, source), learned, study.steps, strength
                )

    def score(label: str) -> Record:
        made = makers[label]()
        scores = {"there": _scores(there, made), "here": _scores(here, made)}
        return {f"{name} {place}": value for place, found in scores.items() for name, value in found.items()}

    notes = (
        f"flows of {study.population.architecture.name} on {networks.data} (here), guided by the loss on the examples "
        f"for training of {study.other} (there); {study.drawn} networks each, {study.steps} steps of Euler's method "
        "along the flow's equation",
        "strength: the sum of the learning rates of all steps; as many gradient steps with the same learning rate and "
        "batches stand beside, from networks that are drawn without guidance and from random ones",
        "thesis' flows are those of `000 mnist`; the thesis' own numbers are those of a strength of 0.1, and cannot be "
        "had so: they equal those of its table 7.2 on MNIST; its gradient was added in the wrong order of values",
        f"picture: training there with Adam at a rate of {RATE:g}, on batches; Geometric flows draw networks with a "
        "last layer of norm one",
    )
    starts = {source.name: partial(draw, source) for source in (study.own, *study.thesis)} | {"random networks": fresh}
    curves = run.record((study, "starts"), "starts", lambda: _starts(study, starts, learned, there))
    panels = tuple(
        Chart(
            "Training there, by where it begins",
            "steps of Adam",
            metric,
            tuple(Series(name, curves["steps"], curves[metric][name]) for name in starts),
        )
        for metric in ("loss", "accuracy")
    )
    rows = _rows(makers, run.records("guidance", (study, "guidance"), score, [*makers]), QUANTITIES, papers)
    return Table("Flows of one task, guided to another", notes, QUANTITIES, rows, pictures={"starts": panels})


def widths(study: Study, run: Run) -> Table:
    """Sample networks of another width from flows, with and without guidance by the task."""
    networks = Networks.of("mnist", study.population, run)
    inputs, hidden, outputs = study.population.architecture.settings["widths"]
    wide, wider = (inputs, study.wide, outputs), f"{study.wide} units"
    learned, pull = networks.task("learned", widths=wide), f"strength {study.wide_strength:g}"
    symmetry = rg.discover(mlp_architecture(*wide).module(), (torch.randn(2, inputs),))

    def draw(
        source: Source,
        solver: Literal["heun", "euler", "thesis"],
        wanted: Symmetry | None = None,
        *,
        is_guided: bool = False,
    ) -> Params:
        made = source.fit(networks)
        guidance = flow.Guidance(flow.BatchLoss(learned), study.wide_strength) if is_guided else None
        return (made if wanted is None else made.resize(wanted)).sample(
            study.drawn,
            generator=run.generator("widths"),
            steps=study.wide_steps // 2 if solver == "heun" else study.wide_steps,  # as many gradients
            solver=solver,
            guidance=guidance,
        )

    def begin() -> Params:
        return study.own.fit(networks).resize(symmetry).draw_starts(study.drawn, run.generator("widths"))

    def improve(first: Callable[[], Params]) -> Callable[[], Params]:
        return partial(_improve, first, learned, study.wide_steps, study.wide_strength)

    after = f"then {study.wide_steps} gradient steps, {pull}, {wider}"
    fresh, drawn = partial(_random, study, run, wide), partial(draw, study.own, "heun", symmetry)
    makers: dict[str, Callable[[], Params]] = {
        f"{study.own.name}: drawn, {hidden} units": partial(draw, study.own, "heun"),
        f"{study.own.name}: drawn, {wider}": drawn,
        f"{study.own.name}: guided, {pull}, {wider}": partial(drawn, is_guided=True),
        f"{study.own.name}: drawn, {after}": improve(drawn),
        f"{study.own.name}: where these begin, {wider}": begin,
        f"{study.own.name}: where these begin, {after}": improve(begin),
    }
    papers: dict[str, Mapping[str, str]] = {}
    for source in study.thesis:
        sampler, equation = (f"{source.name}, {way}" for way in ("its sampler", "its equation"))
        makers |= {
            f"{sampler}: drawn, {hidden} units": partial(draw, source, "thesis"),
            f"{sampler}: drawn, {wider}": partial(draw, source, "thesis", symmetry),
            f"{equation}: drawn, {hidden} units": partial(draw, source, "euler"),
            f"{equation}: drawn, {wider}": partial(draw, source, "euler", symmetry),
            f"{equation}: guided, {pull}, {wider}": partial(draw, source, "euler", symmetry, is_guided=True),
        }
        papers[f"{sampler}: drawn, {wider}"] = dict(zip(("accuracy", "loss"), WIDE[source.kind], strict=True))
        papers[f"{equation}: guided, {pull}, {wider}"] = dict(
            zip(("accuracy", "loss"), WIDE_GUIDED[source.kind], strict=True)
        )
    makers[f"random networks, {after}"] = improve(fresh)
    makers[f"trained, {hidden} units"] = partial(networks.read, "test", study.drawn)

    def score(label: str) -> Record:
        return _scores(networks.task(widths=wide if wider in label else ()), makers[label]())

    notes = (
        f"flows of {study.population.architecture.name} on {networks.data} draw networks with {study.wide} hidden "
        f"units; {study.drawn} networks each, {study.wide_steps} evaluations of the net: steps of Euler's method for "
        "the thesis' flows, and half as many of Heun's for this library's",
        "guided: by the loss on the images for training, at the predicted end; strength: the sum of the learning rates "
        "of all steps; as many gradient steps at the same rate, from what is drawn, from where the flow begins, and "
        "from random networks, stand beside",
        "thesis' flows are those of `000 mnist`; Geometric ones draw networks with a last layer of norm one; its own "
        "guided numbers are those of its sampler, with a strength of 0.1 and the gradient in the wrong order of values",
    )
    found = run.records("widths", (study, "widths"), score, [*makers])
    return Table("Flows at another width", notes, WIDTHS, _rows(makers, found, WIDTHS, papers))


def _rows(
    labels: Makers,
    records: list[Record],
    quantities: tuple[Quantity, ...],
    papers: Mapping[str, Mapping[str, str]],
) -> tuple[Row, ...]:
    pairs = zip(labels, records, strict=True)
    return tuple(Row.of(label, [[record]], quantities, paper=papers.get(label)) for label, record in pairs)


def _improve(first: Callable[[], Params], learned: Task, steps: int, strength: float) -> Params:
    """Return networks after plain gradient steps whose learning rates sum to `strength`."""
    return descend(flow.BatchLoss(learned), first(), steps=steps, rate=strength / steps)


def _random(study: Study, run: Run, widths: tuple[int, ...] | None = None) -> Params:
    """Return initial networks of the population, of the same or other widths."""
    architecture = mlp_architecture(*widths) if widths else study.population.architecture
    starts = [draw_start(study.population.initialization, run.seed, k) for k in range(study.drawn)]
    return initialize(architecture, starts, torch.float32)


def _starts(study: Study, starts: Makers, learned: Task, there: Task) -> Record:
    """Return loss and accuracy on the task `there` while networks are trained on `there`, from each initialization."""
    every, count = max(1, study.steps // 8), 8
    found: Record = {"steps": [every * k for k in range(count + 1)], "loss": {}, "accuracy": {}}
    for name, make in starts.items():
        params = {key: tensor.detach().clone().requires_grad_() for key, tensor in make().items()}
        loss, optimizer = flow.BatchLoss(learned), torch.optim.Adam(params.values(), lr=RATE)
        scores = [_scores(there, params)]
        for _ in range(count):
            for _ in range(every):
                _step(loss, params, optimizer)
            scores.append(_scores(there, params))
        for metric in ("loss", "accuracy"):
            found[metric][name] = [score[metric] for score in scores]
    return found


def _step(loss: flow.BatchLoss, params: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss(params).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _scores(task: Task, params: Mapping[str, Tensor]) -> dict[str, float]:
    detached = {name: tensor.detach() for name, tensor in params.items()}
    return {name: float(values.mean()) for name, values in task.evaluate_each(detached).items()}
