"""Mean and deviation of every coordinate of a population, equal for those that permutations exchange."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regauge.flow.manifold import Manifold, Points
from regauge.flow.space import Space

SMALLEST = 1e-3
"""Least deviation of a coordinate, as a share of the root mean square deviation of its tensor."""
JITTER = 1e-4
"""Variance that is added to that of values with unit variance, so that covariances have a root."""
MOST_COVARIANCES = 5000
"""Values whose covariances are kept at most."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Statistics of the points of networks, in float64.

    Attributes:
        mean: The mean of each coordinate, `[values]`; zero where signs flip it.
        deviation: About the mean, never zero.
        root: Root mean square, never zero.
        factor: The lower triangular root of the covariances of Euclidean coordinates, `[values, values]` in float32,
            where it was asked for.
    """

    mean: Float[Tensor, " values"]
    deviation: Float[Tensor, " values"]
    root: Float[Tensor, " values"]
    factor: Float[Tensor, "values values"] | None = None

    @classmethod
    def of(cls, blocks: Iterable[Points], space: Manifold, *, is_pooled: bool = True) -> "Moments":
        """The statistics of points, block by block; of each coordinate alone if they are not pooled."""
        count, total, squares = 0, torch.zeros(space.dim, dtype=torch.float64), torch.zeros(space.dim).double()
        for block in blocks:
            values = block.double().cpu()
            count, total, squares = count + len(values), total + values.sum(0), squares + values.square().sum(0)
        if not count:
            raise ValueError("there are no networks to take statistics of; give some")
        mean, square = total / count, squares / count
        if is_pooled:
            assert isinstance(space, Space)
            mean, square = torch.where(space.signed, 0.0, _pool(mean, space)), _pool(square, space)
        return cls(
            mean, _above_zero((square - mean.square()).clamp_min(0).sqrt(), space), _above_zero(square.sqrt(), space)
        )


def find_factor(points: Points, space: Manifold, deviation: Float[Tensor, " values"]) -> Float[Tensor, "values values"]:
    """The lower triangular root of the covariances of Euclidean coordinates.

    Raises:
        ValueError: There are more than `MOST_COVARIANCES` values, whose covariances would fill the memory, or no more
            networks than values, which do not determine them.
    """
    flat = points[:, space.flat_start :].double()
    size = flat.shape[1]
    if size > MOST_COVARIANCES or len(flat) <= size:
        raise ValueError(
            f"{size} values have more covariances than can be kept (of {MOST_COVARIANCES} at most), or than "
            f"{len(flat)} training networks determine; choose another prior"
        )
    unit = deviation[space.flat_start :]
    standard = (flat - flat.mean(0)) / unit
    covariance = standard.T @ standard / (len(flat) - 1) + JITTER * torch.eye(size).double()
    factor: Tensor = unit.unsqueeze(1) * torch.linalg.cholesky(covariance)
    return factor.float()


def count_share(space: Manifold, balance: float) -> Float[Tensor, " values"]:
    """The number of coordinates of its tensor to the power of `balance - 1`, for each coordinate."""
    return torch.bincount(space.tensors).double()[space.tensors] ** (balance - 1)


def size_by_tensor(sizes: Float[Tensor, " values"], space: Manifold) -> Float[Tensor, " values"]:
    """The root mean square of the sizes in its tensor, for each coordinate."""
    count = int(space.tensors.max()) + 1
    squares = torch.zeros(count, dtype=sizes.dtype).index_add(0, space.tensors, sizes.square())
    return (squares / torch.bincount(space.tensors, minlength=count)).sqrt()[space.tensors]


def _pool(values: Float[Tensor, " values"], space: Space) -> Float[Tensor, " values"]:
    """The mean over all coordinates that permutations exchange."""
    classes = int(space.exchanged.max()) + 1
    sums = torch.zeros(classes, dtype=values.dtype).index_add(0, space.exchanged, values)
    return (sums / torch.bincount(space.exchanged, minlength=classes))[space.exchanged]


def _above_zero(sizes: Float[Tensor, " values"], space: Manifold) -> Float[Tensor, " values"]:
    """Sizes, of which none is far below those of its tensor."""
    whole = size_by_tensor(sizes, space)
    return torch.maximum(sizes, SMALLEST * torch.where(whole > 0, whole, 1.0))
