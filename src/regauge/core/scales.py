"""Positive scales of a network balanced: squares of its parameters, and steps that make their sum smaller."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from regauge.core.act import Site
from regauge.core.groups import Group
from regauge.core.integer_vectors import null_space
from regauge.core.remembered import remembered
from regauge.core.symmetry import Symmetry

Array = NDArray[np.float64]
Logs = Float64[np.ndarray, "batch _"]
"""Logarithms of factors for the units of one direction, or of all."""
TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True)
class ScaleSite:
    """One site of a direction: a step t multiplies the squares of a tensor there by `exp(exponent * t)`.

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

    def weights(self, squares: "Squares", count: int) -> Float64[np.ndarray, "batch unit"]:
        """The squares that each unit owns, moved and summed."""
        sums = squares.sum_over(self.name, self.axes)
        if self.is_plain:
            return sums
        owned = torch.from_numpy(sums).index_select(-1, self.positions).flatten(1)
        return torch.zeros(len(sums), count, dtype=owned.dtype).index_add_(1, self.index.flatten(), owned).numpy()

    def move(self, squares: "Squares", step: Float64[np.ndarray, "batch unit"]) -> None:
        """Move the squares by a step of every unit."""
        field = squares.fields[self.name][self.axes]
        if self.is_plain:
            field += self.exponent * step
        else:
            field[..., self.positions.numpy()] += self.exponent * step[:, self.index.numpy()]
        squares.factors[self.name][self.axes] = np.exp(field)


class Squares:
    """Squares of the compared parameters, `[batch, *shape]`, summed over axes that nothing scales.

    They are arrays of NumPy, whose operations on few values cost a fraction of torch's.

    Args:
        params: The parameters, `[batch, *shape]`.
        places: The places of factors.

    Attributes:
        fields: For each tensor and each tuple of its axes the logarithms of its factors, `[batch, *lengths]`.
        factors: The factors.
    """

    def __init__(self, params: Mapping[str, Tensor], places: Iterable[ScaleSite]) -> None:
        self.fields: dict[str, dict[tuple[int, ...], Array]] = {name: {} for name in params}
        self.factors: dict[str, dict[tuple[int, ...], Array]] = {name: {} for name in params}
        for place in places:
            shape = params[place.name].shape
            lengths = (shape[0], *(shape[1 + axis] for axis in place.axes))
            self.fields[place.name].setdefault(place.axes, np.zeros(lengths))
            self.factors[place.name].setdefault(place.axes, np.ones(lengths))
        self._tensors: dict[str, Array] = {}
        self._views: dict[tuple[str, tuple[int, ...]], tuple[Array, tuple[int, ...] | None] | None] = {}
        for name, tensor in params.items():
            self.put(name, tensor)

    @property
    def is_finite(self) -> bool:
        """Whether all squares are finite numbers."""
        return all(bool(np.isfinite(tensor.sum())) for tensor in self._tensors.values())

    def put(self, name: str, tensor: Float[Tensor, "batch *shape"]) -> None:
        """Take the squares of a tensor as they are before its factors."""
        work, fields = torch.promote_types(tensor.dtype, torch.float32), self.fields[name]
        squares = tensor.detach().to(device="cpu", dtype=work).square()
        used = {axis for axes in fields for axis in axes}
        free = tuple(1 + axis for axis in range(squares.ndim - 1) if axis not in used)
        squares = squares.sum(free, keepdim=True, dtype=torch.float64) if free else squares.double()
        self._tensors[name] = squares.numpy()
        for axes in fields:
            self._views[name, axes] = self._view(name, axes)

    def sum_over(self, name: str, axes: tuple[int, ...]) -> Float64[np.ndarray, "batch *lengths"]:
        """The moved squares of a tensor summed over all axes but these."""
        view, factors = self._views[name, axes], self.factors[name]
        if view is None:
            return self._sum_over_any(name, axes) * factors[axes]
        squares, other = view
        if other is not None:
            squares = np.matmul(squares, factors[other][..., None])[..., 0]
        return squares * factors[axes]

    def scale(self, name: str, tensor: Float64[Tensor, "batch *shape"]) -> Float64[Tensor, "batch *shape"]:
        """A tensor times the roots of the factors of its squares."""
        for axes, field in self.fields.get(name, {}).items():
            order = sorted(range(len(axes)), key=lambda k: axes[k])
            lengths = [tensor.shape[1 + axis] if axis in axes else 1 for axis in range(tensor.ndim - 1)]
            factor = torch.from_numpy(field).permute(0, *(1 + k for k in order)).reshape(len(field), *lengths)
            tensor = tensor * (factor / 2).exp()
        return tensor

    def _view(self, name: str, axes: tuple[int, ...]) -> tuple[Array, tuple[int, ...] | None] | None:
        """The squares as a vector for each network, or a matrix with the axes of the only other factor last."""
        tensor, others = self._tensors[name], [other for other in self.fields[name] if other != axes]
        if any(len(each) > 1 for each in (axes, *others)) or len(others) > 1:
            return None
        if not others:
            return tensor.reshape(len(tensor), -1), None
        (other,) = others
        matrix = tensor.reshape(len(tensor), *(tensor.shape[1 + axis] for axis in sorted((*axes, *other))))
        return (matrix if axes < other else matrix.swapaxes(1, 2)), other

    def _sum_over_any(self, name: str, axes: tuple[int, ...]) -> Array:
        tensor = torch.from_numpy(self._tensors[name])
        operands: list[Tensor | list[int]] = [tensor, list(range(tensor.ndim))]
        for others, factor in self.factors[name].items():
            if others != axes:
                operands += [torch.from_numpy(factor), [0, *(1 + axis for axis in others)]]
        sums: Tensor = torch.einsum(*operands, [0, *(1 + axis for axis in axes)])
        return sums.numpy()


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
    """The families of every group, or the combinations of them that keep the buffers."""
    result = []
    for group in symmetry.groups:
        kept = kept_scales(symmetry, group) if buffers == "keep" else null_space([], group.scales)
        for weights in _shorten(symmetry, group, kept):
            sites = _sites_moved(symmetry, group, weights)
            if sites:
                result.append(_direction(symmetry, group, weights, sites))
    return tuple(result)


