"""Variance collapse between posteriors: how much of the ends' variance is left, layer by layer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regauge.bayes.posteriors.gaussian import Noise, Posterior
from regauge.connect.moments import Moments, Statistics
from regauge.connect.repair import VarianceCollapse, require_endpoints, tabulate_variances
from regauge.core.params import Params, select


@dataclass(frozen=True)
class PosteriorCollapse:
    """Variances over the data of the values of layers, in a posterior against those in its ends.

    Attributes:
        samples: Variances of each sample's units, averaged over samples.
        averages: Variances of the units averaged over samples, input by input: the part that all samples share.
    """

    samples: VarianceCollapse
    averages: VarianceCollapse


def posterior_collapse(
    module: nn.Module,
    posterior: Posterior,
    ends: Sequence[Posterior],
    batches: Iterable[Any],
    *,
    noise: Noise,
    weights: Sequence[float] | None = None,
) -> PosteriorCollapse:
    """Measure the variance over data of every layer's units, in a posterior and in its ends.

    The values are those of `variance_collapse`, before the nonlinearity; what is expected is again the square of the
    ends' interpolated standard deviations. For posteriors without uncertainty both tables are its table. Samples run
    one by one, and all values of a batch in one sample are held at a time.

    Args:
        module: The module that runs the parameters; its own are not used.
        posterior: A posterior between the ends, such as `geodesic(a, b).at(0.5)`.
        ends: The ends, for the same noise: `geodesic(a, b).at(0.0)` and `.at(1.0)`.
        batches: Inputs without labels, or tuples of positional or mappings of keyword inputs; they are held.
        noise: Noise of the samples of all posteriors.
        weights: Share of every end: `(1 - t, t)` at t; equal unless given.

    Raises:
        TraceError: The module cannot be traced.
        ValueError: As for `repair`.

    References:
        Rossi et al. (2023), section 5.4 and figure 10; Jordan et al. (2023), REPAIR, section 3.1.
    """
    firsts = [one_sample(q, noise) for q in (posterior, *ends)]
    shares = require_endpoints(firsts[0], firsts[1:], weights)
    statistics = Statistics(module, list(batches), firsts)
    now, *limits = [_variances(statistics, statistics.places, q, noise) for q in (posterior, *ends)]
    tables = []
    for kind, variances in enumerate(now):
        stds = {name: torch.stack([end[kind][name].sqrt() for end in limits]) for name in variances}
        expected = {name: (each * torch.tensor(shares).to(each)[:, None]).sum(0) for name, each in stds.items()}
        tables.append(tabulate_variances(statistics, variances, expected))
    return PosteriorCollapse(*tables)


def one_sample(posterior: Posterior, noise: Noise, k: int = 0) -> Params:
    """One of the samples of a posterior."""
    return select(posterior.at(select(noise, slice(k, k + 1))), 0)


def _variances(
    statistics: Statistics, places: Mapping[str, int], posterior: Posterior, noise: Noise
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """For every unit over the data: the average over samples of its variance, and the variance of its average."""
    count = len(next(iter(noise.values())))
    each = [{name: Moments() for name in places} for _ in range(count)]
    averaged = {name: Moments() for name in places}
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
