"""The directions of positive scales: combinations of families that are balanced as one, and where they act."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from regauge.core.act import Site
from regauge.core.groups import Group
from regauge.core.matrices import null_space
from regauge.core.remembered import remembered
from regauge.core.symmetry import Symmetry


@dataclass(frozen=True)
class ScaleSite:
    """One site of a direction: a step t multiplies the squares of a tensor there by `exp(exponent * t)`.

    It acts on `shared` axes of the tensor. The unit of an entry depends on `axes`, its own axis last, counted without
    the batch axis. `index` says which entry of a step belongs to the positions of the own axis.
    """

    name: str
    exponent: float
    shared: int
    axes: tuple[int, ...]
    positions: Int64[Tensor, " position"]
    index: Int64[Tensor, "*others position"]


@dataclass(frozen=True)
class Direction:
    """A combination of the families of one group that is balanced as one: how much each moves, and where.

    `own` has the places of a normalizer whose values it alone moves.
    """

    group: str
    weights: tuple[int, ...]
    count: int
    places: tuple[ScaleSite, ...]
    own: tuple[ScaleSite, ...] = ()


@remembered
def directions(symmetry: Symmetry, buffers: Literal["move", "keep"]) -> tuple[Direction, ...]:
    """Return the families of every group, or the combinations of them that keep the buffers."""
    result = []
    for group in symmetry.groups:
        kept = kept_scales(symmetry, group) if buffers == "keep" else null_space([], group.scales)
        for weights in _shorten(symmetry, group, kept):
            sites = _sites_moved(symmetry, group, weights)
            if sites:
                result.append(_direction(symmetry, group, weights, sites))
    return tuple(result)


def kept_scales(symmetry: Symmetry, group: Group) -> list[tuple[int, ...]]:
    """Return the combinations of the families of scales of a group that keep every buffer; they span all that do."""
    return null_space(_moving(symmetry, group), group.scales)


@remembered
def normalizers(symmetry: Symmetry) -> tuple[Direction, ...]:
    """Return the combinations of families that move buffers, on the values that nothing else scales.

    These are the filters before batch normalization, for each layer its own. See `SquaredNorm.normalize`.
    """
    result = []
    for group in symmetry.groups:
        rows = _moving(symmetry, group)
        kept = null_space(rows, group.scales)
        for weights in _duals(rows, kept):
            sites = _sites_moved(symmetry, group, weights)
            own = [(name, site) for name, site in sites if not any(_exponent(site, other) for other in kept)]
            if own:
                own_places = _direction(symmetry, group, weights, own).places
                result.append(replace(_direction(symmetry, group, weights, sites), own=own_places))
    return tuple(result)


def _moving(symmetry: Symmetry, group: Group) -> list[tuple[int, ...]]:
    """Return the distinct exponents of a group's families of scales on buffers."""
    return sorted({p.scale for p in group.placements if p.parameter in symmetry.buffers})


def _sites_moved(symmetry: Symmetry, group: Group, weights: Sequence[int] | None = None) -> list[tuple[str, Site]]:
    """Return the sites on compared parameters that a combination of families moves, or any of them."""
    every = ((name, site) for name, local in symmetry.sites.items() if name not in symmetry.buffers for site in local)
    own = ((name, site) for name, site in every if site.group.name == group.name)
    return [(name, site) for name, site in own if weights is None or _exponent(site, weights)]


def _direction(
    symmetry: Symmetry, group: Group, weights: tuple[int, ...], sites: Sequence[tuple[str, Site]]
) -> Direction:
    axes = {name: {site.placement.axis for other, site in sites if other == name} for name, _ in sites}
    places = (_place(symmetry, n, site, _exponent(site, weights), len(axes[n])) for n, site in sites)
    return Direction(group.name, weights, group.size * symmetry.count_copies(group.name), tuple(places))


def _exponent(site: Site, weights: Sequence[int]) -> int:
    return _dot(site.placement.scale, weights)


def _place(symmetry: Symmetry, name: str, site: Site, exponent: int, shared: int) -> ScaleSite:
    group = site.group
    shape = (*(symmetry[base].size for base in group.within), group.size)
    units = torch.arange(torch.Size(shape).numel()).reshape(shape)
    index = units[(*site.base_index, site.units)]
    return ScaleSite(name, 2.0 * exponent, shared, site.axes, site.positions, index)


def _shorten(symmetry: Symmetry, group: Group, basis: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Reduce a basis of combinations of families by sums and differences, until none of these moves fewer sites.

    A tensor that is scaled alone, such as a filter with a normalization after it, has no best norm, and a linear term
    gives it one. This needs a combination that scales this tensor only: if each one scaled other tensors too, the steps
    could go on without end.
    """
    if len(basis) < 2:
        return basis
    exponents = [site.placement.scale for _, site in _sites_moved(symmetry, group)]

    def count(row: Sequence[int]) -> int:
        return sum(_dot(row, each) != 0 for each in exponents)

    while True:
        for (k, j), sign in itertools.product(itertools.permutations(range(len(basis)), 2), (1, -1)):
            row = tuple(x + sign * y for x, y in zip(basis[k], basis[j], strict=True))
            if 0 < count(row) < count(basis[k]):
                basis = [*basis[:k], row, *basis[k + 1 :]]
                break
        else:
            return basis


def _duals(rows: Sequence[Sequence[int]], kept: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Integer vectors orthogonal to `kept`, each to all but one of a largest independent set of the rows."""
    chosen: list[Sequence[int]] = []
    for row in rows:
        if any(_dot(row, free) for free in null_space(chosen, len(row))):
            chosen.append(row)
    duals = [null_space([*(other for other in chosen if other is not row), *kept], len(row))[0] for row in chosen]
    return [tuple(x if _dot(row, dual) > 0 else -x for x in dual) for row, dual in zip(chosen, duals, strict=True)]


def _dot(x: Sequence[int], y: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(x, y, strict=True))
