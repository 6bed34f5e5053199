"""Variance collapse: how much of the endpoints' variance is left in an interpolated network, layer by layer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regauge.connect.moments import Statistics
from regauge.connect.repair import goals, require_endpoints


@dataclass(frozen=True)
class LayerVariance:
    """The variances of one layer, means over its units.

    Attributes:
        layer: Its name.
        units: Number of its units.
        variance: Of the interpolated network's units over the data.
        expected: Of the endpoints: the squares of the interpolated standard deviations.
        ratio: The first over the second; one without collapse, NaN where both are zero.
    """

    layer: str
    units: int
    variance: float
    expected: float
    ratio: float


@dataclass(frozen=True)
class VarianceCollapse:
    """Variances in an interpolated network against those between its endpoints.

    Attributes:
        table: One row per layer, in the order of the graph.
    """

    table: tuple[LayerVariance, ...]

    def __str__(self) -> str:
        width = max((len(row.layer) for row in self.table), default=0)
        head = f"{'layer':<{width}}  units   variance   expected   ratio"
        rows = [
            f"{row.layer:<{width}}  {row.units:5}  {row.variance:9.3g}  {row.expected:9.3g}  {row.ratio:6.3f}"
            for row in self.table
        ]
        return "\n".join([head, *rows])


def variance_collapse(
    params: Mapping[str, Tensor],
    module: nn.Module,
    endpoints: Sequence[Mapping[str, Tensor]],
    batches: Iterable[Any],
    *,
    weights: Sequence[float] | None = None,
) -> VarianceCollapse:
    """Measure the variance of every layer's units in an interpolated network and in its endpoints.

    The values of all linear layers and convolutions are taken before the nonlinearity, and after batch normalization
    where that follows; the last layer is among them. What `repair` corrects has ratio one afterwards. For posteriors
    give draws of one normal sample and average the variances over draws.

    Args:
        params: The interpolated network.
        module: How to run the parameters; its own are not used.
        endpoints: The networks between which it lies.
        batches: Inputs without labels, or tuples of positional or mappings of keyword inputs.
        weights: Share of every endpoint: `(1 - t, t)` at t; equal unless given.

    Raises:
        TraceError: The module cannot be traced.
        ValueError: As for `repair`.

    References:
        Jordan et al. (2023), REPAIR, section 3.1; Rossi et al. (2023), figure 10.
    """
    shares = require_endpoints(params, endpoints, weights)
    statistics = Statistics(module, batches, [params, *endpoints])
    places = {layer.normalized or layer.value: layer.axis for layer in statistics.layers}
    now = statistics.moments(params, places)
    ends = [statistics.moments(p, places) for p in endpoints]
    rows = []
    for layer in statistics.layers:
        name = layer.normalized or layer.value
        _, std = goals([end[name] for end in ends], shares)
        variance, expected = float(now[name].std.square().mean()), float(std.square().mean())
        ratio = variance / expected if expected else float("nan") if not variance else float("inf")
        rows.append(LayerVariance(layer.name, len(std), variance, expected, ratio))
    return VarianceCollapse(tuple(rows))
