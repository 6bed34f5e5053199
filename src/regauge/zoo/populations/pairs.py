"""Distances between orbits and barriers for all pairs of networks from two populations."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regauge.alignment import align_pairs
from regauge.alignment.engine.frames import Scales
from regauge.alignment.method import Method
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.canonical.canonicalize import canonicalize, match_canonical
from regauge.core.interpolation import interpolate
from regauge.core.params import Params, count_models, require_same_shapes, select
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task

BYTES, PAIRS = 32 * 2**20, 4096
"""Limits on the pairs that are compared at once: the bytes of the pairs' first networks, and the number of pairs."""
ALONE = (nn.modules.conv._ConvNd, nn.RNNBase)
"""Modules whose networks are evaluated one by one. Stacking makes convolutions slower on a CPU, and recurrent modules
cannot be stacked."""


class PairBlock(NamedTuple):
    """A block of pairs: network `i[k]` of the first population and network `j[k]` of the second population."""

    i: Tensor
    j: Tensor
    first: Params
    second: Params


@dataclass(frozen=True)
class OrbitDistances:
    """The matrix of distances between the orbits of networks in one population and the orbits of networks in a second
    population.

    For each pair, both networks are canonicalized, the second network is aligned to the first, and the Euclidean
    distance is computed. The matrix contains `rg.canonical.orbit_distance` for all pairs, computed at once. For some
    methods (with restarts or data), the optimum may depend on the direction. If the optimum may depend on the
    direction, each pair is aligned in both directions and the smaller distance is used. Exchanging the populations
    therefore transposes the matrix. Up to rounding, the distance depends only on the orbits of the networks, and is
    zero for networks of one orbit. Matching ends in local optima. Therefore the distance is an upper bound on the
    distance of the orbits, and it can violate the triangle inequality.

    Attributes:
        symmetry: The symmetry of the architecture.
        method: The method that aligns networks; `WeightMatching(scales="keep")` by default.
        seed: The seed of the method's generator.
    """

    symmetry: Symmetry
    method: Method | None = None
    seed: int = 0

    def __call__(self, first: Params, second: Params) -> Tensor:
        """Return the matrix, float64 `[n, m]`. If both populations are the same object, only half of the matrix is
        computed.

        Raises:
            ValueError: The networks have different architectures, do not fit the symmetry, or are not finite.
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
    """Return the squared distances between networks' parameters, without buffers and tied names, float64 `[n]`.

    If the tensors in `a` have no model axis, `a` is a single network, which is compared with all networks in `b`.
    """
    ignored = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    total = torch.zeros(count_models(b), dtype=torch.float64)
    for name, tensor in b.items():
        if tensor.is_floating_point() and name not in ignored:
            total += (tensor.double() - a[name].double()).flatten(1).square().sum(1).cpu()
    return total


def pair_matrix(first: Params, second: Params, compare: Callable[[PairBlock], Tensor]) -> Tensor:
    """Return a number for each pair of networks, float64 `[n, m]`.

    If both populations are the same object, only half of the matrix is computed, and the diagonal is zero.
    """
    matrix = torch.zeros(count_models(first), count_models(second), dtype=torch.float64)
    for pairs in _blocks(first, second):
        matrix[pairs.i, pairs.j] = compare(pairs)
    return matrix + matrix.T if first is second else matrix


def require_same_architecture(first: Params, second: Params) -> None:
    """Raise a ValueError unless two populations have tensors with the same names and shapes."""
    require_same_shapes(select(first, slice(1)), select(second, slice(1)))


def is_mutual(method: Method | None) -> bool:
    """Return whether a method finds the same alignment from A to B as from B to A.

    Weight matching is symmetric, because the inverse element uses the transposed matrices.
    """
    return method is None or (isinstance(method, WeightMatching) and not method.restarts and method.init is None)


def _blocks(first: Params, second: Params) -> Iterator[PairBlock]:
    """Yield all pairs of networks. If both populations are the same object, yield only pairs with increasing
    indices.
    """
    n, m = count_models(first), count_models(second)
    i, j = torch.triu_indices(n, n, 1) if first is second else torch.cartesian_prod(torch.arange(n), torch.arange(m)).T
    size = sum(tensor.nbytes for tensor in first.values()) // max(n, 1)
    at_once = max(1, min(PAIRS, BYTES // max(size, 1)))
    for left, right in zip(i.split(at_once), j.split(at_once), strict=True) if len(i) else ():
        yield PairBlock(left, right, select(first, left), select(second, right))


@dataclass(frozen=True)
class Barriers:
    """The matrix of barriers on linear paths between the networks of one population and the networks of a second
    population.

    Entry (i, j) is the barrier of `rg.line`. The barrier is the largest excess of the loss over the linear
    interpolation of the endpoint losses, but at least zero. A barrier is NaN if a loss is NaN. If a symmetry is given,
    each pair is aligned first. For methods whose optimum may depend on the direction, each pair is aligned in both
    directions, and the result with the larger objective is used. Transforming both endpoints by the same element
    changes no loss on the path. Therefore exchanging the populations transposes the matrix. If the population is
    already aligned as a whole, pass no symmetry.

    Attributes:
        task: Model, data and loss. The task's `prepare` is applied to every network on a path, including both
            endpoints.
        symmetry: The symmetry of the architecture. By default, networks are not aligned.
        points: The number of networks on each path, including both endpoints. With three networks, only the midpoint is
            evaluated between the endpoints, as in figure 7.2 of the paper.
        method: The method that aligns pairs. Default: `WeightMatching()`, with `scales="recompute"` if the task
            prepares networks.
        seed: The seed of the method's generator.

    References:
        Erdogan (2025), section 7.2 and figure 7.2.
    """

    task: Task
    symmetry: Symmetry | None = None
    points: int = 3
    method: Method | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.points < 3:
            raise ValueError(f"points={self.points}: a line needs both ends and a point between them; give at least 3")
        if self.symmetry is None and self.method is not None:
            raise ValueError("a method is for aligning pairs, which needs a symmetry; give one, or leave it out")

    def __call__(self, first: Params, second: Params) -> Tensor:
        """Return the matrix, float64 `[n, m]`. If both populations are the same object, only half of the matrix is
        computed.

        Raises:
            ValueError: The networks have different architectures, or cannot be aligned.
        """
        require_same_architecture(first, second)
        ends_first = self._losses(first)
        ends_second = ends_first if first is second else self._losses(second)
        generator = torch.Generator().manual_seed(self.seed)
        scales: Scales = "balance" if self.task.prepare is None else "recompute"
        method = WeightMatching(scales=scales) if self.method is None else self.method

        def compare(pairs: PairBlock) -> Tensor:
            a, b = pairs.first, pairs.second
            if self.symmetry is not None:
                a, b = _align_both_ways(pairs, self.symmetry, method, generator)
            excess = torch.zeros(len(pairs.i), dtype=torch.float64)
            for k in range(1, self.points - 1):
                t = k / (self.points - 1)
                chord = (1 - t) * ends_first[pairs.i] + t * ends_second[pairs.j]
                excess = torch.maximum(excess, self._losses(interpolate(a, b, t)) - chord)
            return excess

        return pair_matrix(first, second, compare)

    def _losses(self, params: Params) -> Tensor:
        """Return the loss of every network after `prepare`, float64 on the CPU."""
        count, prepare = count_models(params), self.task.prepare
        if prepare is not None or any(isinstance(part, ALONE) for part in self.task.module.modules()):
            networks = (select(params, k) for k in range(count))
            ready = networks if prepare is None else map(prepare, networks)
            return torch.tensor([self.task.evaluate(one)["loss"] for one in ready], dtype=torch.float64)
        return self.task.evaluate_each(params)["loss"].cpu() if count else torch.zeros(0, dtype=torch.float64)


def mean_barrier(matrix: Tensor) -> tuple[float, float]:
    """Return the mean and standard deviation over pairs of different networks, ignoring NaN."""
    n = len(matrix)
    values = matrix[tuple(torch.triu_indices(n, n, 1))]
    values = values[~values.isnan()]
    return float(values.mean()), float(values.std(correction=0))


def _align_both_ways(
    pairs: PairBlock, symmetry: Symmetry, method: Method | None, generator: torch.Generator | None
) -> tuple[Params, Params]:
    """Align the second network of each pair to the first or, if the objective is larger, the first to the second.

    If the two populations are exchanged, the results are exchanged too, up to one element that acts on both networks of
    a pair.
    """
    there = align_pairs(pairs.first, pairs.second, symmetry, method=method, generator=generator)
    if is_mutual(method):
        return pairs.first, there.params
    back = align_pairs(pairs.second, pairs.first, symmetry, method=method, generator=generator)
    is_back = back.objective > there.objective
    return _where(is_back, back.params, pairs.first), _where(is_back, pairs.second, there.params)


def _where(mask: Tensor, yes: Params, no: Params) -> Params:
    return {name: torch.where(mask.view(-1, *[1] * (x.ndim - 1)).to(x.device), x, no[name]) for name, x in yes.items()}
