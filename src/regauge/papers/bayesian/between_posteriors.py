"""Between two posteriors: mixtures (figure 3), planes (figures 6 and A16), variances (figure 10)."""

import functools
from dataclasses import dataclass
from typing import Literal

import regauge as rg
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.posterior import Noise
from regauge.bayes.prediction.posterior_collapse import posterior_collapse
from regauge.bayes.prediction.posterior_line import posterior_line
from regauge.bayes.prediction.posterior_slice import posterior_slice
from regauge.bayes.prediction.predict import predict
from regauge.bayes.transport.posterior_mixtures import mixture
from regauge.bayes.transport.wasserstein import geodesic
from regauge.connect import interpolate
from regauge.core.params import Params
from regauge.papers.bayesian.barrier_figures import as_published, residual, small_residual, tiny
from regauge.papers.bayesian.inference import Family, batches, posteriors
from regauge.papers.experiment import Run, Scale
from regauge.papers.line_quantities import BARRIER, halfway
from regauge.papers.pictures import Chart, Series, Surface
from regauge.papers.table import Quantity, Record, Row, Table

QUANTITIES = (
    BARRIER,
    Quantity("Monte Carlo error"),
    Quantity("loss halfway", of=halfway("loss")),
    Quantity("accuracy halfway", of=halfway("accuracy")),
)
SIGN = "loss: negative log predictive likelihood per example, in nats; the paper draws the positive log likelihood"


@dataclass(frozen=True)
class Between:
    """One pair of posteriors.

    Attributes:
        family: The posteriors.
        points: Points of each line, or along each side of a plane.
        samples: Number of samples of each posterior.
        test: Number of images that are evaluated.
        notes: Departures of the scale.
    """

    family: Family
    points: int
    samples: int
    test: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PosteriorPair:
    """Two posteriors, the second also where alignment brings it.

    Attributes:
        first: q_0.
        second: q_1, as inferred.
        moved: P#q_1.
        noise: Noise of samples of q_1.
        moved_noise: Noise of the same samples of P#q_1.
    """

    first: GaussianPosterior
    second: GaussianPosterior
    moved: GaussianPosterior
    noise: Noise
    moved_noise: Noise


def mixture_config(scale: Scale) -> Between:
    """An MLP on CIFAR-10, as in the paper."""
    inference = as_published(50_000, 0.0025, 1000 if scale == "paper" else 25)
    return _config(scale, Family("CIFAR-10", "mlp", 512, inference, 50_000), points=25)


def plane_config(scale: Scale) -> Between:
    """A residual network with filter response normalization; on a CPU a wide one of small images."""
    return _config(scale, small_residual("filter", 4) if scale == "cpu" else residual(scale, "filter"), points=21)


def collapse_config(scale: Scale) -> Between:
    """An MLP on MNIST and the layers of one pair."""
    inference = as_published(60_000, 0.0025, 1000 if scale == "paper" else 25)
    return _config(scale, Family("MNIST", "mlp", 512, inference, 60_000), points=3)


def mixtures(config: Between, run: Run) -> Table:
    """Compare the geodesic, aligned and not, with the mixture."""
    family, pair = config.family, _pair(config, run)
    data = batches(family, config.test, is_test=True)

    def record(kind: Literal["geodesic", "aligned", "mixture"]) -> Record:
        last, noise = (pair.moved, pair.moved_noise) if kind == "aligned" else (pair.second, pair.noise)
        path = mixture if kind == "mixture" else geodesic
        curve = posterior_line(family.module(), pair.first, last, data, noise=noise, points=config.points, path=path)
        return {"line": list(curve.table), "Monte Carlo error": curve.error}

    labels: dict[Literal["geodesic", "aligned", "mixture"], str] = {
        "geodesic": "geodesic, as inferred",
        "aligned": "geodesic, aligned",
        "mixture": "mixture, as inferred",
    }
    sizes = (config.points, config.samples, config.test)
    found = run.grid(
        "evaluating lines",
        lambda kind: run.record((family, "mixture", *sizes), kind, functools.partial(record, kind)),
        list(labels),
    )
    lines = dict(zip(labels.values(), found, strict=True))
    rows = [Row.of(label, [[own]], QUANTITIES, is_drawn=False) for label, own in lines.items()]
    series = [
        Series(
            label,
            [point["t"] for point in own["line"]],
            [point["loss"] for point in own["line"]],
            style="dashed" if "mixture" in label else "line",
        )
        for label, own in lines.items()
    ]
    notes = (
        "the paper: a mixture shows no barrier and so misleads; its likelihood is the average of those of its ends, so "
        "that by convexity it never can",
        SIGN,
        _describe(config),
        *config.notes,
    )
    chart = Chart(family.name, "t", "test loss (nats)", tuple(series))
    return Table("Figure 3: geodesics and mixtures", notes, QUANTITIES, tuple(rows), pictures={"lines": (chart,)})


