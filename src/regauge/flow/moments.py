"""Mean and standard deviation of every coordinate of a population, pooled over exchangeable coordinates."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regauge.flow.manifold import Manifold, Points
from regauge.flow.space import Space

SMALLEST = 1e-3
"""The smallest standard deviation of a coordinate, relative to the root mean square over its tensor."""
NOTHING = 1e-12
"""The share of the largest variance below which variances count as zero."""
MOST_AXES = 2000
"""If networks have more than `MOST_AXES` parameters, axes are computed from at most `MOST_AXES` networks."""


@dataclass(frozen=True, eq=False)
class Covariance:
    """A covariance of standardized coordinates: variances along some axes, and one variance orthogonal to these axes.

    Attributes:
        axes: Orthonormal axes, `[values, axes]`.
        variances: The variances along the axes, `[axes]`.
        rest: The variance in all directions orthogonal to the axes.
    """

    axes: Float[Tensor, "values axes"]
    variances: Float[Tensor, " axes"]
    rest: Float[Tensor, ""]

    def shake(self, noise: Float[Tensor, "models values"]) -> Float[Tensor, "models values"]:
        """Return standard normal vectors times the symmetric square root of the covariance."""
        axes, along, rest = (one.to(noise) for one in (self.axes, self.variances.sqrt(), self.rest.sqrt()))
        return rest * noise + (noise @ axes * (along - rest)) @ axes.T

    def log_density(self, z: Float[Tensor, "models values"]) -> Float[Tensor, " models"]:
        """Return the log density of the normal distribution at standardized points, in nats."""
        axes, variances, rest = (one.to(z) for one in (self.axes, self.variances, self.rest))
        along, (values, count) = (z @ axes).square(), axes.shape
        across = (z.square().sum(1) - along.sum(1)).clamp_min(0)
        volume = variances.log().sum() + (values - count) * rest.log() + values * math.log(2 * math.pi)
        return -0.5 * ((along / variances).sum(1) + across / rest + volume)


@dataclass(frozen=True, eq=False)
class Moments:
    """Statistics of the points of networks, in float64.

    Attributes:
        mean: The mean of each coordinate, `[values]`. The mean is zero if signs flip the coordinate.
        deviation: The standard deviation of each coordinate, which is never zero.
        root: The root mean square of each coordinate, which is never zero.
        covariance: The covariance of the standardized Euclidean coordinates, if it was requested.
    """

    mean: Float[Tensor, " values"]
    deviation: Float[Tensor, " values"]
    root: Float[Tensor, " values"]
    covariance: Covariance | None = None

    @classmethod
    def of(cls, blocks: Iterable[Points], space: Manifold, *, is_pooled: bool = True) -> "Moments":
        """Return statistics of points, computed block by block. With `is_pooled`, statistics are averaged over
        exchangeable coordinates.
        """
        count, total, squares = 0, torch.zeros(space.dim, dtype=torch.float64), torch.zeros(space.dim).double()
        for block in blocks:
            values = block.double().cpu()
            count, total, squares = count + len(values), total + values.sum(0), squares + values.square().sum(0)
        if not count:
            raise ValueError("there are no networks for statistics; give some")
        mean, square = total / count, squares / count
        if is_pooled:
            assert isinstance(space, Space)
            mean, square = torch.where(space.signed, 0.0, _pool(mean, space)), _pool(square, space)
        return cls(
            mean, _above_zero((square - mean.square()).clamp_min(0).sqrt(), space), _above_zero(square.sqrt(), space)
        )


def find_covariance(points: Points, space: Manifold, moments: Moments, shrink: float) -> Covariance:
    """Return the covariance of standardized Euclidean coordinates, shrunk towards independence.

    Args:
        points: The points of aligned networks.
        space: The space of the points.
        moments: The moments of the points.
        shrink: The weight of the identity in the shrunk covariance.
    """
    start = space.flat_start
    if space.dim - start > MOST_AXES:
        points = points[torch.linspace(0, len(points) - 1, min(len(points), MOST_AXES)).long()]
    standard = (points[:, start:].double() - moments.mean[start:]) / moments.deviation[start:]
    if space.dim - start > MOST_AXES:
        _, sizes, axes = torch.linalg.svd(standard, full_matrices=False)
        values, axes = sizes.square() / len(standard), axes.T
    else:
        values, axes = torch.linalg.eigh(standard.T @ standard / len(standard))
    is_there = values > NOTHING * values.max()
    return Covariance(
        axes[:, is_there], (1 - shrink) * values[is_there] + shrink, torch.tensor(shrink, dtype=torch.float64)
    )


def count_share(space: Manifold, balance: float) -> Float[Tensor, " values"]:
    """Return, for each coordinate, the number of coordinates of its tensor to the power of `balance - 1`."""
    return torch.bincount(space.tensors).double()[space.tensors] ** (balance - 1)


def size_by_tensor(sizes: Float[Tensor, " values"], space: Manifold) -> Float[Tensor, " values"]:
    """Return, for each coordinate, the root mean square of the sizes in its tensor."""
    count = int(space.tensors.max()) + 1
    squares = torch.zeros(count, dtype=sizes.dtype).index_add(0, space.tensors, sizes.square())
    return (squares / torch.bincount(space.tensors, minlength=count)).sqrt()[space.tensors]


def _pool(values: Float[Tensor, " values"], space: Space) -> Float[Tensor, " values"]:
    """Return values averaged over coordinates that permutations exchange."""
    classes = int(space.exchanged.max()) + 1
    sums = torch.zeros(classes, dtype=values.dtype).index_add(0, space.exchanged, values)
    return (sums / torch.bincount(space.exchanged, minlength=classes))[space.exchanged]


def _above_zero(sizes: Float[Tensor, " values"], space: Manifold) -> Float[Tensor, " values"]:
    """Return sizes with a lower bound, relative to the sizes in the same tensor."""
    whole = size_by_tensor(sizes, space)
    return torch.maximum(sizes, SMALLEST * torch.where(whole > 0, whole, 1.0))
