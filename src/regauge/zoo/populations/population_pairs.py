"""Pairs of networks out of two populations, a few at a time, and aligned alike whichever of the two comes first."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from regauge.alignment.align_pairs import align_pairs
from regauge.alignment.method import Method
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry

BYTES, PAIRS = 32 * 2**20, 4096
"""Pairs are looked at together while the networks on one side have at most so many bytes, and are at most so many."""


class Part(NamedTuple):
    """Pair k is network `i[k]` of the first population and network `j[k]` of the second."""

    i: Tensor
    j: Tensor
    first: Params
    second: Params


def count_of(params: Mapping[str, Tensor]) -> int:
    """How many networks are stacked.

    Raises:
        ValueError: There is no tensor.
    """
    for tensor in params.values():
        return len(tensor)
    raise ValueError("the networks have no parameters, so there is nothing to compare")


def taken(params: Mapping[str, Tensor], indices: Tensor) -> Params:
    """Some networks of a population."""
    return {name: tensor[indices] for name, tensor in params.items()}


def parts_of(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Iterator[Part]:
    """All pairs in parts; of one population with itself only those whose second number is larger."""
    n, m = count_of(first), count_of(second)
    i, j = torch.triu_indices(n, n, 1) if first is second else torch.cartesian_prod(torch.arange(n), torch.arange(m)).T
    size = sum(tensor.numel() * tensor.element_size() for tensor in first.values()) // max(n, 1)
    at_once = max(1, min(PAIRS, BYTES // max(size, 1)))
    for start in range(0, len(i), at_once):
        here = slice(start, start + at_once)
        yield Part(i[here], j[here], taken(first, i[here]), taken(second, j[here]))


def matrix_of(n: int, m: int, parts: list[tuple[Part, Tensor]], *, is_half: bool) -> Tensor:
    """Values of pairs as a matrix, float64 `[n, m]`; half a matrix is completed, with a diagonal of zeros."""
    matrix = torch.zeros(n, m, dtype=torch.float64)
    for part, values in parts:
        matrix[part.i, part.j] = values
    return matrix + matrix.T if is_half else matrix


def is_mutual(method: Method | None) -> bool:
    """Whether aligning the second network to the first is the same as aligning the first to the second.

    A climb of weight matching treats both alike: what it multiplies and assigns for the inverse is the transpose.
    """
    return method is None or (isinstance(method, WeightMatching) and not method.restarts and method.init is None)


def brought_together(
    part: Part, symmetry: Symmetry, method: Method | None, generator: torch.Generator | None
) -> tuple[Params, Params]:
    """The networks of each pair after the second was aligned to the first, or the first to the second if that gains
    more. Exchanging the populations then exchanges the results, up to motions of both networks of a pair alike."""
    there = align_pairs(part.first, part.second, symmetry, method=method, generator=generator)
    if is_mutual(method):
        return part.first, there.params
    back = align_pairs(part.second, part.first, symmetry, method=method, generator=generator)
    is_back = back.objective > there.objective
    return _chosen(is_back, back.params, part.first), _chosen(is_back, part.second, there.params)


def _chosen(mask: Tensor, yes: Params, no: Params) -> Params:
    return {name: torch.where(mask.view(-1, *[1] * (x.ndim - 1)).to(x.device), x, no[name]) for name, x in yes.items()}
