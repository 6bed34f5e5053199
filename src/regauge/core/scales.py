"""Directions of positive scales, which are the combinations of a group's families of scales that balancing changes."""

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
    """An axis of a tensor on which a direction of scales (a combination of scale families) acts.

    A step t multiplies the squares of the tensor's entries by `exp(exponent * t)`.

    The field `shared` is the number of axes along which the direction acts on the tensor. The indices along `axes`
    determine the unit to which an entry belongs. The batch axis is not counted. The last of the `axes` is the axis on
    which the direction acts. `index` maps each position on the axis of the site to an entry of the step.
    """

    name: str
    exponent: float
    shared: int
    axes: tuple[int, ...]
    positions: Int64[Tensor, " position"]
    index: Int64[Tensor, "*others position"]


@dataclass(frozen=True)
class Direction:
    """A combination of a group's families of scales that balancing changes as one scale, and the axes on which it acts.

    For a normalizer (a direction that changes buffers), `own` holds the axes of tensors that only this direction
    scales.
    """

    group: str
    weights: tuple[int, ...]
    count: int
    places: tuple[ScaleSite, ...]
    own: tuple[ScaleSite, ...] = ()


@remembered
def directions(symmetry: Symmetry, buffers: Literal["move", "keep"]) -> tuple[Direction, ...]:
    """Return the directions of scales for every group. A direction is a family of scales, or a combination of families.

    If buffers must not change, return only combinations that leave buffers unchanged.
    """
    result = []
    for group in symmetry.groups:
        kept = kept_scales(symmetry, group) if buffers == "keep" else null_space([], group.scales)
        for weights in _shorten(symmetry, group, kept):
            sites = _sites_moved(symmetry, group, weights)
            if sites:
                result.append(_direction(symmetry, group, weights, sites))
    return tuple(result)


def kept_scales(symmetry: Symmetry, group: Group) -> list[tuple[int, ...]]:
    """Return combinations of a group's scale families that leave every buffer unchanged.

    All other combinations that leave every buffer unchanged are linear combinations of the returned ones.
    """
    return null_space(_moving(symmetry, group), group.scales)


@remembered
def normalizers(symmetry: Symmetry) -> tuple[Direction, ...]:
    """Return combinations of scales that change buffers, each with the entries that no other combination scales.

    For batch normalization, the entries of one combination are the filters of the layer before it.
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
    """Return the exponents with which the scale families of a group act on buffers, without repetitions."""
    return sorted({p.scale for p in group.placements if p.parameter in symmetry.buffers})


def _sites_moved(symmetry: Symmetry, group: Group, weights: Sequence[int] | None = None) -> list[tuple[str, Site]]:
    """Return the axes of compared parameters on which a combination of a group's scale families has an effect.

    Without a combination, return all axes of compared parameters on which the group acts.
    """
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
    """Replace combinations in a basis by sums or differences of two combinations that scale fewer axes of tensors.

    If a scale multiplies only one tensor, such as a filter before a normalization, the norm has no minimum. A linear
    term in the logarithm of the scale gives the norm a minimum. The linear term requires a combination that scales only
    one tensor. If every combination also scaled other tensors, balancing might never end.
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
    """Choose a maximal set of linearly independent vectors from `rows`, and return an integer vector for each of them.

    Each returned vector has a positive inner product with its chosen row, and is orthogonal to all other chosen rows
    and to `kept`.
    """
    chosen: list[Sequence[int]] = []
    for row in rows:
        if any(_dot(row, free) for free in null_space(chosen, len(row))):
            chosen.append(row)
    duals = [null_space([*(other for other in chosen if other is not row), *kept], len(row))[0] for row in chosen]
    return [tuple(x if _dot(row, dual) > 0 else -x for x in dual) for row, dual in zip(chosen, duals, strict=True)]


def _dot(x: Sequence[int], y: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(x, y, strict=True))
