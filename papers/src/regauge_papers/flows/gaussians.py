"""Paper 000, figures 6.3 and 7.1: a flow between two normal distributions, and the random times of the thesis.

The sampler of the thesis moves along `end - start`, where a net predicts the end. If the exact expected end replaces
the net's prediction, sampled values have a standard deviation of 0.49 instead of 1. The net is therefore not the cause
of the result in figure 7.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import regauge as rg
from regauge import flow
from regauge.core.params import Params
from regauge.flow.manifold import Points
from regauge.flow.sampling import Field, follow_thesis, integrate
from regauge.flow.space import Space
from regauge.flow.velocity import LATEST, StraightLines
from regauge.report.pictures import Chart, Picture, Series
from regauge.weightspace import RelationalAttention
from regauge.zoo.presets import mlp_architecture
from regauge_papers.experiment import Run, Scale, make_once
from regauge_papers.table import Quantity, Record, Row, Table

QUANTITIES = (
    Quantity("mean"),
    Quantity("deviation"),
    Quantity("deviation of means / right", 2),
    Quantity("correlation with the start"),
)
EPSILON = 0.05
"""The standard deviation of the noise in each late step. Figure 7.1 shows results with a noise of `EPSILON`, and
without noise."""
BINS = 24


@dataclass(frozen=True)
class Study:
    """Settings: networks of normal values with mean one, and flows to these networks from normal values with mean
    zero.
    """

    widths: tuple[int, ...]
    networks: int  # that flows are fitted to
    thesis: flow.FlowConfig
    own: flow.FlowConfig
    drawn: int
    steps: int


def config(scale: Scale) -> Study:
    """Return the settings: MLPs 30-16-16-2 with deviation 1, as in the thesis; 40 CPU seconds or, at the paper's scale,
    an hour per flow.
    """
    count, seconds = {"smoke": (60, 0.2), "cpu": (2000, 40.0), "paper": (20_000, 3600.0)}[scale]
    width, depth = {"smoke": (8, 1), "cpu": (16, 3), "paper": (64, 5)}[scale]
    net = flow.Metanetwork(RelationalAttention(heads=1, expansion=1), width, depth)
    prior, epochs = flow.PlainGaussian(1.0), 2 if scale == "smoke" else 1000
    thesis = flow.thesis_config(net=net, prior=prior, seconds=seconds, is_cpu_time=True, epochs=epochs)
    own = flow.FlowConfig(
        representation=flow.Representation("keep"),
        prior=prior,
        net=net,
        is_aligned=False,
        has_gaussian=False,
        batch=32,
        seconds=seconds,
        is_cpu_time=True,
        epochs=epochs,
    )
    widths = (4, 3, 2) if scale == "smoke" else (30, 16, 16, 2)
    drawn = {"smoke": 50, "cpu": 300, "paper": 2000}[scale]
    return Study(widths, count, thesis, own, drawn, 6 if scale == "smoke" else 100)


def measure(study: Study, run: Run) -> Table:
    """Fit two flows, and follow the flows and the exact expectations with each sampler."""
    architecture = mlp_architecture(*study.widths)
    module = architecture.module()
    symmetry = rg.discover(module, (torch.randn(2, study.widths[0], generator=run.generator("inputs")),))
    chance = run.generator("networks")
    networks: Params = {
        name: 1 + torch.randn(study.networks, *tensor.shape, generator=chance)
        for name, tensor in module.state_dict().items()
    }
    space = Space.of(networks, symmetry, study.thesis.representation)

    def fit(settings: flow.FlowConfig, label: str) -> flow.Flow:
        place = run.place("flows", (study.widths, study.networks, label, settings))

        def write() -> None:
            generator = run.generator("flow", label)
            made = flow.fit(networks, symmetry, settings, generator=generator, progress=run.progress)
            made.save(place)

        make_once(place, write)
        return flow.load_flow(place)

    def score(label: str) -> Record:
        start = torch.randn(study.drawn, space.dim, generator=run.generator("starts"))
        if label == "networks that flows are fitted to":
            return _scores(space.enter(networks)[: study.drawn], None)
        ends, velocity = _expected(space.dim), _expected_velocity
        if label.startswith("thesis' flow"):
            made = fit(study.thesis, "thesis")
            ends, velocity = made.velocity.predict_end, made.velocity
        elif label.startswith("flow of velocities"):
            velocity = fit(study.own, "velocities").velocity
        noise = EPSILON if "noise" in label else 0.0
        with torch.no_grad():
            if "its sampler" in label:
                late = run.generator("noise")
                return _scores(follow_thesis(ends, start, steps=study.steps, noise=noise, generator=late), start)
            return _scores(integrate(space, velocity, start, steps=study.steps, solver="euler"), start)

    kinds = ("exact expectations", "thesis' flow")
    ways = ("its sampler", "its sampler with noise", "the flow's equation")
    labels = [f"{kind}, {way}" for kind in kinds for way in ways]
    labels += ["flow of velocities, the flow's equation", "networks that flows are fitted to"]
    found = run.records("normal", study, score, labels)
    rows = [Row.of(label, [[record]], QUANTITIES) for label, record in zip(labels, found, strict=True)]
    notes = (
        f"networks {architecture.name} of independent normal values: flows from mean 0 to mean 1, both of deviation 1; "
        f"{study.networks} networks to fit to, {study.drawn} drawn, {study.steps} steps of Euler's method",
        f"with noise: of deviation {EPSILON} in each step after time 0.8, as in the thesis' figure; what it adds to "
        "the variance grows with the number of steps",
        "deviation of means: over networks, of the mean of all values of one, which figure 7.1 shows, as a share of "
        f"the right one, {1 / space.dim**0.5:.4f}; that of values counts single values",
        f"both flows: {study.own.net}, {study.own.seconds:.0f} CPU seconds; that of velocities knows no normal "
        "distributions in closed form, which is the default elsewhere",
        f"figure 6.3: times are drawn by {study.thesis.times}",
    )
    pictures: dict[str, Picture] = {
        "means": _histograms(dict(zip(labels, found, strict=True)), kinds, ways),
        "times": _times(study.thesis.times, run.generator("times")),
    }
    return Table("A flow between normal distributions", notes, QUANTITIES, tuple(rows), pictures=pictures)


def _line(dim: int) -> StraightLines:
    zero, one = torch.zeros(dim), torch.ones(dim)
    return StraightLines((zero, one), (one, one))


def _expected(dim: int) -> Field:
    """Return the function that computes the exact expected end of a path, given its current position."""
    return lambda x, t: _line(dim).goal(x, t.unsqueeze(1))[0]


def _expected_velocity(x: Points, t: Tensor) -> Points:
    """Return the exact velocity, computed from the expected end."""
    return (_expected(x.shape[1])(x, t) - x) / (1 - t).clamp_min(1 - LATEST).unsqueeze(1)


def _scores(points: Points, start: Points | None) -> Record:
    values, means = points.double(), points.double().mean(1)
    middle, counts = _count(means)
    found: Record = {
        "mean": float(values.mean()),
        "deviation": float((values - values.mean(0)).square().mean().sqrt()),
        "deviation of means / right": float(means.std()) * points.shape[1] ** 0.5,
        "means": [middle, counts],
    }
    if start is not None:
        pair = torch.stack([(one.double() - one.double().mean(0)).flatten() for one in (start, points)])
        found["correlation with the start"] = float(torch.corrcoef(pair)[0, 1])
    return found


def _count(values: Tensor) -> tuple[list[float], list[float]]:
    """Return the centers and densities of a histogram."""
    density, edges = torch.histogram(values.float(), BINS, density=True)
    return ((edges[1:] + edges[:-1]) / 2).tolist(), density.tolist()


def _histograms(found: dict[str, Record], kinds: Sequence[str], ways: Sequence[str]) -> Picture:
    known = "networks that flows are fitted to"

    def panel(kind: str) -> Chart:
        rows = {way: found[f"{kind}, {way}"]["means"] for way in ways} | {known: found[known]["means"]}
        series = tuple(
            Series(label, x, y, style="dashed" if label == known else "line") for label, (x, y) in rows.items()
        )
        return Chart(kind[0].upper() + kind[1:], "mean of a network's values", "density", series)

    return tuple(map(panel, kinds))


def _times(times: flow.BetaTime | flow.UniformTime, generator: torch.Generator) -> Picture:
    x, y = _count(times.draw(20_000, generator))
    exact = [2 * (1 - place) for place in x]
    series = (Series("drawn", x, y, style="points"), Series("Beta(1, 2)", x, exact))
    return (Chart("Times at which flows are trained", "time", "density", series),)
