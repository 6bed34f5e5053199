"""Positive scales of a network balanced: the point of smallest norm on its orbit under scales."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm
from typing import Literal

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from regauge.core.act import Site
from regauge.core.element import Element
from regauge.core.symmetry import Symmetry

TOLERANCE = {torch.float64: 1e-12}
"""Balancing ends when no factor changes by more than this share; by 1e-7 where parameters have less precision."""
MAX_SWEEPS = 2000
"""Most sweeps over all families."""
MEMORY = 6
"""Sweeps that an extrapolation looks back on."""
Logs = Float64[Tensor, "batch _"]
"""Logarithms of factors for the units of one direction, or of all."""


def balance(params: Mapping[str, Tensor], symmetry: Symmetry, *, buffers: Literal["move", "keep"] = "move") -> Element:
    """The scales that bring a network to the point of smallest norm that they can reach.

    The result has scales only, and `act(balance(p), p)` minimizes the sum of squares of all parameters over the
    positive factors of every unit. In the logarithms of the factors that sum is convex (each entry contributes
    the exponential of a linear function), so the point is unique, and all copies of a network under scales are
    balanced to the same one. For a unit of a plain ReLU network it makes the norm of what comes in, bias
    included, equal to the norm of what goes out.

    One family after another takes an exact step. Where a family has more than two exponents, or acts on two
    axes of one tensor, the step goes to the minimum of a bound that touches the sum at the current point.

    A unit that has nothing but zeros on one of its two sides has no finite minimum. A linear term in the
    logarithm of its factor then makes the minimum finite: the sum of squares of what it has, each weighted by
    its exponent, becomes one. A unit that has only zeros keeps its factors.

    Args:
        symmetry: The symmetry of the architecture.
        params: One network, or a population with a leading model axis.
        buffers: They are never compared; "keep" uses only those combinations of families that leave every buffer as
            it is. Batch normalization in evaluation mode lets a filter and its gain scale oppositely while the
            running mean moves along, but that is undone by half when the statistics are computed anew.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        ValueError: Shapes do not match, or the norm of the parameters is not finite.

    References:
        Stock et al. (2019), Equi-normalization of neural networks, section 3, for plain ReLU networks.
    """
    symmetry = symmetry.bind(params)
    leads = (tuple(params[n].shape[: params[n].ndim - len(symmetry.shapes[n])]) for n in symmetry.sites)
    lead: tuple[int, ...] = next(leads, ())
    element = symmetry.identity(lead)
    directions = _directions(symmetry, buffers)
    if not directions:
        return element
    squares = _Squares({}, {})
    for place in (place for direction in directions for place in direction.places):
        if place.name not in squares.tensors:
            squares.tensors[place.name] = _squares(params[place.name], symmetry.sites[place.name], len(lead))
        tensor, fields = squares.tensors[place.name], squares.fields.setdefault(place.name, {})
        lengths = (len(tensor), *(tensor.shape[1 + axis] for axis in place.axes))
        fields.setdefault(place.axes, torch.zeros(lengths, dtype=torch.float64))
    if not all(bool(tensor.sum().isfinite()) for tensor in squares.tensors.values()):
        raise ValueError("the squares of the parameters are not finite, so no scales balance them")
    dtypes = {params[name].dtype for name in squares.tensors}
    tolerance = max(TOLERANCE.get(dtype, 1e-7) for dtype in dtypes)
    logs = _minimize(directions, squares, torch.Size(lead).numel(), tolerance)
    sizes = {group.name: group.size for group in symmetry.groups}
    for group in symmetry.groups:
        own = [(d.weights, t) for d, t in zip(directions, logs, strict=True) if d.group == group.name]
        if own:
            shape = (*lead, *(sizes[base] for base in group.within), group.size)
            rows = torch.stack([torch.tensor(weights, dtype=torch.float64) for weights, _ in own])
            steps = torch.stack([t.reshape(shape) for _, t in own], dim=-2)
            scale = (rows.T @ steps).exp()
            element = element.replace(group.name, replace(element[group.name], scale=scale))
    return element


def balanced_parts(symmetry: Symmetry, *, buffers: Literal["move", "keep"] = "move") -> list[frozenset[str]]:
    """The parameters that `balance` looks at, in parts that do not depend on one another; all sizes must be known.

    Balancing the part alone (with all buffers, where they are kept) gives the same factors as balancing everything.
    """
    parts: list[frozenset[str]] = []
    for direction in _directions(symmetry, buffers):
        names = frozenset(place.name for place in direction.places)
        for part in [p for p in parts if p & names]:
            parts.remove(part)
            names |= part
        parts.append(names)
    return parts


@dataclass(frozen=True)
class _Place:
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

    def weights(self, squares: "_Squares", count: int) -> Float64[Tensor, "batch unit"]:
        """The squares that each unit owns, moved and summed."""
        sums = squares.sum_over(self.name, self.axes)
        if self.is_plain:
            return sums
        sums = sums.index_select(-1, self.positions).flatten(1)
        return torch.zeros(len(sums), count, dtype=sums.dtype).index_add_(1, self.index.flatten(), sums)

    def move(self, squares: "_Squares", step: Float64[Tensor, "batch unit"]) -> None:
        """Move the squares by a step of every unit."""
        field = squares.fields[self.name][self.axes]
        if self.is_plain:
            field += self.exponent * step
        else:
            field[..., self.positions] += self.exponent * step[:, self.index]


@dataclass(frozen=True)
class _Squares:
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


@dataclass(frozen=True)
class _Direction:
    """A combination of the families of one group that is balanced as one: how much each moves, and where."""

    group: str
    weights: tuple[int, ...]
    count: int
    places: tuple[_Place, ...]


def _directions(symmetry: Symmetry, buffers: Literal["move", "keep"]) -> list[_Direction]:
    """The families of every group, or the combinations of them that keep the buffers."""
    result = []
    for group in symmetry.groups:
        count = group.size * symmetry.count_copies(group.name)
        rows = {p.scale for p in group.placements if p.parameter in symmetry.buffers} if buffers == "keep" else set()
        for weights in _null_space(sorted(rows), group.scales):
            places: list[_Place] = []
            for name, local in symmetry.sites.items():
                if name in symmetry.buffers:
                    continue
                here = [site for site in local if site.group.name == group.name and _exponent(site, weights)]
                shared = len({site.placement.axis for site in here})
                places.extend(_place(symmetry, name, site, _exponent(site, weights), shared) for site in here)
            if places:
                result.append(_Direction(group.name, weights, count, tuple(places)))
    return result


def _exponent(site: Site, weights: Sequence[int]) -> int:
    return sum(e * w for e, w in zip(site.placement.scale, weights, strict=True))


def _place(symmetry: Symmetry, name: str, site: Site, exponent: int, shared: int) -> _Place:
    group = site.group
    shape = (*(symmetry[base].size for base in group.within), group.size)
    units = torch.arange(torch.Size(shape).numel()).reshape(shape)
    index = units[(*site.base_index, site.units)]
    is_plain = site.is_plain and not site.bases and group.size == symmetry.shapes[name][site.placement.axis]
    return _Place(name, 2.0 * exponent, shared, site.axes, site.positions, index, is_plain)


def _squares(tensor: Tensor, sites: Sequence[Site], lead: int) -> Float64[Tensor, "batch *shape"]:
    """Squares, summed over the axes on which no group acts."""
    work = torch.promote_types(tensor.dtype, torch.float32)
    squares = tensor.detach().to(device="cpu", dtype=work).square()
    squares = squares.reshape(torch.Size(tensor.shape[:lead]).numel(), *tensor.shape[lead:])
    used = {axis for site in sites for axis in site.axes}
    free = tuple(1 + axis for axis in range(squares.ndim - 1) if axis not in used)
    return squares.sum(free, keepdim=True, dtype=torch.float64) if free else squares.double()


def _minimize(directions: Sequence[_Direction], squares: _Squares, batch: int, tolerance: float) -> list[Logs]:
    """The logarithms of the factors of every direction.

    Coordinate descent alone is slow in deep chains, where whole layers trade factors with their neighbors. After
    each sweep a combination of the last ones is tried that would cancel their steps if the sweep were linear
    (Anderson's acceleration); it is taken back when the next sweep steps further than the last one did.
    """
    counts = [direction.count for direction in directions]
    logs = torch.zeros(batch, sum(counts), dtype=torch.float64)
    visited: list[tuple[Logs, Logs]] = []  # Points after a sweep, and the steps that led there.
    jump = torch.zeros_like(logs)
    for _ in range(MAX_SWEEPS):
        steps = torch.cat([_descend(direction, squares, batch) for direction in directions], dim=1)
        length = float(steps.abs().max()) if steps.numel() else 0.0
        logs = logs + jump + steps
        if length <= tolerance:
            break
        if visited and length > float(visited[-1][1].abs().max()):
            back, visited = visited[-1][0] - logs, []
            _jump(directions, squares, torch.split(back, counts, dim=1))
            logs, jump = logs + back, torch.zeros_like(logs)
            continue
        visited = [*visited[-MEMORY:], (logs, steps)]
        jump = _extrapolate(visited) - logs
        _jump(directions, squares, torch.split(jump, counts, dim=1))
    return list(torch.split(logs, counts, dim=1))


def _extrapolate(visited: Sequence[tuple[Logs, Logs]]) -> Logs:
    """The affine combination of the points whose steps cancel best, by least squares."""
    points = torch.stack([point for point, _ in visited], dim=-1)
    steps = torch.stack([step for _, step in visited], dim=-1)
    if len(visited) == 1:
        return points[..., -1]
    moves = steps.diff(dim=-1)
    gram = moves.mT @ moves
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    ridge = torch.where(trace > 0, 1e-12 * trace, 1.0) * torch.eye(gram.shape[-1]).double()
    # Not `torch.linalg.lstsq`, whose last bits depend on where its workspace lies in memory.
    mix: Tensor = torch.linalg.solve(gram + ridge, moves.mT @ steps[..., -1:])
    return points[..., -1] - (points.diff(dim=-1) @ mix).squeeze(-1)


def _descend(direction: _Direction, squares: _Squares, batch: int) -> Logs:
    """Take the step of one direction."""
    step = _step(direction, squares, batch)
    _jump([direction], squares, [step])
    return step


def _jump(directions: Sequence[_Direction], squares: _Squares, steps: Sequence[Logs]) -> None:
    for direction, step in zip(directions, steps, strict=True):
        for place in direction.places:
            place.move(squares, step)


def _step(direction: _Direction, squares: _Squares, batch: int) -> Logs:
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
