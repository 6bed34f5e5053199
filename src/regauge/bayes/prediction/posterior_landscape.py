"""The landscape between posteriors: predictive loss along a path, log posterior on a plane, variance collapse."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regauge.bayes.posteriors.gaussian import Noise, Posterior
from regauge.bayes.prediction.likelihoods import Likelihood
from regauge.bayes.prediction.predict import draw_noise, predict
from regauge.bayes.prediction.predictive import Predictive, standard_error
from regauge.bayes.transport.posterior_mixtures import MixturePath
from regauge.bayes.transport.wasserstein import geodesic
from regauge.connect.line import Curve
from regauge.connect.plane import Plane, plane
from regauge.connect.repair import VarianceCollapse, require_endpoints, tabulate_variances
from regauge.connect.unit_moments import LayerStatistics, RunningMoments
from regauge.core.arguments import check_arguments
from regauge.core.outputs import Outputs
from regauge.core.params import Params, select
from regauge.core.task import Batch


class PosteriorPath(Protocol):
    """A path from one posterior (t = 0) to a second posterior (t = 1), as `geodesic` and `mixture` return it."""

    def at(self, t: float) -> Posterior:
        """Return the posterior at the position t of the path."""


@dataclass(frozen=True, eq=False)
class PosteriorCurve(Curve):
    """The predictive loss along a path of posteriors, sampled with the same noise at every point.

    The loss is the *negative* log predictive likelihood per example, in nats. Therefore a barrier is positive and high
    if predictions get worse along the path. In Rossi et al. (2023), L is a log likelihood, summed over examples. With a
    log likelihood as L, equation 10 of the paper gives the largest improvement instead of the barrier.

    Attributes:
        table: One row per point: "t" and `Predictive.metrics`, which include the Monte Carlo "error" of the "loss".
        influences: The influence of each sample on the loss at each point, `[points, samples]`.

    References:
        Rossi et al. (2023), definition 3.
    """

    influences: Tensor

    @property
    def excess_errors(self) -> tuple[float, ...]:
        """Monte Carlo standard errors of `excess`. The errors are NaN for a single sample, and 0 at the endpoints.

        All points use the same noise, so a sample changes the losses at the endpoints and between them by similar
        amounts, which largely cancel in the excess. Therefore the errors of the excess are often much smaller than the
        errors of the losses.
        """
        ts = torch.tensor([row["t"] for row in self.table], dtype=torch.float64, device=self.influences.device)[:, None]
        rest = self.influences - ((1 - ts) * self.influences[0] + ts * self.influences[-1])
        return (0.0, *(standard_error(row) for row in rest[1:-1]), 0.0)

    @property
    def error(self) -> float:
        """The Monte Carlo standard error of the barrier, that is, of the excess at its highest point.

        The barrier is the maximum of several noisy values. The error ignores that the largest value was chosen.
        """
        return self.excess_errors[max(range(len(self.excess)), key=self.excess.__getitem__)]

    def __str__(self) -> str:
        return f"{super().__str__()}; Monte Carlo error of the barrier {self.error:.2g}"


@check_arguments
def posterior_line(
    q_a: Posterior,
    q_b: Posterior,
    module: nn.Module,
    batches: Iterable[Batch],
    *,
    noise: Noise | None = None,
    samples: int | None = None,
    generator: torch.Generator | None = None,
    points: int = 25,
    path: Callable[[Posterior, Posterior], PosteriorPath] = geodesic,
    likelihood: Likelihood | None = None,
    outputs: Outputs = None,
    chunk: int | None = None,
) -> PosteriorCurve:
    """Return the predictive loss along a path from one posterior to another; default: the Wasserstein geodesic.

    Every point is sampled with the same noise. To compare a path to `q_b` with a path to the aligned `q_b.push(s, g)`,
    pass `noise` for the first path and `q_b.push_noise(s, g, noise)` for the second. Between diagonal Gaussians, a path
    ends at `q_b` itself. At t = 1, the paths to `q_b` and to the aligned posterior then have the same loss, because
    their samples compute the same functions. If a path rewrites `q_b`, for example with rotated Kronecker factors, its
    endpoint has the distribution of `q_b`, but different samples.

    With `path=mixture`, nothing is sampled between the endpoints. The likelihood of a mixture is exactly the average of
    the likelihoods of the endpoints, each with all samples. The path of mixtures never has a barrier, because -log is
    convex.

    Args:
        module, batches, likelihood, outputs, chunk: See `predict`.
        q_a: The posterior at t = 0.
        q_b: The posterior at t = 1, of the same kind as `q_a`. Align `q_b` first; otherwise the barrier has little
            meaning.
        noise: The noise of the samples, in the coordinates of q_a.
        samples: The number of samples, if `noise` is not given.
        generator: The random generator of the samples.
        points: The number of equally spaced values of t, including both endpoints.
        path: `geodesic` or `mixture`.

    Raises:
        ValueError: There are fewer than three points, the path does not exist between `q_a` and `q_b`, or a condition
            of `predict` is violated.

    References:
        Rossi et al. (2023), equations 6 and 10, figure 3, with 25 points and 128 samples.
    """
    if points < 3:
        raise ValueError(f"a line needs both ends and at least one point between them, but points={points}")
    if noise is not None and samples is not None:
        raise ValueError("both the noise and a number of samples are given; leave one of them out")
    data = list(batches)
    track = path(q_a, q_b)
    is_mixture = isinstance(track, MixturePath)
    noise = draw_noise(q_a, samples, generator) if noise is None else noise

    def predict_at(posterior: Posterior) -> Predictive:
        return predict(posterior, module, data, noise=noise, likelihood=likelihood, outputs=outputs, chunk=chunk)

    ends = (predict_at(q_a), predict_at(q_b)) if is_mixture else None
    table, influences = [], []
    for k in range(points):
        t = k / (points - 1)
        predictive = predict_at(track.at(t)) if ends is None else mix(*ends, t)
        table.append({"t": t, **predictive.metrics})
        influences.append(predictive.influences)
    return PosteriorCurve(tuple(table), torch.stack(influences))


def mix(first: Predictive, last: Predictive, t: float) -> Predictive:
    """Return the prediction of the mixture `(1 - t) first + t last`, from paired samples with the same noise."""
    if t in (0, 1):
        return last if t else first
    shares = torch.tensor([1 - t, t], dtype=torch.float64).log().tolist()
    likelihoods = torch.logaddexp(first.log_likelihoods + shares[0], last.log_likelihoods + shares[1])
    averages = {name: torch.lerp(value, last.averages[name], t) for name, value in first.averages.items()}
    return replace(first, log_likelihoods=likelihoods, averages=averages)


@dataclass(frozen=True, eq=False)
class PosteriorSlice:
    """The log likelihood and log prior on a plane of networks, in nats.

    Attributes:
        plane: The surfaces on the grid and their values at the three networks. The surfaces "log_likelihood" and
            "log_prior" are sums over all examples and parameters. The surface "log_posterior" is the sum of
            "log_likelihood" and "log_prior", without the unknown normalizing constant. The surface "loss" is the
            negative log likelihood per example. The axes are orthonormal; `plane.points` marks the three networks.
        examples: The number of examples, by which `per_example` divides sums to compare them with losses.
    """

    plane: Plane
    examples: int

    def per_example(self, name: str) -> Tensor:
        """Return a surface divided by the number of examples, `[rows, columns]`.

        Raises:
            KeyError: There is no surface with the given name.
        """
        return self.plane.values[name] / (1 if name == "loss" else self.examples)


@check_arguments
def posterior_slice(
    first: Posterior | Mapping[str, Tensor],
    second: Posterior | Mapping[str, Tensor],
    third: Posterior | Mapping[str, Tensor],
    module: nn.Module,
    batches: Iterable[Batch],
    *,
    prior_std: float,
    likelihood: Likelihood | None = None,
    outputs: Outputs = None,
    resolution: int = 21,
    margin: float = 0.2,
) -> PosteriorSlice:
    """Return the log posterior on the plane through three networks, or through the means of three posteriors.

    For example, pass `q_0`, `q_1` and `q_1.push(s, g)`, which is the second posterior aligned to the first. A picture
    of the plane through the three networks shows how deep the valleys between the posteriors are. The prior is often
    *higher* between networks, because weights between two networks have smaller norms. Therefore the likelihood and the
    prior are separate surfaces. For a plane through samples, pass one network of each posterior, `{n: t[0] for n, t in
    q.at(noise).items()}`. For the transformed posterior, pass the result of `push_noise` to `at`. With the transformed
    noise, a sample of `q.push(s, g)` computes the same function as the sample of `q`.

    Args:
        first: The origin: parameters, or a posterior whose mean is used.
        second: A network on the positive x axis, or a posterior.
        third: A network off the x axis, or a posterior.
        module: The module that runs the parameters; its own parameters are not used.
        prior_std: The standard deviation of the prior of every parameter of the module. Buffers have no prior.
        batches, likelihood, outputs: See `predict`.
        resolution, margin: See `rg.connect.plane`.

    Raises:
        ValueError: The standard deviation of the prior is not positive, or a condition of `predict` or
            `rg.connect.plane` is violated.

    References:
        Rossi et al. (2023), appendix D and figure A16 (means), figure 6 (samples).
    """
    if not 0 < prior_std < math.inf:
        raise ValueError(f"the prior has standard deviation {prior_std}; it must be positive and finite")
    data = list(batches)
    counted = {name: tensor.numel() for name, tensor in module.named_parameters()}
    count = sum(counted.values())
    found = 0

    def judge(params: Params) -> dict[str, float]:
        nonlocal found
        log_likelihoods = predict(params, module, data, likelihood=likelihood, outputs=outputs).log_likelihoods
        found = log_likelihoods.numel()
        total = float(log_likelihoods.sum())
        squares = sum(float(params[name].double().square().sum()) for name in counted)
        prior = -squares / (2 * prior_std**2) - count * (math.log(prior_std) + math.log(2 * math.pi) / 2)
        return {"log_likelihood": total, "log_prior": prior, "log_posterior": total + prior, "loss": -total / found}

    a, b, c = (q if isinstance(q, Mapping) else q.moments().mean for q in (first, second, third))
    buffers = [name for name, _ in module.named_buffers()]
    found_plane = plane(a, b, c, judge, resolution=resolution, margin=margin, buffers=buffers)
    return PosteriorSlice(found_plane, found)


@dataclass(frozen=True)
class PosteriorCollapse:
    """Variances of activations over the data, for a posterior relative to the two endpoints of a path.

    Attributes:
        samples: The variances of the units in each sample, averaged over samples.
        averages: The variances of the units after activations are averaged over samples for each input. The variances
            of the mean activations describe the part of the activations that is common to all samples.
    """

    samples: VarianceCollapse
    averages: VarianceCollapse


@check_arguments
def posterior_collapse(
    posterior: Posterior,
    ends: Sequence[Posterior],
    module: nn.Module,
    batches: Iterable[Any],
    *,
    noise: Noise,
    weights: Sequence[float] | None = None,
) -> PosteriorCollapse:
    """Measure the variance of every unit over data, for a posterior on a path and for both endpoints of the path.

    As in `variance_collapse`, activations are measured before the nonlinearity. As in `variance_collapse`, the expected
    variance is the square of the endpoints' interpolated standard deviation. For posteriors without uncertainty, the
    tables `samples` and `averages` equal the table of `variance_collapse`. Samples are evaluated one by one, and all
    activations of one batch and one sample are held in memory at a time.

    Args:
        posterior: A posterior between the endpoints, such as `geodesic(a, b).at(0.5)`.
        ends: The endpoints of the path, which use the same noise: `geodesic(a, b).at(0.0)` and `.at(1.0)`.
        module: The module that runs the parameters; its own parameters are not used.
        batches: Batches, as for `repair`; all batches are held in memory.
        noise: The noise of the samples of all posteriors.
        weights: The weight of each endpoint: `(1 - t, t)` at t; equal by default.

    Raises:
        TraceError: The module cannot be traced.
        ValueError: A condition of `repair` is violated.

    References:
        Rossi et al. (2023), section 5.4 and figure 10; Jordan et al. (2023), REPAIR, section 3.1.
    """
    firsts = [one_sample(q, noise) for q in (posterior, *ends)]
    *_, shares = require_endpoints(firsts[0], firsts[1:], weights)
    statistics = LayerStatistics(module, list(batches), firsts)
    now, *limits = [_variances(statistics, statistics.places, q, noise) for q in (posterior, *ends)]
    tables = []
    for kind, variances in enumerate(now):
        stds = {name: torch.stack([end[kind][name].sqrt() for end in limits]) for name in variances}
        expected = {name: (each * torch.tensor(shares).to(each)[:, None]).sum(0) for name, each in stds.items()}
        tables.append(tabulate_variances(statistics, variances, expected))
    return PosteriorCollapse(*tables)


def one_sample(posterior: Posterior, noise: Noise, k: int = 0) -> Params:
    """Return the sample with the index `k` of a posterior."""
    return select(posterior.at(select(noise, slice(k, k + 1))), 0)


def _variances(
    statistics: LayerStatistics, places: Mapping[str, int], posterior: Posterior, noise: Noise
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return two variances of each unit over the data: the mean of the samples' variances, and the variance of mean
    activations.
    """
    count = len(next(iter(noise.values())))
    each = [{name: RunningMoments() for name in places} for _ in range(count)]
    averaged = {name: RunningMoments() for name in places}
    # Samples advance together, so that their average on a batch needs no second pass and no stored activations.
    runs = [statistics.activations(one_sample(posterior, noise, k), places) for k in range(count)]
    while True:
        totals: dict[str, Tensor] = {}
        for k, run in enumerate(runs):
            values = next(run, None)
            if values is None:
                break
            for name, samples in values.items():
                each[k][name].update(samples)
                totals[name] = totals[name] + samples if name in totals else samples
        if not totals:
            break
        for name, total in totals.items():
            averaged[name].update(total / count)
    variances = {name: torch.stack([m[name].std.square() for m in each]).mean(0) for name in places}
    return variances, {name: averaged[name].std.square() for name in places}
