"""Steps of one group written out: which positions of a tensor they move, and to what."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regauge.core.act import Site
from regauge.core.closest import Character, character
from regauge.core.element import Value

WHOLE = 0.6
"""Above this share of moved positions an axis is moved as a whole: slices would cost more than they save."""


@dataclass(frozen=True)
class Change:
    """New values of one tensor at some positions of one axis, or everywhere (`axis` None).

    Attributes:
        name: The tensor.
        axis: The axis on which it moves.
        positions: What moves on it.
        new: New values there.
        before: The whole tensor as it was; it must not be written before `difference` is read.
    """

    name: str
    axis: int | None
    positions: Tensor
    new: Tensor
    before: Tensor

    @cached_property
    def difference(self) -> Tensor:
        """New values minus old ones."""
        old = self.before if self.axis is None else self.before.index_select(self.axis, self.positions)
        return self.new - old


@dataclass(frozen=True)
class _Units:
    """The units that a step moves at some places, where they come from, and what they are changed by."""

    targets: Tensor
    sources: Tensor
    factors: Tensor | None
    shifts: Tensor | None


class UnitStep:
    """A step of a group without a matrix, unit by unit; what places with equal exponents share is computed once."""

    def __init__(self, size: int, value: Value) -> None:
        self._size, self._value = size, value
        self._known: dict[tuple[Character, tuple[float, ...]], _Units] = {}

    def change(self, name: str, sites: Sequence[Site], old: Tensor) -> Change | None:
        """What the step writes into a tensor on which the group acts along one axis; None for nothing."""
        axis, length = sites[0].placement.axis, old.shape[sites[0].placement.axis]
        targets, sources = [], []
        factor = shift = None
        for site in sites:
            units = self._units(site)
            if units.targets.numel() == 0:
                continue
            if site.is_plain:
                targets.append(units.targets)
                sources.append(units.sources)
            else:
                rows = site.positions.reshape(self._size, -1)
                targets.append(rows.index_select(0, units.targets).flatten())
                sources.append(rows.index_select(0, units.sources).flatten())
            factor = _spread(factor, units.factors, targets[-1], length, 1.0)
            shift = _spread(shift, units.shifts, targets[-1], length, 0.0)
        if not targets:
            return None
        target, source = (several[0] if len(several) == 1 else torch.cat(several) for several in (targets, sources))
        is_whole = target.numel() > WHOLE * length
        if is_whole:
            source = torch.arange(length).index_copy(0, target, source)
        shape = [-1 if k == axis else 1 for k in range(old.ndim)]
        new = old.index_select(axis, source.to(old.device))
        if factor is not None:
            new = new * (factor if is_whole else factor[target]).to(old).reshape(shape)
        if shift is not None:
            new = new + (shift if is_whole else shift[target]).to(old).reshape(shape)
        return Change(name, None if is_whole else axis, target.to(old.device), new, old)

    def _units(self, site: Site) -> _Units:
        key = (character(site.placement), site.placement.shift)
        if key not in self._known:
            value, units = self._value, torch.arange(self._size)
            perm = units if value.perm is None else value.perm
            factor, shift, is_moved = unit_factor(site, value), None, perm != units
            if factor is not None:
                is_moved = is_moved | (factor != 1)
            if value.shift is not None and any(site.placement.shift):
                shift = (torch.tensor(site.placement.shift, dtype=torch.float64).unsqueeze(-1) * value.shift).sum(0)
                is_moved = is_moved | (shift != 0)
            moved = is_moved.nonzero().flatten()
            self._known[key] = _Units(
                moved,
                perm[moved],
                None if factor is None else factor[moved],
                None if shift is None else shift[moved],
            )
        return self._known[key]


def unit_factor(site: Site, value: Value) -> Tensor | None:
    """What a step multiplies each unit by at a site; None for one."""
    factor: Tensor | None = None
    if value.sign is not None:
        for family, exponent in enumerate(site.placement.sign):
            if exponent % 2:
                row = value.sign[family].double()
                factor = row if factor is None else factor * row
    if value.shift is not None:
        for family, parity in enumerate(site.placement.parity):
            if parity:
                row = 1.0 - 2 * (value.shift[family] % 2).double()
                factor = row if factor is None else factor * row
    return None if factor is None or bool((factor == 1).all()) else factor


def _spread(into: Tensor | None, values: Tensor | None, positions: Tensor, length: int, blank: float) -> Tensor | None:
    """Per-unit values written at the positions that the units own on an axis."""
    if values is None:
        return into
    if into is None:
        into = torch.full((length,), blank, dtype=torch.float64)
    into[positions] = values.repeat_interleave(positions.numel() // values.numel())
    return into
