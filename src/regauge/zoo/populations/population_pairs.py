"""Pairs of networks out of two populations, a few at a time, and aligned alike whichever of the two comes first."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from regauge.alignment import align_pairs
from regauge.alignment.method import Method
from regauge.alignment.methods.weight_matching import WeightMatching
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


def pair_matrix(first: Params, second: Params, compare: Callable[[PairBlock], Tensor]) -> Tensor:
    """A number for each pair of networks, float64 `[n, m]`.

    Where both populations are the same object, half of the matrix is computed, and the diagonal is zero.
    """
    matrix = torch.zeros(count_models(first), count_models(second), dtype=torch.float64)
    for pairs in _blocks(first, second):
        matrix[pairs.i, pairs.j] = compare(pairs)
    return matrix + matrix.T if first is second else matrix


def require_same_architecture(first: Params, second: Params) -> None:
    """Refuse populations of different architectures.

    Raises:
        ValueError: Names or shapes differ.
    """
    require_same_shapes(select(first, slice(1)), select(second, slice(1)))


def is_mutual(method: Method | None) -> bool:
    """Whether aligning the second network to the first is the same as aligning the first to the second.

    Weight matching treats both alike: what it multiplies and assigns for the inverse is the transpose.
    """
    return method is None or (isinstance(method, WeightMatching) and not method.restarts and method.init is None)


def align_both_ways(
    pairs: PairBlock, symmetry: Symmetry, method: Method | None, generator: torch.Generator | None
) -> tuple[Params, Params]:
    """Align the second network of each pair to the first, or the first to the second if that gains more.

    Exchanging the populations exchanges the results, up to motions of both networks of a pair alike.
    """
    there = align_pairs(pairs.first, pairs.second, symmetry, method=method, generator=generator)
    if is_mutual(method):
        return pairs.first, there.params
    back = align_pairs(pairs.second, pairs.first, symmetry, method=method, generator=generator)
    is_back = back.objective > there.objective
    return _where(is_back, back.params, pairs.first), _where(is_back, pairs.second, there.params)


def _blocks(first: Params, second: Params) -> Iterator[PairBlock]:
    """All pairs; of one population with itself only those whose second number is larger."""
    n, m = count_models(first), count_models(second)
    i, j = torch.triu_indices(n, n, 1) if first is second else torch.cartesian_prod(torch.arange(n), torch.arange(m)).T
    size = sum(tensor.nbytes for tensor in first.values()) // max(n, 1)
    at_once = max(1, min(PAIRS, BYTES // max(size, 1)))
    for left, right in zip(i.split(at_once), j.split(at_once), strict=True) if len(i) else ():
        yield PairBlock(left, right, select(first, left), select(second, right))


def _where(mask: Tensor, yes: Params, no: Params) -> Params:
    return {name: torch.where(mask.view(-1, *[1] * (x.ndim - 1)).to(x.device), x, no[name]) for name, x in yes.items()}
