"""Positive scales of a network balanced: squares of its parameters, and steps that make their sum smaller."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm
from typing import Literal

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from regauge.core.act import Site
from regauge.core.groups import Group
from regauge.core.symmetry import Symmetry

Logs = Float64[Tensor, "batch _"]
"""Logarithms of factors for the units of one direction, or of all."""


@dataclass(frozen=True)
class Place:
    """Where a direction acts on the squares of one tensor: a step t multiplies them by `exp(exponent * t)`.

    It acts on `shared` axes of the tensor. The unit of an entry depends on `axes`, its own axis last, counted without
    the batch axis. `index` says which entry of a step belongs to the positions of the own axis; it
    is plain where entry i of a step belongs to index i, for the whole axis.
    """

    name: str
    exponent: float
    shared: int
    axes: tuple[int, ...]
    positions: Int64[Tensor, " position"]
    index: Int64[Tensor, "*others position"]
    is_plain: bool

    def weights(self, squares: "Squares", count: int) -> Float64[Tensor, "batch unit"]:
        """The squares that each unit owns, moved and summed."""
        sums = squares.sum_over(self.name, self.axes)
        if self.is_plain:
            return sums
        sums = sums.index_select(-1, self.positions).flatten(1)
        return torch.zeros(len(sums), count, dtype=sums.dtype).index_add_(1, self.index.flatten(), sums)

    def move(self, squares: "Squares", step: Float64[Tensor, "batch unit"]) -> None:
        """Move the squares by a step of every unit."""
        field = squares.fields[self.name][self.axes]
        if self.is_plain:
            field += self.exponent * step
        else:
            field[..., self.positions] += self.exponent * step[:, self.index]


@dataclass(frozen=True)
class Squares:
    """Squares of the compared parameters, `[batch, *shape]`, summed over axes that nothing scales.

    For each tensor and each tuple of its axes `fields` has the logarithms of their factors, `[batch, *lengths]`.
    """

    tensors: dict[str, Float64[Tensor, "batch *shape"]]
    fields: dict[str, dict[tuple[int, ...], Float64[Tensor, "batch *lengths"]]]

    def sum_over(self, name: str, axes: tuple[int, ...]) -> Float64[Tensor, "batch *lengths"]:
        """The moved squares of a tensor summed over all axes but these."""
        tensor = self.tensors[name]
        operands: list[Tensor | list[int]] = [tensor, list(range(tensor.ndim))]
        for others, field in self.fields[name].items():
            if others != axes:
                operands += [field.exp(), [0, *(1 + axis for axis in others)]]
        sums: Tensor = torch.einsum(*operands, [0, *(1 + axis for axis in axes)])
        return sums * self.fields[name][axes].exp()

    def scale(self, name: str, tensor: Float64[Tensor, "batch *shape"]) -> Float64[Tensor, "batch *shape"]:
        """A tensor times the roots of the factors of its squares."""
        for axes, field in self.fields.get(name, {}).items():
            order = sorted(range(len(axes)), key=lambda k: axes[k])
            lengths = [tensor.shape[1 + axis] if axis in axes else 1 for axis in range(tensor.ndim - 1)]
            factor = field.permute(0, *(1 + k for k in order)).reshape(len(field), *lengths)
            tensor = tensor * (factor / 2).exp()
        return tensor


@dataclass(frozen=True)
class Direction:
    """A combination of the families of one group that is balanced as one: how much each moves, and where.

    `own` has the places of a normalizer whose values it alone moves.
    """

    group: str
    weights: tuple[int, ...]
    count: int
    places: tuple[Place, ...]
    own: tuple[Place, ...] = ()


def directions(symmetry: Symmetry, buffers: Literal["move", "keep"]) -> list[Direction]:
    """The families of every group, or the combinations of them that keep the buffers."""
    result = []
    for group in symmetry.groups:
        rows = _moving(symmetry, group) if buffers == "keep" else []
        for weights in _null_space(rows, group.scales):
            sites = _sites_moved(symmetry, group, weights)
            if sites:
                result.append(_direction(symmetry, group, weights, sites))
    return result


def normalizers(symmetry: Symmetry) -> list[Direction]:
    """The combinations of families that move buffers, on the values that nothing else scales.

    These are the filters before batch normalization, for each layer its own. See `normalize`.
    """
    result = []
    for group in symmetry.groups:
        rows = _moving(symmetry, group)
        kept = _null_space(rows, group.scales)
        for weights in _duals(rows, kept):
            sites = _sites_moved(symmetry, group, weights)
            own = [(name, site) for name, site in sites if not any(_exponent(site, other) for other in kept)]
            if own:
                own_places = _direction(symmetry, group, weights, own).places
                result.append(replace(_direction(symmetry, group, weights, sites), own=own_places))
    return result


def _moving(symmetry: Symmetry, group: Group) -> list[tuple[int, ...]]:
    """How the families of a group move buffers."""
    return sorted({p.scale for p in group.placements if p.parameter in symmetry.buffers})


def _sites_moved(symmetry: Symmetry, group: Group, weights: Sequence[int]) -> list[tuple[str, Site]]:
    """The sites on compared parameters that a combination of families moves."""
    every = ((name, site) for name, local in symmetry.sites.items() if name not in symmetry.buffers for site in local)
    return [(name, site) for name, site in every if site.group.name == group.name and _exponent(site, weights)]


def _direction(
    symmetry: Symmetry, group: Group, weights: tuple[int, ...], sites: Sequence[tuple[str, Site]]
) -> Direction:
    axes = {name: {site.placement.axis for other, site in sites if other == name} for name, _ in sites}
    places = (_place(symmetry, n, site, _exponent(site, weights), len(axes[n])) for n, site in sites)
    return Direction(group.name, weights, group.size * symmetry.count_copies(group.name), tuple(places))


def _exponent(site: Site, weights: Sequence[int]) -> int:
    return sum(e * w for e, w in zip(site.placement.scale, weights, strict=True))


def _place(symmetry: Symmetry, name: str, site: Site, exponent: int, shared: int) -> Place:
    group = site.group
    shape = (*(symmetry[base].size for base in group.within), group.size)
    units = torch.arange(torch.Size(shape).numel()).reshape(shape)
    index = units[(*site.base_index, site.units)]
    is_plain = site.is_plain and not site.bases and group.size == symmetry.shapes[name][site.placement.axis]
    return Place(name, 2.0 * exponent, shared, site.axes, site.positions, index, is_plain)


def squares_of(tensor: Tensor, sites: Sequence[Site], lead: int) -> Float64[Tensor, "batch *shape"]:
    """Squares, summed over the axes on which no group acts."""
    work = torch.promote_types(tensor.dtype, torch.float32)
    squares = tensor.detach().to(device="cpu", dtype=work).square()
    squares = squares.reshape(torch.Size(tensor.shape[:lead]).numel(), *tensor.shape[lead:])
    used = {axis for site in sites for axis in site.axes}
    free = tuple(1 + axis for axis in range(squares.ndim - 1) if axis not in used)
    return squares.sum(free, keepdim=True, dtype=torch.float64) if free else squares.double()


def descend(direction: Direction, squares: Squares, batch: int) -> Logs:
    """Take the step of one direction."""
    step = _step(direction, squares, batch)
    jump([direction], squares, [step])
    return step


def normalize(direction: Direction, squares: Squares, batch: int) -> Logs:
    """Give the values of a normalizer that it alone moves norm one, up to a constant."""
    step = _step(replace(direction, places=direction.own), squares, batch)
    jump([direction], squares, [step])
    return step


def jump(directions: Sequence[Direction], squares: Squares, steps: Sequence[Logs]) -> None:
    for direction, step in zip(directions, steps, strict=True):
        for place in direction.places:
            place.move(squares, step)


def _step(direction: Direction, squares: Squares, batch: int) -> Logs:
    """The change of the logarithm of each unit's factor.

    With weights W and exponents e the slope of `sum W exp(e t)` vanishes where the logarithms of its rising and
    of its falling part meet. Their difference grows at most by the largest rising plus the largest falling
    exponent, so that dividing by these never goes too far, and goes all the way where there is one of each.
    An entry that moves along d axes is bounded by the mean of d entries with d times the exponent.
    """
    slopes = {1: torch.zeros(batch, direction.count, dtype=torch.float64)}
    slopes[-1] = slopes[1].clone()
    steepest = {1: 0.0, -1: 0.0}
    for place in direction.places:
        side = 1 if place.exponent > 0 else -1
        steepest[side] = max(steepest[side], abs(place.exponent) * place.shared)
        slopes[side] += abs(place.exponent) * place.weights(squares, direction.count)
    up, down = slopes[1] > 0, slopes[-1] > 0
    difference = slopes[-1].clamp_min(torch.finfo(torch.float64).tiny).log()
    difference -= slopes[1].clamp_min(torch.finfo(torch.float64).tiny).log()
    step = difference / (steepest[1] + steepest[-1])
    alone = {side: (slopes[side] / 2).clamp_min(torch.finfo(torch.float64).tiny).log() for side in (1, -1)}
    step = torch.where(up & ~down, -alone[1] / (steepest[1] or 1.0), step)
    step = torch.where(down & ~up, alone[-1] / (steepest[-1] or 1.0), step)
    return torch.where(up | down, step, 0.0)


def _null_space(rows: Sequence[Sequence[int]], count: int) -> list[tuple[int, ...]]:
    """Integer vectors that span what all rows are orthogonal to."""
    reduced: list[tuple[int, list[Fraction]]] = []  # Rows with a leading one, each alone in its column.
    for row in rows:
        rest = [Fraction(x) for x in row]
        for pivot, other in reduced:
            rest = [x - rest[pivot] * y for x, y in zip(rest, other, strict=True)]
        if not any(rest):
            continue
        lead = next(k for k, x in enumerate(rest) if x)
        rest = [x / rest[lead] for x in rest]
        reduced = [(pivot, [y - other[lead] * x for x, y in zip(rest, other, strict=True)]) for pivot, other in reduced]
        reduced.append((lead, rest))
    result = []
    for free in sorted(set(range(count)) - {pivot for pivot, _ in reduced}):
        vector = [Fraction(int(k == free)) for k in range(count)]
        for pivot, other in reduced:
            vector[pivot] = -other[free]
        scale = lcm(*(x.denominator for x in vector))
        result.append(tuple(int(x * scale) for x in vector))
    return result


def _duals(rows: Sequence[Sequence[int]], kept: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Integer vectors orthogonal to `kept`, each to all but one of a largest independent set of the rows."""
    chosen: list[Sequence[int]] = []
    for row in rows:
        if any(_dot(row, free) for free in _null_space(chosen, len(row))):
            chosen.append(row)
    duals = [_null_space([*(other for other in chosen if other is not row), *kept], len(row))[0] for row in chosen]
    return [tuple(x if _dot(row, dual) > 0 else -x for x in dual) for row, dual in zip(chosen, duals, strict=True)]


def _dot(x: Sequence[int], y: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(x, y, strict=True))
