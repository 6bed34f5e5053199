"""Orbits of individual parameters under the permutations of a symmetry."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from regauge.core.element import Value
from regauge.core.groups import Placement
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry

DRAWS, FEW_DRAWS, MANY = 24, 6, 10**6
"""The number of random permutations by which exchangeable parameters are found. `DRAWS` permutations are used, but only
`FEW_DRAWS` if there are more than `MANY` parameters."""


def exchanged_values(symmetry: Symmetry, names: Sequence[str]) -> Int[Tensor, " values"]:
    """Return a class index for each entry of some tensors. Entries that a permutation exchanges have the same class
    index.

    Entries belong to one class if a cycle, or an exchange of two units, of some group maps one entry to the other.
    If a group has several copies, random permutations are also tried, because some entries are exchanged only if the
    copies are permuted independently.
    """
    shapes = {name: symmetry.shapes[name] for name in names}
    counts = [torch.Size(shape).numel() for shape in shapes.values()]
    starts = np.cumsum([0, *counts])
    numbers = {
        name: torch.arange(start, start + count, dtype=torch.float64).reshape(shapes[name])
        for name, start, count in zip(names, starts.tolist(), counts, strict=False)
    }
    total, source = int(starts[-1]), torch.arange(int(starts[-1]))
    moved = [_flat(one, names) for one in _permuted(symmetry, numbers, DRAWS if total <= MANY else FEW_DRAWS)]
    if not moved:
        return source
    rows, columns = source.repeat(len(moved)).numpy(), torch.cat(moved).numpy()
    graph = coo_array((np.ones(len(rows), np.int8), (rows, columns)), shape=(total, total))
    return torch.from_numpy(connected_components(graph, directed=False)[1].astype(np.int64))


def signed_values(symmetry: Symmetry, names: Sequence[str]) -> Bool[Tensor, " values"]:
    """Return, for each entry of some tensors, whether signs of the symmetry flip the entry."""
    ones = {name: torch.ones(symmetry.shapes[name], dtype=torch.float64) for name in names}
    chance = torch.Generator().manual_seed(0)
    flipped = torch.zeros(sum(one.numel() for one in ones.values()), dtype=torch.bool)
    for _ in range(FEW_DRAWS * 4):
        moved = symmetry.act(symmetry.random(chance, ("sign",)), _complete(symmetry, ones))
        flipped |= torch.cat([moved[name].flatten() for name in names]) < 0
    return flipped


def unit_indices(placement: Placement, units: int) -> Int[Tensor, "units indices"]:
    """Return the indices of the first units on the axis of a placement, with one row for each unit."""
    offsets = torch.zeros(1, dtype=torch.int64)
    for count, stride in placement.repeats:
        offsets = (offsets.unsqueeze(1) + stride * torch.arange(count)).flatten()
    return placement.start + torch.arange(units).unsqueeze(1) * placement.stride + offsets


def _permuted(symmetry: Symmetry, numbers: Params, draws: int) -> list[Params]:
    groups = [group for group in symmetry.groups if group.is_permuted and group.size > 1]
    if not groups:
        return []
    elements = []
    for group in groups:
        cycle = torch.arange(group.size).roll(1)
        swap = torch.arange(group.size)
        swap[:2] = swap[:2].flip(0)
        for perm in (cycle, swap):
            blank = symmetry.identity()
            known = blank[group.name]
            assert known.perm is not None
            elements.append(blank.replace(group.name, Value(perm=perm.expand_as(known.perm)).fill(known)))
    chance = torch.Generator().manual_seed(0)
    elements += [symmetry.random(chance, ("permutation",)) for _ in range(draws)]
    whole = _complete(symmetry, numbers)
    return [symmetry.act(element, whole) for element in elements]


def _complete(symmetry: Symmetry, known: Params) -> Params:
    """Return all tensors that the symmetry transforms. Missing tensors are filled with zeros."""
    blank = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in symmetry.shapes.items()}
    return {**blank, **known}


def _flat(params: Params, names: Sequence[str]) -> Int[Tensor, " values"]:
    return torch.cat([params[name].flatten() for name in names]).long()
