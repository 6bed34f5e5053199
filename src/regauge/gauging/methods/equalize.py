"""The method Equalize, which gives the incoming and outgoing weights of every unit equal ranges, without data."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from regauge.core.element import Element
from regauge.core.groups import Group, axes_of
from regauge.core.remembered import remembered
from regauge.core.scales import Direction, ScaleSite, directions
from regauge.core.symmetry import Symmetry
from regauge.gauging.gauge_method import GaugeMethod, GaugeProblem
from regauge.gauging.moves import Move
from regauge.gauging.result import Chosen

NO_SCALES = "it has no scales"
"""The reason that is reported for a group that has neither scales nor matrices that contain scales."""
SETTLED = 1e-6
"""A threshold for convergence: sweeps end when no factor changes by a larger relative amount."""
Units = Float64[Tensor, " unit"]
"""One number for each unit of each copy of a group."""


@dataclass(frozen=True)
class Equalize(GaugeMethod):
    """Cross-layer equalization of every family of positive scales, in exact steps without data.

    The range of a set of weights is their largest magnitude. The factor of a unit makes the range of the weights that
    it multiplies equal to the range of the weights that it divides. For a plain ReLU unit, the factor is `s =
    sqrt(range_out / range_in)`. Ranges are computed over the weights of layers and embedding tables. If a unit
    multiplies or divides only vectors, such as the gain of a norm, the range is computed over the vectors. Linear
    groups (values, queries and keys of attention) are scaled by diagonal matrices. Sweeps over all families continue
    until no factor changes. The largest imbalance decreases, and the result is the same for all networks of an orbit.

    The objective is the negative mean imbalance of all units, `|log2(range_out / range_in)|`.

    Attributes:
        sweeps: The largest number of sweeps over all families.

    References:
        Nagel et al. (2019), Data-free quantization through weight equalization and bias correction, section 4.1, for
        pairs of layers with ReLU between them; Schneider and Schneider (1991), Max-balancing weighted directed graphs.
    """

    label = "equalized"

    sweeps: int = 200

    def __post_init__(self) -> None:
        if self.sweeps < 1:
            raise ValueError(f"sweeps is {self.sweeps}, but equalizing takes one or more; give one at least")

    def choose(self, problem: GaugeProblem) -> Chosen:
        """Return the factors of all families as moves."""
        symmetry = problem.symmetry
        ranges = _Ranges(symmetry, problem.params)
        history = [-ranges.imbalance()]
        best, logs = ranges.logs(), ranges.logs()
        is_settled = not ranges.pairs
        for _ in range(self.sweeps if ranges.pairs else 0):
            step = ranges.sweep()
            reached = -ranges.imbalance()
            logs = ranges.logs()
            best = logs if reached >= max(history) else best
            history.append(max(reached, history[-1]))
            if step < SETTLED:
                is_settled = True
                break
        fixed = [(group.name, NO_SCALES) for group in diagonal(symmetry).groups if not group.scales]
        fixed += [(name, "the values on one side of its units have no range to equalize") for name in ranges.alone]
        notes = () if is_settled else (f"not converged after {self.sweeps} sweeps: allow more",)
        moves = (Move(symmetry, scaled_element(symmetry.identity(), best)),)
        return Chosen(moves, history[-1], history[0], tuple(history), "octaves of imbalance", tuple(fixed), notes)


@dataclass(frozen=True)
class _Pair:
    """A family of scales, with the tensors that it multiplies and the tensors that it divides, whose ranges are
    compared.
    """

    direction: Direction
    rising: tuple[ScaleSite, ...]
    falling: tuple[ScaleSite, ...]


class _Ranges:
    """Magnitudes of the weights during equalization.

    Attributes:
        alone: Groups that have a family of scales which only multiplies weights, or only divides them.
    """

    def __init__(self, symmetry: Symmetry, params: Mapping[str, Tensor]) -> None:
        self._symmetry = symmetry
        self.pairs: list[_Pair] = []
        self.alone: list[str] = []
        every = directions(diagonal(symmetry), "keep")
        for direction in every:
            sides = [
                _telling(symmetry, [p for p in direction.places if (p.exponent > 0) == is_up])
                for is_up in (True, False)
            ]
            if all(sides):
                self.pairs.append(_Pair(direction, *sides))
            else:
                self.alone.append(direction.group)
        self.alone = list(dict.fromkeys(self.alone))
        names = {place.name for pair in self.pairs for place in pair.direction.places}
        self._sizes = {name: params[name].abs().double().reshape(axes_of(symmetry.shapes[name])) for name in names}
        self._logs: dict[int, Units] = {
            k: torch.zeros(pair.direction.count, dtype=torch.float64) for k, pair in enumerate(self.pairs)
        }

    def logs(self) -> list[tuple[Direction, Units]]:
        """Return the logarithms of the accumulated factors."""
        return [(pair.direction, self._logs[k].clone()) for k, pair in enumerate(self.pairs)]

    def sweep(self) -> float:
        """Take an exact step for each family, and return the largest step."""
        largest = 0.0
        for k, pair in enumerate(self.pairs):
            gap, is_there = self._gap(pair)
            rate = sum(max(abs(p.exponent) * p.shared for p in side) for side in (pair.rising, pair.falling))
            step = torch.where(is_there, -gap / (rate / 2), 0.0)
            self._logs[k] += step
            for place in pair.direction.places:
                self._move(place, step)
            largest = max(largest, float(step.abs().max()))
        return largest

    def imbalance(self) -> float:
        """Return the mean of `|log2(range_out / range_in)|` over all units."""
        total, count = 0.0, 0
        for pair in self.pairs:
            gap, is_there = self._gap(pair)
            total += float(gap[is_there].abs().sum()) / math.log(2)
            count += int(is_there.sum())
        return total / max(count, 1)

    def _gap(self, pair: _Pair) -> tuple[Units, Tensor]:
        """Return, for each unit, the logarithm of the ratio of two ranges: of the weights that its factor multiplies,
        and of the weights that its factor divides. Also return a mask of the units that have both ranges.
        """
        sides = []
        for places in (pair.rising, pair.falling):
            each = [self._range(place, pair.direction.count) for place in places]
            sides.append(torch.stack(each).amax(0))
        is_there = (sides[0] > 0) & (sides[1] > 0)
        logs = [torch.where(is_there, side, 1.0).log() for side in sides]
        return logs[0] - logs[1], is_there

    def _range(self, place: ScaleSite, count: int) -> Units:
        return unit_sizes(place, self._sizes[place.name], count)

    def _move(self, place: ScaleSite, step: Units) -> None:
        sizes = self._sizes[place.name]
        shape = [sizes.shape[axis] for axis in place.axes]
        field = torch.zeros(shape, dtype=torch.float64)
        field[..., place.positions] = step[place.index] * (place.exponent / 2)
        order = sorted(range(len(place.axes)), key=lambda k: place.axes[k])
        lengths = [sizes.shape[axis] if axis in place.axes else 1 for axis in range(sizes.ndim)]
        sizes *= field.permute(order).reshape(lengths).exp()


@remembered
def diagonal(symmetry: Symmetry) -> Symmetry:
    """Return the symmetry with linear groups replaced by families of scales, which are diagonal matrices."""

    def scales_of(group: Group) -> Group:
        if group.matrix != "linear":
            return group
        places = tuple(replace(place, scale=(-1 if place.is_inverse else 1,)) for place in group.placements)
        return replace(group, matrix="none", scales=1, placements=places)

    return replace(symmetry, groups=tuple(scales_of(group) for group in symmetry.groups))


def unit_sizes(place: ScaleSite, sizes: Tensor, count: int, how: Literal["amax", "mean"] = "amax") -> Units:
    """Return, for each unit, the largest or the mean magnitude of its entries in one tensor."""
    others = [axis for axis in range(sizes.ndim) if axis not in place.axes]
    reduced = sizes if not others else sizes.amax(others) if how == "amax" else sizes.mean(others)
    order = sorted(range(len(place.axes)), key=lambda k: place.axes[k])
    reduced = reduced.permute([order.index(k) for k in range(len(place.axes))])
    owned = reduced.index_select(-1, place.positions).flatten().double()
    index = place.index.expand(*reduced.shape[:-1], place.positions.numel()).flatten()
    return torch.zeros(count, dtype=torch.float64).scatter_reduce_(0, index, owned, how, include_self=how == "amax")


def _telling(symmetry: Symmetry, places: Sequence[ScaleSite]) -> tuple[ScaleSite, ...]:
    """Return the tensors whose ranges are compared: matrices, kernels and tables if there are any, otherwise
    vectors.
    """
    wide = tuple(place for place in places if len(symmetry.shapes[place.name]) > 1)
    return wide or tuple(places)


def scaled_element(element: Element, logs: Sequence[tuple[Direction, Units]]) -> Element:
    """Return an element multiplied by given factors."""
    for direction, units in logs:
        value = element[direction.group]
        if value.matrix is not None:
            scale = units.reshape(value.matrix.shape[:-1]).exp()
            element = element.replace(direction.group, replace(value, matrix=value.matrix * scale.unsqueeze(-1)))
            continue
        assert value.scale is not None
        by_copy = units.reshape(*value.scale.shape[:-2], value.scale.shape[-1])
        rows = [by_copy * weight for weight in direction.weights]
        element = element.replace(direction.group, replace(value, scale=value.scale * torch.stack(rows, -2).exp()))
    return element
