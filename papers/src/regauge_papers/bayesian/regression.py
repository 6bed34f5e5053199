"""Figure 1 of paper 004: two posteriors of a regression, and the functions at the midpoint between them."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import regauge as rg
from regauge.bayes.posteriors.gaussian import GaussianPosterior, Posterior
from regauge.bayes.prediction.likelihoods import Normal
from regauge.bayes.prediction.posterior_landscape import PosteriorCurve, one_sample, posterior_line
from regauge.bayes.prediction.predict import predict
from regauge.bayes.transport.wasserstein import geodesic
from regauge.bayes.variational.mean_field import VariationalConfig, fit
from regauge.core.params import Params
from regauge.core.progress import Progress
from regauge.nets.classification import initialize
from regauge.nets.mlp import MLP, mlp
from regauge.report.pictures import Chart, Series
from regauge.training import Adam
from regauge_papers.bayesian.inference import keep, move, name_inference
from regauge_papers.bayesian.snelson import CurveData, has_snelson, snelson
from regauge_papers.experiment import Run, Scale
from regauge_papers.table import Quantity, Row, Table

NOISE = 0.3
"""The standard deviation of the targets around the curve, which is about the noise of the Snelson set."""
LIMITS = (-3.5, 3.0)
"""The range of function values in the pictures."""


@dataclass(frozen=True)
class Regression:
    """Settings: pairs of posteriors of a regression; the first pair is drawn."""

    width: int  # units of each of the three hidden layers
    inference: VariationalConfig
    pairs: int
    points: int  # of each geodesic
    samples: int  # of each posterior
    is_small: bool = False  # whether a made-up curve stands in for the Snelson set

    def data(self) -> CurveData:
        """Return the data, whose inputs have mean 0 and standard deviation 1."""
        found = _wave() if self.is_small else snelson()
        mean, std = found.inputs.mean(), found.inputs.std()
        return CurveData((found.inputs - mean) / std, found.targets, (found.test_inputs - mean) / std)

    def module(self) -> MLP:
        """Return the network from positions to values."""
        return mlp(1, *[self.width] * 3, 1)


def config(scale: Scale) -> Regression:
    """Return the settings: three hidden layers of 50 units; the paper does not specify the width."""
    inference = VariationalConfig(
        epochs=4000, batch=200, optimizer=Adam(3e-3), prior_std=1.0, temperature=0.1, initial_std=0.05
    )
    if scale == "smoke":
        return Regression(
            8, VariationalConfig(epochs=20, batch=50, optimizer=Adam(3e-3)), 1, 3, 8, is_small=not has_snelson()
        )
    return Regression(50, inference, 5, 25, 128)


def measure(config: Regression, run: Run) -> Table:
    """Fit the posteriors, align each pair by three methods, and draw the functions of the first pair."""
    data, module = config.data(), config.module()
    examples = [(data.inputs, data.targets)]
    posteriors = run.grid("fitting", functools.partial(_posterior, config, run), range(2 * config.pairs))
    symmetry = rg.discover(module, (data.inputs[:4],))
    methods = {
        "as inferred": None,
        "aligned": rg.GaussianMatching(),
        "aligned with scales": rg.GaussianMatching(method=rg.WeightMatching()),
    }
    rows: list[Row] = []
    halfway: dict[str, tuple[Posterior, Params]] = {}
    for label, method in methods.items():
        curves: list[PosteriorCurve] = []
        for pair in range(config.pairs):
            a, b = posteriors[2 * pair : 2 * pair + 2]
            noise = b.draw(config.samples, run.generator("noise", pair))
            b, noise, _ = move(method, a, b, noise, symmetry, run.generator("alignment", pair))
            curves.append(
                posterior_line(a, b, module, examples, noise=noise, points=config.points, likelihood=Normal(NOISE))
            )
            if pair == 0:
                halfway[label] = (geodesic(a, b).at(0.5), noise)
        middle = config.points // 2
        values = {
            "barrier": [[curve.barrier for curve in curves]],
            "Monte Carlo error": [[curve.error for curve in curves]],
            "loss halfway": [[curve.table[middle]["loss"] for curve in curves]],
            "rmse halfway": [[curve.table[middle]["rmse"] for curve in curves]],
        }
        if method is None:
            ends = [row for curve in curves for row in (curve.table[0], curve.table[-1])]
            values["loss of the ends"] = [[row["loss"] for row in ends]]
            values["rmse of the ends"] = [[row["rmse"] for row in ends]]
        rows.append(Row(label, values))
    noise = posteriors[1].draw(config.samples, run.generator("noise", 0))
    both: dict[str, tuple[Posterior, Params]] = {"first": (posteriors[0], noise), "second": (posteriors[1], noise)}
    between = {"halfway, as inferred": halfway["as inferred"], "halfway, aligned": halfway["aligned"]}
    notes = (
        "the paper shows functions only; both ends fit the data, the functions halfway only after alignment, as there",
        f"{'a made-up curve' if config.is_small else 'the 200 points of the Snelson set'}, inputs normalized, noise of "
        f"standard deviation {NOISE:g}; MLP 1-{config.width}-{config.width}-{config.width}-1 with ReLU; "
        f"{config.pairs} pair(s), {config.samples} samples; {name_inference(config.inference)}",
        "loss: negative log predictive likelihood per example of the training points, in nats",
    )
    pictures = {
        "functions": (
            _functions("Two posteriors", config, data, both),
            _functions("Halfway between them", config, data, between),
        )
    }
    quantities = tuple(Quantity(name) for name in rows[0].values)
    return Table("Figure 1: posteriors of a regression", notes, quantities, tuple(rows), pictures=pictures)


def _posterior(config: Regression, run: Run, unit: Progress, index: int) -> GaussianPosterior:
    settings = (config.width, config.inference, config.is_small)

    def make() -> GaussianPosterior:
        names = (config.width, name_inference(config.inference), config.is_small)
        generator = run.generator("regression", names, index)
        data, module = config.data(), config.module()
        start, likelihood, inference = initialize(module, generator), Normal(NOISE), config.inference
        return fit(
            start,
            module,
            data.inputs,
            data.targets,
            inference,
            generator=generator,
            likelihood=likelihood,
            state=run.state(settings, str(index)),
            progress=unit,
        )

    return keep(settings, str(index), make, run)


def _functions(
    title: str, config: Regression, data: CurveData, posteriors: Mapping[str, tuple[Posterior, Params]]
) -> Chart:
    """Return a chart: the mean function, two standard deviations, and one dashed sample."""
    grid = torch.linspace(float(data.test_inputs.min()), float(data.test_inputs.max()), 200)[:, None]
    series = [Series("data", data.inputs.flatten().tolist(), data.targets.flatten().tolist(), style="points")]
    for label, (posterior, noise) in posteriors.items():
        module = config.module()
        found = predict(posterior, module, [(grid, torch.zeros_like(grid))], noise=noise, likelihood=Normal(NOISE))
        mean, std = found.mean.flatten(), found.std.flatten()
        x = grid.flatten().tolist()
        series.append(Series(label, x, mean.tolist(), (mean - 2 * std).tolist(), (mean + 2 * std).tolist()))
    for posterior, noise in posteriors.values():
        with torch.no_grad():
            values = torch.func.functional_call(config.module(), one_sample(posterior, noise), (grid,)).flatten()
        series.append(Series("", grid.flatten().tolist(), values.tolist(), style="dashed"))
    return Chart(title, "input", "target", tuple(series), y_limits=LIMITS)


def _wave() -> CurveData:
    """Return a noisy sine wave, for test runs without the Snelson set."""
    generator = torch.Generator().manual_seed(0)
    inputs = 6 * torch.rand(60, 1, generator=generator)
    noise: Tensor = NOISE * torch.randn(60, 1, generator=generator)
    return CurveData(inputs, torch.sin(inputs) + noise, torch.linspace(-1, 7, 50)[:, None])
