"""Steps of one group written out: which positions of a tensor they move, and to what."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regauge.core.act import Site
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


def moved_positions(name: str, sites: list[Site], value: Value, old: Tensor) -> Change | None:
    """The positions of one axis that a step of a group without a matrix moves, and their new values."""
    axis = sites[0].placement.axis
    targets, sources, factors, shifts = [], [], [], []
    for site in sites:
        n = site.group.size
        units = torch.arange(n)
        perm = units if value.perm is None else value.perm
        factor = unit_factor(site, value)
        shift = torch.zeros(n, dtype=torch.float64)
        if value.shift is not None:
            shift = (torch.tensor(site.placement.shift, dtype=torch.float64).unsqueeze(-1) * value.shift).sum(0)
        is_moved = (perm != units) | (shift != 0)
        if factor is not None:
            is_moved = is_moved | (factor != 1)
        moved = is_moved.nonzero().flatten()
        rows = site.positions.reshape(n, -1)
        targets.append(rows[moved].flatten())
        sources.append(rows[perm[moved]].flatten())
        ones = torch.ones(n, dtype=torch.float64) if factor is None else factor
        factors.append(ones[moved].repeat_interleave(rows.shape[1]))
        shifts.append(shift[moved].repeat_interleave(rows.shape[1]))
    target = torch.cat(targets)
    if target.numel() == 0:
        return None
    source, factor, shift = torch.cat(sources), torch.cat(factors), torch.cat(shifts)
    length = old.shape[axis]
    is_whole = target.numel() > WHOLE * length
    if is_whole:
        source = torch.arange(length).index_copy(0, target, source)
        factor = torch.ones(length, dtype=torch.float64).index_copy(0, target, factor)
        shift = torch.zeros(length, dtype=torch.float64).index_copy(0, target, shift)
    shape = [-1 if k == axis else 1 for k in range(old.ndim)]
    new = old.index_select(axis, source.to(old.device))
    if bool((factor != 1).any()):
        new = new * factor.to(old).reshape(shape)
    if bool((shift != 0).any()):
        new = new + shift.to(old).reshape(shape)
    if is_whole:
        return Change(name, None, target, new, old)
    return Change(name, axis, target.to(old.device), new, old)


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
    return factor
