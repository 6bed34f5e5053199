"""A linear regression on statistics of canonical networks, which a metanetwork can add to its own output."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from regauge.weightspace.layout.compile import Layout

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
KINDS = 2 + len(QUANTILES)
"""The number of statistics of a block."""
SMALLEST = 1e-30
"""A lower bound on the size of values when statistics are computed."""
SOFT = 0.01
"""A constant that is added to the size of a statistic before the logarithm, relative to the mean size."""
LEAST = 1e-4
"""The smallest standard deviation of a statistic, as a fraction of its block's largest statistic. Statistics with
smaller standard deviations are not used, because the deviations may be rounding errors."""
FURTHEST = 5.0
"""Distances from the mean are clipped at this number of standard deviations. Clipping bounds the outputs."""


class LinearReader(nn.Module):
    """A linear map of standardized statistics of all blocks, and of the logarithms of their sizes.

    The map is fitted once. The weights of the map are buffers, not parameters. Before the fit, the weights and the
    output are zero.
    """

    soft: Tensor
    mean: Tensor
    deviation: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self, layout: Layout, outputs: int) -> None:
        super().__init__()
        count = KINDS * len(layout.blocks)
        self.register_buffer("soft", torch.ones(count))
        self.register_buffer("mean", torch.zeros(2 * count))
        self.register_buffer("deviation", torch.ones(2 * count))
        self.register_buffer("weight", torch.zeros(outputs, 2 * count))
        self.register_buffer("bias", torch.zeros(outputs))

    def forward(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return predictions for networks, `[models, outputs]`, from the values of their blocks."""
        return self.features(statistics_of(values)) @ self.weight.T + self.bias

    def features(self, statistics: Tensor) -> Tensor:
        """Return standardized statistics and the logarithms of their sizes, `[models, features]`."""
        soft, mean, deviation = (t.to(statistics) for t in (self.soft, self.mean, self.deviation))
        known = torch.cat([statistics, (statistics.abs() + soft).log()], 1)
        return ((known - mean) / deviation).clamp(-FURTHEST, FURTHEST)

    @torch.no_grad()
    def standardize(self, statistics: Tensor) -> None:
        """Set the means and standard deviations for standardizing statistics, measured on the statistics of some
        networks.
        """
        exact = statistics.double()
        mean = exact.abs().mean(0)
        least = LEAST * mean.reshape(-1, KINDS).amax(1).repeat_interleave(KINDS).clamp_min(SMALLEST)
        soft = torch.maximum(SOFT * mean, least)
        known = torch.cat([exact, (exact.abs() + soft).log()], 1)
        deviation = known.std(0, correction=0)
        # A deviation caused by rounding counts as zero: a statistic that is equal for all networks contains no
        # information.
        deviation[deviation <= torch.cat([least, torch.full_like(least, LEAST)])] = torch.inf
        for buffer, found in ((self.soft, soft), (self.mean, known.mean(0)), (self.deviation, deviation)):
            buffer.copy_(found)


def statistics_of(values: Mapping[str, Tensor]) -> Tensor:
    """Return the mean, the standard deviation and five quantiles of the values of every block, `[models, 7 * blocks]`.

    The statistics do not depend on the order of values, and do not grow with the number of units.

    References:
        Unterthiner et al. (2020), section 4.
    """
    found = []
    for value in values.values():
        flat = value.flatten(1) if value.ndim > 1 else value.unsqueeze(1)
        if not flat.shape[1]:
            found.append(flat.new_zeros(len(flat), KINDS))
            continue
        largest = flat.abs().amax(1, keepdim=True).clamp_min(SMALLEST)  # whose square may be too large
        unit = flat / largest
        mean = unit.mean(1, keepdim=True)
        spread = ((unit - mean).square().mean(1, keepdim=True) + SMALLEST).sqrt()
        ordered = unit.sort(1).values
        places = torch.tensor(QUANTILES, dtype=torch.float64) * (flat.shape[1] - 1)
        low, share = places.floor().long(), (places - places.floor()).to(unit)
        quantiles = torch.lerp(ordered[:, low], ordered[:, (low + 1).clamp_max(flat.shape[1] - 1)], share)
        found.append(largest * torch.cat([mean, spread, quantiles], 1))
    return torch.cat(found, 1)