def kept_scales(symmetry: Symmetry, group: Group) -> list[tuple[int, ...]]:
    """The combinations of the families of scales of a group that keep every buffer; they span all that do."""
    return null_space(_moving(symmetry, group), group.scales)


@remembered
def normalizers(symmetry: Symmetry) -> tuple[Direction, ...]:
    """The combinations of families that move buffers, on the values that nothing else scales.

    These are the filters before batch normalization, for each layer its own. See `normalize`.
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
    """The distinct exponents of a group's families of scales on buffers."""
    return sorted({p.scale for p in group.placements if p.parameter in symmetry.buffers})


def _sites_moved(symmetry: Symmetry, group: Group, weights: Sequence[int] | None = None) -> list[tuple[str, Site]]:
    """The sites on compared parameters that a combination of families moves, or any of them."""
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
    is_plain = site.is_plain and not site.bases and group.size == symmetry.shapes[name][site.placement.axis]
    return ScaleSite(name, 2.0 * exponent, shared, site.axes, site.positions, index, is_plain)


def descend(direction: Direction, squares: Squares, batch: int) -> Logs:
    """Take the step of one direction."""
    step = _step(direction, direction.places, squares, batch)
    jump([direction], squares, [step])
    return step


def normalize(direction: Direction, squares: Squares, batch: int) -> Logs:
    """Give the values of a normalizer that it alone moves norm one, up to a constant."""
    step = _step(direction, direction.own, squares, batch)
    jump([direction], squares, [step])
    return step


def jump(directions: Sequence[Direction], squares: Squares, steps: Sequence[Logs]) -> None:
    for direction, step in zip(directions, steps, strict=True):
        for place in direction.places:
            place.move(squares, step)


def _step(direction: Direction, places: Sequence[ScaleSite], squares: Squares, batch: int) -> Logs:
    """The change of the logarithm of each unit's factor.

    With weights W and exponents e the slope of `sum W exp(e t)` vanishes where the logarithms of its rising and
    of its falling part meet. Their difference grows at most by the largest rising plus the largest falling
    exponent, so that dividing by these never goes too far, and goes all the way where there is one of each.
    An entry that moves along d axes is bounded by the mean of d entries with d times the exponent.
    """
    slopes = {side: np.zeros((batch, direction.count)) for side in (1, -1)}
    steepest = {1: 0.0, -1: 0.0}
    for place in places:
        side, size = (1, place.exponent) if place.exponent > 0 else (-1, -place.exponent)
        steepest[side] = max(steepest[side], size * place.shared)
        slopes[side] += size * place.weights(squares, direction.count)
    up, down = slopes[1] > 0, slopes[-1] > 0
    logs = {side: np.log(np.maximum(slope, TINY)) for side, slope in slopes.items()}
    step = (logs[-1] - logs[1]) / (steepest[1] + steepest[-1])
    if up.all() and down.all():
        return step
    # With one sign of exponents alone there is no minimum. The step then aims at a slope of two: since slopes count
    # twice the exponent, squares weighted by their exponents sum to one.
    alone = {side: np.log(np.maximum(slope / 2, TINY)) for side, slope in slopes.items()}
    step = np.where(up & ~down, -alone[1] / (steepest[1] or 1.0), step)
    step = np.where(down & ~up, alone[-1] / (steepest[-1] or 1.0), step)
    return np.where(up | down, step, 0.0)


def _shorten(symmetry: Symmetry, group: Group, basis: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Reduce a basis of combinations of families by sums and differences, until none of these moves fewer sites.

    A tensor that is scaled alone, such as a filter with a normalization after it, has no best norm, and `_step` gives
    it one. This needs a combination that scales this tensor only: if each one scaled other tensors too, the steps could
    go on without end.
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
