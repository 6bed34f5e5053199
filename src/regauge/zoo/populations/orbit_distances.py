"""Numbers for all pairs of networks out of two populations, and among them the distances between their orbits."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regauge.alignment.method import Method
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.canonical.canonicalize import canonicalize, match_canonical
from regauge.core.params import Params, count_models, require_same_shapes, select
from regauge.core.symmetry import Symmetry

BYTES, PAIRS = 32 * 2**20, 4096
"""Pairs are compared together while the networks on one side have at most this many bytes and are at most this many."""


class PairBlock(NamedTuple):
    """Some pairs: network `i[k]` of the first population and network `j[k]` of the second."""

    i: Tensor
    j: Tensor
    first: Params
    second: Params


@dataclass(frozen=True)
class OrbitDistances:
    """The distance between the orbits of each network of one population and each of another.

    Both networks of a pair are canonicalized, the second is aligned to the first, and the Euclidean distance is taken:
    `rg.canonical.orbit_distance`, of all pairs at once. A method that may find other optima the other way round
    (restarts, data) is run both ways, and the smaller distance counts. So the matrix of the exchanged populations is
    the transpose; the distance is the same wherever on their orbits the networks are, up to rounding; and it is zero
    within an orbit. Matching ends in local optima, so it is an upper bound of the distance of the orbits, and the
    triangle inequality may be violated by as much.

    Attributes:
        symmetry: The symmetry of the architecture.
        method: The method that aligns networks; `WeightMatching(scales="keep")` unless given.
        seed: The seed of the method's generator.
    """

    symmetry: Symmetry
    method: Method | None = None
    seed: int = 0

    def __call__(self, first: Params, second: Params) -> Tensor:
        """The matrix, float64 `[n, m]`; half of it is computed where both are the same object.

        Raises:
            ValueError: The networks are of different architectures, do not fit the symmetry, or are not finite.
        """
        require_same_architecture(first, second)
        symmetry = self.symmetry.bind(first)
        generator = torch.Generator().manual_seed(self.seed)

        def align(to: Params, params: Params) -> Params:
            element = match_canonical(to, params, symmetry, method=self.method, task=None, generator=generator)
            return symmetry.act(element, params)

        def compare(pairs: PairBlock) -> Tensor:
            a, b = pairs.first, pairs.second
            ways = [(a, b), (a, align(a, b))]
            if not is_mutual(self.method):
                ways.append((align(b, a), b))
            return torch.stack([squares(symmetry, x, y) for x, y in ways]).amin(0).sqrt()

        left = canonicalize(first, symmetry)
        return pair_matrix(left, left if first is second else canonicalize(second, symmetry), compare)


def squares(symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Squared distances of the parameters of networks, without buffers and second names, float64 `[n]`.

    Tensors without a model axis in `a` belong to one network, which is compared with all of `b`.
    """
    ignored = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    total = torch.zeros(count_models(b), dtype=torch.float64)
    for name, tensor in b.items():
        if tensor.is_floating_point() and name not in ignored:
            total += (tensor.double() - a[name].double()).flatten(1).square().sum(1).cpu()
    return total


def pair_matrix(first: Params, second: Params, compare: Callable[[PairBlock], Tensor]) -> Tensor:
    """A number for each pair of networks, float64 `[n, m]`.

    Where both populations are the same object, half of the matrix is computed, and the diagonal is zero.
    """
    matrix = torch.zeros(count_models(first), count_models(second), dtype=torch.float64)
    for pairs in _blocks(first, second):
        matrix[pairs.i, pairs.j] = compare(pairs)
    return matrix + matrix.T if first is second else matrix


def require_same_architecture(first: Params, second: Params) -> None:
    """Raise unless two populations have tensors of the same names and shapes."""
    require_same_shapes(select(first, slice(1)), select(second, slice(1)))


def is_mutual(method: Method | None) -> bool:
    """Whether aligning the second network to the first is the same as aligning the first to the second.

    Weight matching treats both alike: what it multiplies and assigns for the inverse is the transpose.
    """
    return method is None or (isinstance(method, WeightMatching) and not method.restarts and method.init is None)


def _blocks(first: Params, second: Params) -> Iterator[PairBlock]:
    """All pairs; of one population with itself only those whose second number is larger."""
    n, m = count_models(first), count_models(second)
    i, j = torch.triu_indices(n, n, 1) if first is second else torch.cartesian_prod(torch.arange(n), torch.arange(m)).T
    size = sum(tensor.nbytes for tensor in first.values()) // max(n, 1)
    at_once = max(1, min(PAIRS, BYTES // max(size, 1)))
    for left, right in zip(i.split(at_once), j.split(at_once), strict=True) if len(i) else ():
        yield PairBlock(left, right, select(first, left), select(second, right))
