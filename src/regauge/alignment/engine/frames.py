"""Pairs of networks where they are compared: at the points of smallest norm on their orbits."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from regauge.alignment.engine.climbs import Climbs
from regauge.alignment.engine.paired_networks import at, dots
from regauge.core import act as _act
from regauge.core.balance import Buffers, balance_alike, has_balance
from regauge.core.element import Element, Value, select_parts
from regauge.core.families import Tensors, compared
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task

Scales = Literal["balance", "recompute", "keep"]
"""Whether networks are compared where their positive scales and matrices are balanced, or as they are.

Scales that move running statistics stay, but with "balance" in copies; see `match_frames`.
"""


def balances_of(symmetry: Symmetry, scales: Scales, task: Task | None) -> tuple[Buffers, ...]:
    """The kinds of balancing to try: none, with running statistics kept, and for copies with these moved as well.

    Where statistics are computed anew, as a task may say, they stay in copies, too.
    """
    if scales == "keep" or not has_balance(symmetry):
        return ()
    is_prepared = task is not None and task.prepare is not None
    return ("keep", "move") if scales == "balance" and not is_prepared and symmetry.moves_statistics else ("keep",)


@dataclass(frozen=True)
class Frame:
    """The compared tensors of pairs of networks, balanced or as they are, and the way back.

    The first network stays where it is, so the second one takes over its scales and its invertible matrices. What is
    left of these when both networks are balanced are rotations, which keep every norm. Straight lines stay what they
    are, because scales and matrices act linearly: `(1 - t) a + t act(element, b)` is the same network, up to them, as
    the point of the line between the balanced ones.

    Attributes:
        symmetry: The symmetry of all networks, with every size known.
        a: The first networks, `[pair, ...]`.
        b: The second networks.
        given: The second networks as they are.
        sides: Elements that balance the first and the second networks; None where they are compared as they are.
        buffers: Whether running statistics are moved.
        rigid: For groups of invertible matrices, the pairs in which it is rotated only, because its values are
            singular within rounding in one of the networks.
    """

    symmetry: Symmetry
    a: Tensors
    b: Tensors
    given: Tensors
    sides: tuple[Element, Element] | None
    buffers: Buffers = "keep"
    rigid: Mapping[str, Bool[Tensor, " pair"]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        params_a: Mapping[str, Tensor],
        params_b: Mapping[str, Tensor],
        symmetry: Symmetry,
        scales: Scales,
        buffers: Buffers = "keep",
    ) -> "Frame":
        """Compare networks `[pair, ...]`, as `scales` say."""
        a, b = compared([params_a, params_b], symmetry)
        if scales == "keep" or not has_balance(symmetry):
            return cls(symmetry, a, b, b, None)
        found = balance_alike([params_a, params_b], symmetry, buffers=buffers)
        left, right = (side.element for side in found)
        moved = move_by(symmetry, left, a), move_by(symmetry, right, b)
        return cls(symmetry, *moved, b, (left, right), buffers, found[0].rigid)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about groups that are only rotated."""
        return notes_on(self.rigid)

    def original(self) -> Tensors:
        """The second networks moved by what balances the first, which is where the identity leads."""
        return self.b if self.sides is None else move_by(self.symmetry, self.sides[0], self.given)

    def identity_objective(self) -> Float64[Tensor, " pair"]:
        """`<a, x> - (|x|^2 - |b|^2) / 2` at x = `original()`: the objective of the identity."""
        if self.sides is None:
            return self.objective(self.b)
        total = torch.zeros(self.sides[0].batch, dtype=torch.float64)
        for name, tensor in self.given.items():
            x = move_by(self.symmetry, self.sides[0], {name: tensor})[name]
            total += dots(self.a[name], x)
            if is_stretched(self.symmetry, name):
                total -= (dots(x, x) - dots(self.b[name], self.b[name])) / 2
        return total

    def objective(self, b: Tensors) -> Float64[Tensor, " pair"]:
        """The inner products of the first networks and others."""
        return torch.stack([dots(self.a[name], b[name]) for name in self.a]).sum(0)

    def rows(self, rows: Tensor) -> "Frame":
        """The frame of some pairs."""
        a, b, given = ({n: at(t, rows) for n, t in tensors.items()} for tensors in (self.a, self.b, self.given))
        sides = None if self.sides is None else (self.sides[0].rows(rows), self.sides[1].rows(rows))
        rigid = {name: flags[rows] for name, flags in self.rigid.items()}
        return Frame(self.symmetry, a, b, given, sides, self.buffers, rigid)

    def turnable(self, params_a: Params, params_b: Params) -> tuple[Params, Params]:
        """Both networks of a single pair with their invertible matrices balanced, and their scales as they are."""
        if self.sides is None or not _linear(self.symmetry):
            return params_a, params_b
        sides = (select_parts(side.item(0), self.symmetry.groups, ("linear",)) for side in self.sides)
        a, b = (self.symmetry.act(side, params) for side, params in zip(sides, (params_a, params_b), strict=True))
        return a, b

    def lead_back(self, climbs: Climbs, *, is_from_original: bool = False) -> Climbs:
        """Climbs between the networks as they are, from climbs that began at `b` or at `original()`."""
        if self.sides is None:
            return climbs
        left, right = self.sides
        element = self.symmetry.compose(climbs.element, left if is_from_original else right)
        return replace(climbs, element=self.symmetry.compose(self.symmetry.inverse(left), element), moved={})


def notes_on(rigid: Mapping[str, Tensor]) -> tuple[str, ...]:
    """A sentence about each group that was left as it is in some pairs, by what `Balance` says."""
    result = []
    for name, flags in rigid.items():
        where = f" in {int(flags.sum())} of {len(flags)} pairs" if len(flags) > 1 else ""
        if bool(flags.any()):
            result.append(
                f"group {name!r} was only rotated{where}: in one of the networks its values lack full rank within "
                "rounding, so that they fix no matrix"
            )
    return tuple(result)


def is_stretched(symmetry: Symmetry, name: str) -> bool:
    """Whether scales, shifts or invertible matrices change the norm of a tensor."""
    sites = symmetry.sites[name]
    return any(s.group.matrix == "linear" or any((*s.placement.scale, *s.placement.shift)) for s in sites)


def move_by(symmetry: Symmetry, balance: Element, tensors: Tensors) -> dict[str, Tensor]:
    """Tensors moved by what balances a network: positive factors and invertible matrices, and nothing else."""
    linear = _linear(symmetry)
    values = {n: Value(scale=v.scale, matrix=v.matrix if n in linear else None) for n, v in balance.items()}
    sites, element = {name: symmetry.sites[name] for name in tensors}, Element(values, balance.batch)
    return _act.act(symmetry.groups, sites, element, tensors, {name: len(symmetry.shapes[name]) for name in tensors})


def _linear(symmetry: Symmetry) -> frozenset[str]:
    return frozenset(group.name for group in symmetry.groups if group.matrix == "linear")
