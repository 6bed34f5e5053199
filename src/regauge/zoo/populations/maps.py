"""Maps from a population to points in a plane or to clusters, computed from distances between networks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform


@dataclass(frozen=True)
class Map:
    """Points whose distances approximate given distances.

    Attributes:
        points: `[networks, dims]`, centered; the direction of largest variance comes first.
        share: The sum of the eigenvalues that the map uses, divided by the sum of all positive eigenvalues.
    """

    points: NDArray[np.float64]
    share: float


def flat_map(distances: ArrayLike, *, dims: int = 2) -> Map:
    """Return the points of classical multidimensional scaling, whose inner products best fit the distances.

    The largest eigenvalues of the Gram matrix -1/2 J D^2 J are kept, where D are the distances and J is the centering
    matrix. Distances of points in `dims` dimensions are reproduced exactly. For distances between aligned networks (in
    one universe), the coordinates are principal components. For distances between orbits, eigenvalues can be negative.
    Negative eigenvalues are dropped.

    Args:
        distances: A symmetric matrix with a zero diagonal, `[networks, networks]`.
        dims: The dimension of the points.

    Raises:
        ValueError: The distances are not symmetric and finite, or `dims` is not less than the number of networks.

    References:
        Torgerson (1952), Multidimensional scaling I: theory and method.
    """
    given = _check(distances)
    if not 1 <= dims < len(given):
        raise ValueError(f"{len(given)} networks cannot be shown in {dims} dimensions; take more networks")
    squared = given**2
    gram = -0.5 * (squared - squared.mean(0) - squared.mean(1)[:, None] + squared.mean())
    values, vectors = np.linalg.eigh(gram)
    positive = np.clip(values[::-1], 0, None)
    vectors = vectors[:, ::-1][:, :dims]
    largest = vectors[np.abs(vectors).argmax(0), np.arange(dims)]
    points = vectors * np.where(largest < 0, -1.0, 1.0) * np.sqrt(positive[:dims])
    total = positive.sum()
    return Map(points, float(positive[:dims].sum() / total) if total > 0 else 1.0)


def clusters(distances: ArrayLike, count: int) -> NDArray[np.int64]:
    """Cluster networks by agglomerative clustering with average linkage (the mean distance between clusters).

    Args:
        distances: A symmetric matrix with a zero diagonal, `[networks, networks]`.
        count: The largest number of clusters. There are fewer clusters if several distances are equal.

    Returns:
        The cluster index of each network, `[networks]`. Indices count from 0 in the order in which clusters first
        appear.

    Raises:
        ValueError: The distances are not symmetric and finite, or the count is invalid.
    """
    given = _check(distances)
    if not 1 <= count <= len(given):
        raise ValueError(f"{len(given)} networks cannot be divided into {count} clusters; ask for fewer")
    if len(given) == 1:
        return np.zeros(1, np.int64)
    labels = fcluster(linkage(squareform(given, checks=False), "average"), count, "maxclust")
    _, places, numbers = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(places))
    return np.asarray(rank[numbers], np.int64)


def _check(distances: ArrayLike) -> NDArray[np.float64]:
    """Return distances made exactly symmetric. Raise an error unless the distances are symmetric up to rounding."""
    given = np.asarray(distances, np.float64)
    if given.ndim != 2 or given.shape[0] != given.shape[1]:
        raise ValueError(
            f"distances are a square matrix, but this has shape {given.shape}; give one row and one column for each "
            "network"
        )
    if not np.isfinite(given).all():
        raise ValueError("some distances are NaN or Inf; leave out the networks that are not finite")
    near = 1e-6 * max(1.0, float(np.abs(given).max(initial=0)))
    if (np.abs(given - given.T) > near).any() or (np.abs(np.diag(given)) > near).any():
        raise ValueError(
            "distances are symmetric and zero on the diagonal, but these are not: give those of one comparison"
        )
    result = (given + given.T) / 2
    np.fill_diagonal(result, 0)
    return result
