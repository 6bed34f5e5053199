"""Comparisons between two posteriors: mixtures (figure 3), planes (figures 2, 6, A16), variances (figure 10)."""

from dataclasses import dataclass
from typing import NamedTuple

import regauge as rg
from regauge.bayes.posteriors.gaussian import GaussianPosterior, Noise
from regauge.bayes.prediction.posterior_landscape import one_sample, posterior_collapse, posterior_line, posterior_slice
from regauge.bayes.prediction.predict import predict
from regauge.bayes.transport.posterior_mixtures import mixture
from regauge.bayes.transport.wasserstein import geodesic
from regauge.connect import interpolate
from regauge.core.params import Params
from regauge.report.pictures import Chart, Series, Style, Surface
from regauge_papers.bayesian.barrier_figures import as_published, residual, small_residual, tiny
from regauge_papers.bayesian.inference import Family, batches, move, posteriors
from regauge_papers.experiment import Run, Scale
from regauge_papers.table import BARRIER, Quantity, Record, Row, Table, halfway, loss_series

QUANTITIES = (
    BARRIER,
    Quantity("Monte Carlo error"),
    Quantity("loss halfway", of=halfway("loss")),
    Quantity("accuracy halfway", of=halfway("accuracy")),
)
CORNERS = ("q0", "q1", "q1 aligned")
ABOUT = "q0 and q1: two posteriors, trained independently; q1 aligned: the second, brought to q0"
SIGN = "loss: negative log predictive likelihood per example, in nats; the paper draws the positive log likelihood"


@dataclass(frozen=True)
class Between:
    """Settings for one pair of posteriors."""

    title: str
    family: Family
    points: int  # of each line, or along each side of a plane
    samples: int  # of each posterior
    test: int  # images that are evaluated

    @property
    def description(self) -> str:
        """A description of the posteriors."""
        family = self.family
        return (
            f"{family.name}, one pair, {family.examples:,} training images, {self.samples} samples, "
            f"{family.shown_settings}"
        )


class PosteriorPair(NamedTuple):
    """Two posteriors, and the second posterior after alignment.

    Samples of the aligned posterior with `moved_noise` compute the same functions as samples of the second posterior
    with `noise`.
    """

    first: GaussianPosterior
    second: GaussianPosterior
    moved: GaussianPosterior
    noise: Noise
    moved_noise: Noise

    def last(self, is_aligned: bool) -> tuple[GaussianPosterior, Noise]:
        """Return the second posterior, aligned or not, and the noise of its samples."""
        return (self.moved, self.moved_noise) if is_aligned else (self.second, self.noise)


def mixture_config(scale: Scale) -> Between:
    """Return the settings: pairs of MLPs on CIFAR-10, as in the paper."""
    return _config(scale, "Figure 3: geodesics and mixtures", as_published(scale, "CIFAR-10"), points=25)


def mlp_plane_config(scale: Scale) -> Between:
    """Return the settings: pairs of MLPs on CIFAR-10, as in the paper."""
    return _config(scale, "Figure 2: the log posterior over planes, MLP", as_published(scale, "CIFAR-10"), points=21)


def plane_config(scale: Scale) -> Between:
    """Return the settings: a residual network with filter response normalization; small images are used on a CPU."""
    family = small_residual("filter", 4) if scale == "cpu" else residual(scale, "filter")
    return _config(scale, "Figures 6 and A16: the log posterior over planes", family, points=21)


def collapse_config(scale: Scale) -> Between:
    """Return the settings: one pair of MLPs on MNIST."""
    return _config(scale, "Figure 10: variance collapse", as_published(scale, "MNIST"), points=3)


def mixtures(config: Between, run: Run) -> Table:
    """Compare the geodesics before and after alignment with the mixture."""
    family, pair = config.family, _pair(config, run)
    data = batches(family, config.test, is_test=True)

    def measure(label: str) -> Record:
        last, noise = pair.last("aligned" in label)
        path = mixture if "mixture" in label else geodesic
        curve = posterior_line(pair.first, last, family.module(), data, noise=noise, points=config.points, path=path)
        return {"line": list(curve.table), "Monte Carlo error": curve.error}

    labels = ("geodesic, as inferred", "geodesic, aligned", "mixture, as inferred")
    lines = dict(zip(labels, run.records("evaluating lines", config, measure, labels), strict=True))
    rows = [Row.of(label, [[own]], QUANTITIES, is_drawn=False) for label, own in lines.items()]
    series = [
        loss_series(label, own["line"], "dashed" if "mixture" in label else "line") for label, own in lines.items()
    ]
    notes = (
        "the paper: a mixture shows no barrier and so misleads; its likelihood is the average of those of its ends, so "
        "that by convexity it never can",
        SIGN,
        config.description,
    )
    chart = Chart(family.name, "t", "test loss (nats)", tuple(series))
    return Table(config.title, notes, QUANTITIES, tuple(rows), pictures={"lines": (chart,)})


