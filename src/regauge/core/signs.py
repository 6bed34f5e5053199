"""The best signs for each pair of units, for groups with several families of signs.

Each unit has one sign s_k for each family k. At each placement, the units are multiplied by a *character*: the product
of s_k over a subset of the families. Different placements can have different products of signs. For one pair of units,
the objective is `sum_chi chi(s) c_chi`, a sum over the characters chi. The objective is maximized over the signs s. A
product of signs that is independent of all others over GF(2) contributes `|c_chi|` to the maximum. Dependent characters
(products of signs) are divided into components that are independent of one another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from itertools import product

import torch
from torch import Tensor

ENUMERATED = 8
"""The largest number of independent signs of a component for which all combinations of signs are tried. For larger
components, coordinate ascent is used.
"""


@dataclass(frozen=True)
class _Component:
    """A set of dependent characters (products of signs): their indices, and each one as a bit mask of independent
    signs.
    """

    members: tuple[int, ...]
    masks: tuple[int, ...]
    basis: tuple[int, ...]


class SignCode:
    """The characters of a group (products of signs), split into independent components.

    `SignCode.of` caches its results.

    Args:
        characters: For each character, the exponents (0 or 1) of the families of signs. All characters (products of
            signs) are different.
    """

    @classmethod
    @cache
    def of(cls, *characters: tuple[int, ...]) -> "SignCode":
        """Return the code for the given characters (products of signs)."""
        return cls(characters)

    def __init__(self, characters: Sequence[Sequence[int]]) -> None:
        self.words = [sum((e % 2) << k for k, e in enumerate(c)) for c in characters]

    @property
    def is_independent(self) -> bool:
        """Whether every component of dependent characters consists of one character."""
        return all(len(component.members) == 1 for component in self._components)

    def best(self, costs: Sequence[Tensor]) -> Tensor:
        """Return the best objective `max over s of sum_chi chi(s) c_chi` over signs s, entry by entry.

        All costs c_chi must have the same shape.
        """
        values = [self._solve(component, costs)[0] for component in self._components]
        return reduce(torch.add, values)

    def signs(self, costs: Sequence[Tensor], families: int) -> Tensor:
        """Return the signs with the best objective, int8 `[families, ...]`.

        Signs that do not affect the objective are plus one.
        """
        chosen: dict[int, Tensor] = {}
        for component in self._components:
            bits = self._solve(component, costs)[1]
            chosen |= dict(zip(component.basis, bits, strict=True))
        result = torch.zeros(families, *costs[0].shape, dtype=torch.int64, device=costs[0].device)
        # A reduced row contains one pivot and free families. The signs of free families stay plus one, so the sign of
        # the pivot is the product of the characters that the row combines.
        for pivot, (_, combination) in self._reduce[0].items():
            for member in combination:
                result[pivot] ^= chosen[member]
        return (1 - 2 * result).to(torch.int8)

    @cached_property
    def _reduce(self) -> tuple[dict[int, tuple[int, frozenset[int]]], list[frozenset[int]]]:
        """The Gauss-Jordan reduction of the characters (products of signs) over GF(2).

        The first result maps each pivot to a reduced row and to the basis characters whose product the row is. The
        second result lists, for each character, the basis characters whose product it is.
        """
        rows: dict[int, tuple[int, frozenset[int]]] = {}
        expressed: list[frozenset[int]] = []
        for index, word in enumerate(self.words):
            rest, used = word, frozenset[int]()
            for pivot, (row, combination) in rows.items():
                if rest >> pivot & 1:
                    rest, used = rest ^ row, used ^ combination
            if rest == 0:
                expressed.append(used)
                continue
            pivot = rest.bit_length() - 1
            combination = used | {index}
            for other, (row, theirs) in list(rows.items()):
                if row >> pivot & 1:
                    rows[other] = (row ^ rest, theirs ^ combination)
            rows[pivot] = (rest, combination)
            expressed.append(frozenset({index}))
        return rows, expressed

    @cached_property
    def _components(self) -> list[_Component]:
        parts: list[tuple[set[int], set[int]]] = []  # (basis, members)
        for index, word in enumerate(self._reduce[1]):
            basis, members = set(word), {index}
            for part in [p for p in parts if p[0] & basis]:
                parts.remove(part)
                basis, members = basis | part[0], members | part[1]
            parts.append((basis, members))
        result = []
        for basis, members in parts:
            order = sorted(basis)
            masks = [sum(1 << order.index(b) for b in self._reduce[1][m]) for m in sorted(members)]
            result.append(_Component(tuple(sorted(members)), tuple(masks), tuple(order)))
        return result

    def _solve(self, component: _Component, costs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the best objective of a set of dependent characters, and a bit (1 for minus) for each character of its
        basis.
        """
        own = [costs[m] for m in component.members]
        size = len(component.basis)
        if size == 0:
            return torch.stack(own).sum(0), []
        if len(own) == 1:
            return own[0].abs(), [(own[0] < 0).long()]
        if size > ENUMERATED:
            return _coordinate_ascent(component, own)
        best: Tensor | None = None
        code = torch.zeros_like(own[0], dtype=torch.int64)
        for pattern in product((0, 1), repeat=size):
            number = sum(bit << k for k, bit in enumerate(pattern))
            value = torch.zeros_like(own[0])
            for mask, cost in zip(component.masks, own, strict=True):
                value = value - cost if (mask & number).bit_count() % 2 else value + cost
            if best is None:
                best = value
            else:
                code = torch.where(value > best, number, code)
                best = torch.maximum(best, value)
        assert best is not None
        return best, [code >> k & 1 for k in range(size)]


def _coordinate_ascent(component: _Component, own: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Flip one sign at a time until no single flip improves the objective at any entry.

    The initial signs are optimal if all characters outside of the basis are ignored.
    """
    place = dict(zip(component.members, own, strict=True))
    bits = [(place[b] < 0).long() for b in component.basis]
    signed = list(own)
    for k, bit in enumerate(bits):
        for m, mask in enumerate(component.masks):
            if mask >> k & 1:
                signed[m] = torch.where(bit == 1, -signed[m], signed[m])
    is_improved = True
    while is_improved:
        is_improved = False
        for k in range(len(bits)):
            touched = [m for m, mask in enumerate(component.masks) if mask >> k & 1]
            # A flip negates the terms whose character contains this sign, so it adds minus twice their sum to the
            # objective.
            flip = torch.stack([signed[m] for m in touched]).sum(0) < 0
            if bool(flip.any()):
                is_improved = True
                bits[k] = bits[k] ^ flip.long()
                for m in touched:
                    signed[m] = torch.where(flip, -signed[m], signed[m])
    return torch.stack(signed).sum(0), bits
