"""The equivalent networks that a descent can reach by three steps: gains are set to one, matrices act, and
scales act.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from regauge.core.act import act
from regauge.core.element import Element, Value
from regauge.core.groups import Group
from regauge.core.params import Params
from regauge.core.rotations import zero_sum_basis
from regauge.core.scales import directions
from regauge.core.symmetry import Symmetry
from regauge.gauging.gauge_method import GaugeProblem, fixed_reasons
from regauge.gauging.methods.equalize import scaled_element
from regauge.gauging.moves import Move
from regauge.gauging.rounding import layer_rows

FURTHEST = math.log(1e3) / 2
"""A bound on the logarithms of scales and of matrices in one descent. The bound allows a condition number of 1000."""


@dataclass(frozen=True)
class Point:
    """A point on a network's orbit, given by matrices and scales.

    Attributes:
        matrices: Matrices of the groups that rotate. The matrices act on the network after its gains are set to one.
        scales: Scales of the whole symmetry, which act after the matrices; None if scales are not optimized.
    """

    matrices: Element
    scales: Element | None


class OrbitPart:
    """The points of a network's orbit that a descent can reach, and the moves to these points.

    Args:
        problem: The network.
        is_scaled: Whether scales and whole linear groups are optimized in addition to rotations.

    Attributes:
        found: The groups that rotate, and the move that first sets gains to one.
        symmetry: The whole symmetry.
        start: The network after its gains are set to one. The matrices of points act on `start`.
    """

    def __init__(self, problem: GaugeProblem, *, is_scaled: bool) -> None:
        self.found, self.symmetry = problem.uncovered, problem.symmetry
        self._is_scaled = is_scaled
        self.start = problem.params if self.found.before is None else self.found.before(problem.params)
        if is_scaled:
            self.start = {name: t.float() if t.is_floating_point() else t for name, t in self.start.items()}

    @property
    def can_rotate(self) -> bool:
        """Whether some group can rotate."""
        return any(group.matrix != "none" for group in self.found.symmetry.groups)

    @property
    def can_scale(self) -> bool:
        """Whether scales exist and may be optimized."""
        return self._is_scaled and bool(directions(self.symmetry, "keep"))

    @cached_property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """Weights of the layers that are transformed, and the axes that index their rows."""
        moved = {place.parameter for g in self.found.symmetry.groups if g.matrix != "none" for place in g.placements}
        if self.can_scale:
            moved |= {place.name for direction in directions(self.symmetry, "keep") for place in direction.places}
        return {name: rows for name, rows in layer_rows(self.symmetry).items() if name in moved & self.start.keys()}

    @property
    def fixed(self) -> tuple[tuple[str, str], ...]:
        """Groups and gains that no point changes, each with the reason."""
        scaled = {direction.group for direction in directions(self.symmetry, "keep")} if self.can_scale else set()
        return tuple((name, why) for name, why in fixed_reasons(self.symmetry, self.found) if name not in scaled)

    @property
    def as_it_is(self) -> Point:
        """The point of the orbit at which the given network lies. At the given network, gains keep their values."""
        still = self.found.symmetry.identity()
        if not self.can_scale:
            return Point(still, None)
        scales, before = self.symmetry.identity(), self.found.before
        if before is not None:
            back = before.symmetry.inverse(before.element)
            for group in before.symmetry.groups:
                if group.scales or group.signs:
                    scales = scales.replace(group.name, back[group.name])
        return Point(still, scales)

    def moves(self, point: Point) -> tuple[Move, ...]:
        """Return the moves from the given network to a point."""
        before = () if self.found.before is None else (self.found.before,)
        turns = (Move(self.found.symmetry, point.matrices),) if self.can_rotate else ()
        return (*before, *turns, *(() if point.scales is None else (Move(self.symmetry, point.scales),)))

    def params(self, point: Point, names: Iterable[str] | None = None) -> Params:
        """Return the network at a point, or some of its tensors, differentiable with respect to the point."""
        moved = self.start if names is None else {name: self.start[name] for name in names if name in self.start}
        return self._moved(self.symmetry, moved, point.matrices, point.scales)

    def gradients(self, point: Point, gradients: Params) -> Params:
        """Return gradients of a function at a point, given its gradients at the starting network; the result is
        differentiable in the point.

        If the symmetry does not change the function, its gradients transform by the inverse transpose of the action. A
        leading axis may index several gradients.
        """
        scales = None if point.scales is None else _inverse_transposed(self.symmetry, point.scales)
        matrices = _inverse_transposed(self.found.symmetry, point.matrices)
        return self._moved(self.symmetry.on_changes, gradients, matrices, scales)

    def _moved(self, scaling: Symmetry, tensors: Params, matrices: Element, scales: Element | None) -> Params:
        for symmetry, element in ((self.found.symmetry, matrices), (scaling, scales)):
            if element is not None:
                sites = {name: local for name, local in symmetry.sites.items() if name in tensors}
                ndims = {name: self.start[name].ndim for name in sites}
                tensors = act(symmetry.groups, sites, element, tensors, ndims)
        return tensors

    def tangents(self, start: Point) -> "Tangents":
        """Return free parameters around a given point."""
        scales = start.scales
        if scales is None and self.can_scale:
            scales = self.symmetry.identity()
        return Tangents(self.found.symmetry, self.symmetry, replace(start, scales=scales), is_whole=self._is_scaled)


class Tangents:
    """Free parameters of the points around a starting point. The parameters are zero at the starting point.

    A matrix is `T(A) M`, where M is the matrix at the starting point. `T(A)` is the Cayley map `(1 - S)^-1 (1 + S)` of
    `S = A - A^T`. For linear groups with `is_whole`, `T(A)` is the exponential of A. The parameters of scales are added
    to the log scales of the starting point.

    Attributes:
        turns: The parameters of rotations.
        stretches: The parameters of whole linear groups and of scales.
    """

    def __init__(self, rotating: Symmetry, symmetry: Symmetry, start: Point, *, is_whole: bool) -> None:
        self._start = start
        self._groups = [group for group in rotating.groups if group.matrix != "none"]
        self._whole = [group.name for group in self._groups if is_whole and group.matrix == "linear"]
        self._raw = {group.name: _zeros(group, rotating).requires_grad_() for group in self._groups}
        self._families = [] if start.scales is None else directions(symmetry, "keep")
        self._logs = [torch.zeros(one.count, dtype=torch.float64, requires_grad=True) for one in self._families]
        self.turns = [raw for name, raw in self._raw.items() if name not in self._whole]
        self.stretches = [*(self._raw[name] for name in self._whole), *self._logs]

    def point(self) -> Point:
        """Return the point at given parameters, differentiable with respect to the parameters."""
        values: dict[str, Value] = dict(self._start.matrices.items())
        for group in self._groups:
            known = values[group.name].matrix
            assert known is not None
            values[group.name] = replace(values[group.name], matrix=self._turn(group) @ known)
        scales = self._start.scales
        if scales is not None:
            scales = scaled_element(scales, list(zip(self._families, self._logs, strict=True)))
        return Point(Element(values), scales)

    def clip(self) -> None:
        """Clip the parameters of scales and whole linear groups to their bounds."""
        with torch.no_grad():
            for name in self._whole:
                sizes = self._raw[name].norm(dim=(-2, -1), keepdim=True)
                self._raw[name] *= FURTHEST / sizes.clamp_min(FURTHEST)
            for logs in self._logs:
                logs.clamp_(-FURTHEST, FURTHEST)

    def _turn(self, group: Group) -> Tensor:
        raw = self._raw[group.name]
        if group.name in self._whole:
            whole: Tensor = torch.linalg.matrix_exp(raw)
            return whole
        skew = raw - raw.mT
        one = torch.eye(skew.shape[-1], dtype=skew.dtype)
        turn: Tensor = torch.linalg.solve(one - skew, one + skew)
        if group.keeps_ones:
            basis = zero_sum_basis(group.size)
            turn = basis.mT @ turn @ basis + 1 / group.size
        return turn


def _inverse_transposed(symmetry: Symmetry, element: Element) -> Element:
    """Return the element that acts as the inverse transpose of an element without permutations and shifts."""
    values = {}
    for group in symmetry.groups:
        value = element[group.name]
        if value.scale is not None:
            value = replace(value, scale=1 / value.scale)
        if value.matrix is not None and group.matrix != "orthogonal":
            value = replace(value, matrix=torch.linalg.inv(value.matrix).mT)
        values[group.name] = value
    return Element(values)


def _zeros(group: Group, symmetry: Symmetry) -> Tensor:
    n = group.size - group.keeps_ones
    lead = tuple(symmetry[base].size for base in group.within)
    return torch.zeros(*lead, n, n, dtype=torch.float64)