def planes(config: Between, run: Run) -> Table:
    """Measure likelihood and prior over planes through three means (A16) and three samples (figures 2 and 6)."""
    family, pair = config.family, _pair(config, run)
    module, data = family.module(), batches(family, config.test, is_test=False)
    corners: dict[str, tuple[Params, Params, Params]] = {
        "means": (pair.first.mean, pair.second.mean, pair.moved.mean),
        "samples": (
            one_sample(pair.first, pair.moved_noise),
            one_sample(pair.second, pair.noise),
            one_sample(pair.moved, pair.moved_noise),
        ),
    }

    def measure(name: str) -> Record:
        networks = corners[name]
        cut = posterior_slice(
            *networks, module, data, prior_std=family.variational.prior_std, resolution=config.points, margin=0.3
        )
        # The prior counts once for all training images, not for those alone on which the likelihood is taken.
        likelihood = -cut.per_example("log_likelihood")
        prior = -cut.plane.values["log_prior"] / family.examples
        parts = {"likelihood": likelihood, "prior": prior, "posterior": likelihood + prior}
        ends = dict(zip(("q0", "q1", "q1 aligned"), networks, strict=True))
        between = [("q0", "q1 aligned"), ("q0", "q1"), ("q1", "q1 aligned")]
        halfway = {f"{a}, {b}": interpolate(ends[a], ends[b], 0.5) for a, b in between}
        return {
            "xs": cut.plane.xs.tolist(),
            "ys": cut.plane.ys.tolist(),
            "points": cut.plane.points.tolist(),
            "parts": {part: (values - values.min()).tolist() for part, values in parts.items()},
            "losses": {label: predict(one, module, data).loss for label, one in (ends | halfway).items()},
        }

    rows, pictures = [], {}
    for name, found in zip(
        corners, run.records("evaluating the parts of planes", config, measure, list(corners)), strict=True
    ):
        points = [(x, y) for x, y in found["points"]]
        pictures[name] = tuple(
            Surface(f"-log {part} per example, {name}", found["xs"], found["ys"], values, points, CORNERS, ABOUT)
            for part, values in found["parts"].items()
        )
        rows += [Row(f"{name}: {label}", {"loss": [[value]]}) for label, value in found["losses"].items()]
    notes = (
        "the paper: q0 and q1 aligned are connected by regions of higher density than q0 and q1; the prior is drawn "
        "apart, because it alone is better between networks, whose norms are smaller there",
        "rows with two names: the network halfway between their means or samples; training images; pictures show how "
        "far everything is above the least value, in nats per training image",
        "posterior: log likelihood + log prior; the inference tempers this sum as a whole, to the power 1/T with "
        f"T = {family.variational.temperature:g}, which multiplies every value of the panel and leaves its form",
        config.description,
    )
    return Table(config.title, notes, (Quantity("loss"),), tuple(rows), pictures=pictures)


def collapses(config: Between, run: Run) -> Table:
    """Measure the variances of every layer at the midpoint of a path, relative to the endpoints."""
    family, pair = config.family, _pair(config, run)
    inputs = [images for images, _ in batches(family, config.test, is_test=False)]

    def measure(label: str) -> Record:
        last, noise = pair.last(label == "aligned")
        path = geodesic(pair.first, last)
        ends = (path.at(0.0), path.at(1.0))
        few = {name: tensor[: max(2, config.samples // 2)] for name, tensor in noise.items()}
        found = posterior_collapse(path.at(0.5), ends, family.module(), inputs, noise=few)
        tables = {"of samples": found.samples, "of the average over samples": found.averages}
        return {words: {row.layer: row.ratio for row in one.table} for words, one in tables.items()}

    styles: dict[str, Style] = {"as inferred": "dashed", "aligned": "line"}
    rows, series = [], []
    for label, found in zip(styles, run.records("measuring variances", config, measure, list(styles)), strict=True):
        for words, ratios in found.items():
            rows.append(Row(f"{label}, {words}", {layer: [[ratio]] for layer, ratio in ratios.items()}))
            depths = list(range(1, len(ratios) + 1))
            series.append(Series(f"{label}, {words}", depths, list(ratios.values()), style=styles[label]))
    notes = (
        "variance over images of what enters the nonlinearities of a layer, halfway between the posteriors, over that "
        "at the ends: 1 is no collapse; the last layer has no nonlinearity",
        "the paper: variance collapses in the naive interpolation, and less after alignment",
        config.description,
    )
    names = tuple(Quantity(name) for name in rows[0].values)
    chart = Chart(family.name, "layer", "variance / variance of the ends", tuple(series))
    return Table(config.title, notes, names, tuple(rows), pictures={"layers": (chart,)})


def _config(scale: Scale, title: str, family: Family, *, points: int) -> Between:
    if scale == "smoke":
        return Between(title, tiny(family), 3, 4, 50)
    return Between(title, family, points, 32 if scale == "cpu" else 128, 1000 if scale == "cpu" else 10_000)


def _pair(config: Between, run: Run) -> PosteriorPair:
    family = config.family
    first, second = posteriors(family, 2, run)
    noise = second.draw(config.samples, run.generator("noise", family, 0))
    generator = run.generator("alignment", family, 0)
    moved, moved_noise, _ = move(rg.GaussianMatching(), first, second, noise, family.symmetry(), generator)
    return PosteriorPair(first, second, moved, noise, moved_noise)