def planes(config: Between, run: Run) -> Table:
    """Likelihood and prior over the planes through three means (figure A16) and through three samples (figure 6)."""
    family, pair = config.family, _pair(config, run)
    module, data = family.module(), batches(family, config.test, is_test=False)
    corners: dict[str, tuple[Params, Params, Params]] = {
        "means": (pair.first.mean, pair.second.mean, pair.moved.mean),
        "samples": (
            _one(pair.first, pair.moved_noise),
            _one(pair.second, pair.noise),
            _one(pair.moved, pair.moved_noise),
        ),
    }
    rows, pictures = [], {}
    for name, networks in corners.items():

        def make(networks: tuple[Params, Params, Params] = networks) -> Record:
            cut = posterior_slice(
                module, *networks, data, prior_std=family.prior_std, resolution=config.points, margin=0.3
            )
            # The prior counts once for all training images, not for those alone on which the likelihood is taken.
            likelihood = -cut.per_example("log_likelihood")
            prior = -cut.plane.values["log_prior"] / family.examples
            parts = {"likelihood": likelihood, "prior": prior, "posterior": likelihood + family.temperature * prior}
            halfway = {
                "q0, P#q1": interpolate(networks[0], networks[2], 0.5),
                "q0, q1": interpolate(networks[0], networks[1], 0.5),
                "q1, P#q1": interpolate(networks[1], networks[2], 0.5),
            }
            ends = dict(zip(("q0", "q1", "P#q1"), networks, strict=True))
            return {
                "xs": cut.plane.xs.tolist(),
                "ys": cut.plane.ys.tolist(),
                "points": cut.plane.points.tolist(),
                "parts": {part: (values - values.min()).tolist() for part, values in parts.items()},
                "losses": {label: predict(module, one, data).loss for label, one in (ends | halfway).items()},
            }

        found = run.record((family, "plane", name, config.points, config.samples, config.test), "0", make)
        pictures[name] = tuple(
            Surface(
                f"-log {part} per example, {name}",
                found["xs"],
                found["ys"],
                found["parts"][part],
                [(x, y) for x, y in found["points"]],
                ("q0", "q1", "P#q1"),
            )
            for part in found["parts"]
        )
        rows += [Row(f"{name}: {label}", {"loss": [[value]]}) for label, value in found["losses"].items()]
    notes = (
        "the paper: q0 and P#q1 are connected by regions of higher density than q0 and q1; the prior is drawn apart, "
        "because it alone is better between networks, whose norms are smaller there",
        "rows with two names: the network halfway between their means or samples; training images; pictures show how "
        "far everything is above the least value, in nats per training image; posterior: log likelihood + T log prior, "
        f"with the temperature T = {family.temperature:g} of the inference",
        _describe(config),
        *config.notes,
    )
    title = "Figures 6 and A16: the log posterior over planes"
    return Table(title, notes, (Quantity("loss"),), tuple(rows), pictures=pictures)


def collapses(config: Between, run: Run) -> Table:
    """Variances of every layer halfway, over those of the ends."""
    family, pair = config.family, _pair(config, run)
    inputs = [images for images, _ in batches(family, config.test, is_test=False)]

    def record(is_aligned: bool) -> Record:
        last, noise = (pair.moved, pair.moved_noise) if is_aligned else (pair.second, pair.noise)
        path = geodesic(pair.first, last)
        ends = (path.at(0.0), path.at(1.0))
        few = {name: tensor[: max(2, config.samples // 2)] for name, tensor in noise.items()}
        found = posterior_collapse(family.module(), path.at(0.5), ends, inputs, noise=few)
        return {
            kind: [[row.layer, row.ratio] for row in table.table]
            for kind, table in (("samples", found.samples), ("averages", found.averages))
        }

    rows, series = [], []
    for is_aligned, label in ((False, "as inferred"), (True, "aligned")):
        settings = (family, "collapse", config.samples, config.test)
        found = run.record(settings, label, functools.partial(record, is_aligned))
        for kind, words in (("samples", "of samples"), ("averages", "of the average over samples")):
            ratios = {layer: [[ratio]] for layer, ratio in found[kind]}
            rows.append(Row(f"{label}, {words}", ratios))
            depth = list(range(1, len(ratios) + 1))
            flat = [ratio for _, ratio in found[kind]]
            series.append(Series(f"{label}, {words}", depth, flat, style="line" if is_aligned else "dashed"))
    notes = (
        "variance over images of what enters the nonlinearities of a layer, halfway between the posteriors, over that "
        "at the ends: 1 is no collapse; the last layer has no nonlinearity",
        "the paper: variance collapses in the naive interpolation, and less after alignment",
        _describe(config),
        *config.notes,
    )
    names = tuple(Quantity(name) for name in rows[0].values)
    chart = Chart(family.name, "layer", "variance / variance of the ends", tuple(series))
    return Table("Figure 10: variance collapse", notes, names, tuple(rows), pictures={"layers": (chart,)})


def _config(scale: Scale, family: Family, *, points: int) -> Between:
    if scale == "smoke":
        return Between(tiny(family), 3, 4, 50, ("a test run on networks that are hardly trained",))
    return Between(family, points, 32 if scale == "cpu" else 128, 1000 if scale == "cpu" else 10_000)


def _pair(config: Between, run: Run) -> PosteriorPair:
    family = config.family
    first, second = posteriors(family, 2, run)
    symmetry = rg.discover(family.module(), (family.images().test_images[:4],))
    generator = run.generator("alignment", family, 0)
    element = rg.align(first, second, symmetry, method=rg.GaussianMatching(), generator=generator).element
    noise = second.draw(config.samples, run.generator("noise", family, 0))
    moved = second.push(symmetry, element)
    return PosteriorPair(first, second, moved, noise, second.push_noise(symmetry, element, noise))


def _one(posterior: GaussianPosterior, noise: Noise) -> Params:
    one = posterior.at({name: tensor[:1] for name, tensor in noise.items()})
    return {name: tensor[0] for name, tensor in one.items()}


def _describe(config: Between) -> str:
    family = config.family
    return f"{family.name}, one pair, {family.examples:,} training images, {config.samples} samples, {family.settings}"
