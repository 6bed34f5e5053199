"""Gather indices, factors and shifts for each tensor under random elements, stored as broadcast tables."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from jaxtyping import Int, Num
from torch import Tensor

from regauge.core.act import Site
from regauge.core.groups import axes_of
from regauge.core.moving.random_draws import Draws, blank
from regauge.core.symmetry import Symmetry

Unmoved = Sequence[tuple[tuple[int, ...], Tensor]]
"""Small tables whose broadcast sum is the index of each row before the element acts. Each table comes with the axes of
the tensor that it covers."""
LONG_ROW = 4
"""Whole rows are gathered if at least this number of entries belongs to each index of the last permuted axis."""


@dataclass(frozen=True, eq=False)
class Term:
    """The part of a table of random values that acts along some axes of a tensor.

    If a unit moves by one position, its entries move by `step` rows in the tensor.
    """

    columns: Int[Tensor, " columns"] | slice
    shape: tuple[int, ...]
    step: int = 0

    def of(self, table: Num[Tensor, "models width"]) -> Tensor:
        """Return the random values of this term for each network, in the shape of the tensor: `[models, *shape]`."""
        if isinstance(self.columns, slice):
            return table[:, self.columns].view(len(table), *self.shape)
        return table.gather(1, self.columns.expand(len(table), -1)).view(len(table), *self.shape)

    def spread(self, shape: tuple[int, ...], width: int) -> Int[Tensor, " values"]:
        """Return, for each entry of a tensor, the column of the table of random values that belongs to the entry."""
        return torch.arange(width)[self.columns].view(self.shape).expand(shape).reshape(-1)


@dataclass(frozen=True, eq=False)
class MovedTensor:
    """A tensor as rows of `run` entries, and the tables that permute, multiply and shift these rows."""

    name: str
    shape: tuple[int, ...]
    run: int
    moves: tuple[Term, ...]
    factors: tuple[Term, ...]
    shifts: tuple[Term, ...]

    @property
    def size(self) -> int:
        """The number of rows of the tensor."""
        return math.prod(self.shape)

    def unmoved(self, first: Int[Tensor, " models"]) -> Unmoved:
        """Return tables whose sum is the index of each row before it is moved.

        `first` is the index of the first row of each network.
        """
        (shape, counted), *others = self._counted
        return (shape, counted + first.view(-1, *[1] * len(self.shape))), *others

    def place(
        self,
        table: Int[Tensor, "models width"],
        unmoved: Unmoved,
        out: Int[Tensor, "models *shape"],
    ) -> None:
        """Write to `out`, for each row, the index of the row from which it is taken.

        The argument `unmoved` may contain more networks than the argument `table`.
        """
        totals = []
        for shape, total in unmoved:
            total = total[: len(table)]
            for term in self.moves:
                if term.shape == shape:
                    total = torch.add(total, term.of(table), alpha=term.step)
            totals.append(total)
        if len(totals) == 1:
            out.copy_(totals[0])
        else:
            torch.add(reduce(torch.add, totals[:-1]), totals[-1], out=out)

    def multiply(self, table: Num[Tensor, "models width"], out: Num[Tensor, "models *shape"]) -> None:
        """Write the product of all factors of each row to `out`."""
        terms = [term.of(table) for term in self.factors]
        is_whole = tuple(map(max, zip(*(term.shape for term in terms), strict=True))) == tuple(out.shape)
        if len(terms) > 1 and is_whole:
            torch.mul(reduce(torch.mul, terms[:-1]), terms[-1], out=out)
        elif terms:
            out.copy_(reduce(torch.mul, terms))
        else:
            out.fill_(1)

    @cached_property
    def _counted(self) -> tuple[tuple[tuple[int, ...], Tensor], ...]:
        """Small tables whose broadcast sum is the index of each row. There is one table for the axes of each term, and
        one for the remaining axes.
        """
        left, tables = [axis for axis, n in enumerate(self.shape) if n > 1], []
        for shape in dict.fromkeys(term.shape for term in self.moves):
            mine = [axis for axis in left if shape[axis] > 1]
            left = [axis for axis in left if axis not in mine]
            tables.append((shape, self._count(mine)))
        return (*tables, ((), self._count(left))) if left or not tables else tuple(tables)

    def _count(self, axes: Sequence[int]) -> Tensor:
        """Return the row indices along the given axes, with length one along all other axes."""
        total = torch.zeros([1] * (1 + len(self.shape)), dtype=torch.int32)
        for axis in axes:
            steps = torch.arange(self.shape[axis], dtype=torch.int32) * math.prod(self.shape[axis + 1 :])
            total = total + steps.view([1] + [-1 if k == axis else 1 for k in range(len(self.shape))])
        return total


def moved_tensors(symmetry: Symmetry, draws: Draws, names: Iterable[str]) -> list[MovedTensor]:
    """Return the displacements, factors and shifts of each named tensor on which an element acts."""
    found = [_moved_tensor(symmetry, draws, name) for name in names]
    return [tensor for tensor in found if tensor.moves or tensor.factors or tensor.shifts]


def _moved_tensor(symmetry: Symmetry, draws: Draws, name: str) -> MovedTensor:
    shape, sites = axes_of(symmetry.shapes[name]), symmetry.sites[name]
    last = 1 + max(site.placement.axis for site in sites)
    run = math.prod(shape[last:])
    shape, run = (shape[:last], run) if run >= LONG_ROW else (shape, 1)
    moves, factors, shifts = [], [], []
    for site in sites:
        place = site.placement
        if site.group.name in draws.moves:
            step = place.stride * math.prod(shape[place.axis + 1 :])
            moves.append(_term(symmetry, site, shape, draws.moves[site.group.name], blank(draws.moves), step))
        factor, shift = draws.factor_of(site.group, place), draws.shift_of(site.group, place)
        if factor is not None:
            factors.append(_term(symmetry, site, shape, draws.factors[factor], blank(draws.factors)))
        if shift is not None:
            shifts.append(_term(symmetry, site, shape, draws.shifts[shift], blank(draws.shifts)))
    return MovedTensor(name, shape, run, tuple(moves), tuple(factors), tuple(shifts))


def _term(symmetry: Symmetry, site: Site, shape: tuple[int, ...], columns: slice, blank: int, step: int = 0) -> Term:
    """Return, for each index of an axis, the column of the table of random values that contains the displacement or
    factor of its unit.

    At indices where the site does not act, the returned column is that of the identity.
    """
    spread = tuple(n if axis in site.axes else 1 for axis, n in enumerate(shape))
    if not site.bases and site.is_plain and site.group.size == shape[site.placement.axis]:
        return Term(columns, spread, step)
    slots, copies = site.units, site.group.size
    for index, base in zip(reversed(site.base_index), reversed(site.group.within), strict=True):
        slots, copies = slots + index * copies, copies * symmetry[base].size
    whole = torch.full([shape[axis] for axis in site.axes], blank)
    whole[..., site.positions] = slots + columns.start
    order = sorted(range(whole.ndim), key=lambda k: site.axes[k])
    return Term(whole.permute(order).reshape(-1), spread, step)
