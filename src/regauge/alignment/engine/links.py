"""Two groups on one tensor: the cost of one of them follows what the other one moves, for many pairs at once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.core.act import Site
from regauge.core.closest import Character, character
from regauge.core.element import Value
from regauge.core.groups import Group
from regauge.core.products import matmul

BUCKETS = (1 / 16, 1 / 4, 1.0)
"""Pairs that moved at most this share of units are corrected together, by as many units."""


@dataclass
class Link:
    """The term `sum_u <a[u, i], (h b)[u, j]>` of one group's cost, where another group's element h acts on u.

    `update` adds to the cost what changed since the last update: the products with units that h moved.

    Attributes:
        group: The other group.
        character: Which of its signs act here.
        a: First networks, `[pair, unit of the other group, unit, rest]`.
        b: Second networks.
        perm: The other group's permutation at the last update, `[pair, unit]`.
        factor: What its units were multiplied by then; zero before the first update.
        is_diagonal: Whether the units of this term's own group stay in their order, so that the term is `[unit, 1]`.
    """

    group: Group
    character: Character
    a: Tensor
    b: Tensor
    perm: Tensor
    factor: Tensor
    is_diagonal: bool

    @classmethod
    def between(cls, own: Site, other: Site, a: Tensor, b: Tensor) -> "Link | None":
        """The link at two sites of one tensor; None where the other group does more than reorder and flip units."""
        length = a.shape[1 + other.placement.axis]
        is_whole = other.is_sorted and other.positions.numel() == length and other.group.size == length
        is_more = any(other.placement.shift) or any(own.placement.shift) or other.group.matrix != "none"
        if own.placement.axis == other.placement.axis or not is_whole or is_more or other.bases or own.bases:
            return None
        if own.group.matrix != "none" or a.dtype != b.dtype:
            return None
        x, y = _unfolded(a, own, other), _unfolded(b, own, other)
        return cls(
            group=other.group,
            character=character(other.placement),
            a=x,
            b=y,
            perm=torch.arange(length).expand(len(a), length).clone(),
            factor=torch.zeros(len(a), length, dtype=torch.int8),
            is_diagonal=not own.group.is_permuted,
        )

    def update(self, sums: Tensor, rows: Tensor, value: Value) -> None:
        """Bring `sums` of the pairs `rows` up to date with the other group's value `[pair, ...]`."""
        perm = self.perm[rows] if value.perm is None else value.perm[rows]
        factor = self._factor(value, rows)
        changed = (perm != self.perm[rows]) | (factor != self.factor[rows])
        counts = changed.sum(1)
        n, above = perm.shape[1], torch.zeros_like(counts)
        for share in BUCKETS:
            width = max(1, round(share * n))
            here = ((counts > above) & (counts <= width)).nonzero().flatten()
            above = torch.full_like(above, width)
            if len(here):
                self._correct(sums, rows[here], changed[here], perm[here], factor[here], width)
        self.perm[rows], self.factor[rows] = perm, factor

    def _correct(self, sums: Tensor, rows: Tensor, changed: Tensor, perm: Tensor, factor: Tensor, width: int) -> None:
        n = perm.shape[1]
        # Positions that did not change fill up the width: their difference is zero.
        units = None if width == n else changed.byte().topk(width, dim=1, sorted=False).indices
        is_signed, before = any(self.character), self.factor[rows]
        new = self._rows(self.b, rows, perm, units)
        if is_signed:
            new *= _column(factor, units, self.b)
        if bool(before.any()):
            old = self._rows(self.b, rows, self.perm[rows], units)
            if is_signed or not bool(before.all()):
                old *= _column(before, units, self.b)
            new -= old
        if units is None:
            left = self.a if len(rows) == len(self.a) else self.a[rows]
        else:
            left = self._rows(self.a, rows, units, None)
        if self.is_diagonal:
            change = (left * new).sum((1, 3)).unsqueeze(-1)
        elif left.shape[3] == 1:
            change = matmul(left.squeeze(3).mT, new.squeeze(3))
        else:
            change = matmul(left.transpose(1, 2).flatten(2), new.transpose(1, 2).flatten(2).mT)
        sums.index_add_(0, rows, change)

    def _rows(self, tensor: Tensor, rows: Tensor, perm: Tensor, units: Tensor | None) -> Tensor:
        """`tensor[rows, perm[:, units]]`."""
        picked = perm if units is None else perm.gather(1, units)
        flat = (rows.unsqueeze(1) * tensor.shape[1] + picked).flatten()
        return tensor.flatten(0, 1).index_select(0, flat).reshape(*picked.shape, *tensor.shape[2:])

    def _factor(self, value: Value, rows: Tensor) -> Tensor:
        factor = torch.ones(len(rows), self.group.size, dtype=torch.int8)
        signs = 0 if value.sign is None else value.sign.shape[-2]
        for k, exponent in enumerate(self.character):
            if exponent and k < signs:
                assert value.sign is not None
                factor *= value.sign[rows, k]
            elif exponent:
                assert value.shift is not None
                factor *= (1 - 2 * (value.shift[rows, k - signs] % 2)).to(torch.int8)
        return factor


def _column(factor: Tensor, units: Tensor | None, like: Tensor) -> Tensor:
    picked = factor if units is None else factor.gather(1, units)
    return picked.to(like.dtype)[..., None, None]


def _unfolded(tensor: Tensor, own: Site, other: Site) -> Tensor:
    """`[pair, unit of the other group, unit of the own group, rest]`, laid out row by row."""
    axis = 1 + own.placement.axis
    if not (own.is_sorted and own.positions.numel() == tensor.shape[axis]):
        tensor = tensor.index_select(axis, own.positions)
    last = tensor.movedim((1 + other.placement.axis, axis), (1, 2))
    return last.reshape(len(tensor), other.group.size, own.group.size, -1).contiguous()
