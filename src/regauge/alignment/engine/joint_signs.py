"""The best signs of two groups that multiply the same entries along one axis, such as heads and rotary pairs within
heads.

The entry of head h and pair j is multiplied by the signs `s_h t_j`. All signs s together determine the best signs t,
and all signs t determine the best signs s. A simple alternation between s and t would end in a local optimum, because
contributions of heads with wrong signs cancel. If only one head contributes, nothing cancels. Therefore the
alternation starts once from each single head or, if there are few heads, from all combinations of their signs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import torch
from jaxtyping import Float64, Int8
from torch import Tensor

from regauge.core.act import Site
from regauge.core.closest import Character, character, unit_signs
from regauge.core.element import Value
from regauge.core.families import Family, Tensors
from regauge.core.groups import Group
from regauge.core.signs import SignCode

MOST_UNITS = 64
"""The largest number of units in the smaller group for which the alternation starts from each single unit."""
MOST_VALUES = 1 << 21
"""The largest number of entries for which all combinations of signs of the smaller group are tried, which is exact."""
TURNS = 8
"""The largest number of alternations from each start, when the signs of two groups are optimized alternately."""

Signs = Int8[Tensor, "family row unit"]


@dataclass(frozen=True)
class SignPair:
    """A pair of families whose outermost groups have signs on one axis of a tensor, given by their indices.

    The family whose outermost group has fewer units comes first.
    """

    first: int
    second: int
    groups: tuple[Group, Group]
    sites: Mapping[str, Sequence[Site]]

    def closest(self, a: Tensors, b: Tensors) -> tuple[Signs, Signs, Float64[Tensor, " row"]]:
        """Return the best signs of both families, relative to their current signs in `b`, and how much they raise the
        objective.
        """
        terms = self._terms(a, b)
        total = torch.stack([term.sum((-1, -2)) for term in terms.values()]).sum(0)
        rows, (left, right) = len(total), self.groups
        bits = left.signs * left.size
        if rows * left.size * right.size << bits <= MOST_VALUES:
            patterns = 1 - 2 * torch.tensor(list(product((0, 1), repeat=bits)), dtype=torch.int8)
            start = patterns.reshape(-1, left.signs, left.size).movedim(1, 0).unsqueeze(2).expand(-1, -1, rows, -1)
            t = self._second(terms, start, torch.ones(()))
        else:
            start = torch.ones(left.signs, left.size, rows, left.size, dtype=torch.int8)
            t = self._second(terms, start, torch.eye(left.size).reshape(left.size, 1, left.size))
        best, signs = (
            total,
            (
                torch.ones(left.signs, rows, left.size, dtype=torch.int8),
                torch.ones(right.signs, rows, right.size, dtype=torch.int8),
            ),
        )
        # For fixed signs of one group, the best signs of the other are exact unit by unit, so the objective never
        # decreases.
        for _ in range(TURNS):
            s = self._first(terms, t)
            changed = self._second(terms, s, torch.ones(()))
            if torch.equal(changed, t):
                break
            t = changed
        reached = self._objective(terms, s, t)
        value, which = reached.max(0)
        each = torch.arange(rows)
        is_better = (value > best)[:, None]
        signs = (
            torch.where(is_better, s[:, which, each], signs[0]),
            torch.where(is_better, t[:, which, each], signs[1]),
        )
        return *signs, torch.maximum(value - best, torch.zeros_like(best))

    def _terms(self, a: Tensors, b: Tensors) -> dict[tuple[Character, Character], Float64[Tensor, "row first second"]]:
        """Return inner products of the two networks, for each pair of sign products (one of each group) that multiplies
        entries.

        Entries on which a group does not act are assigned to its first unit.
        """
        left, right = self.groups
        terms: dict[tuple[Character, Character], Tensor] = {}
        for name, local in self.sites.items():
            for axis in sorted({site.placement.axis for site in local}):
                here = [site for site in local if site.placement.axis == axis]
                entries = (a[name].double() * b[name].double()).movedim(1 + axis, 1)
                length = entries.shape[1]
                products = entries.reshape(len(entries), length, -1).sum(-1).cpu()
                keys: list[list[tuple[Character, Tensor, Tensor]]] = []
                for group in (left, right):
                    free = torch.ones(length, dtype=torch.bool)
                    own = []
                    for site in here:
                        if site.group.name == group.name:
                            free[site.positions] = False
                            own.append((character(site.placement), site.positions, site.units))
                    blank = free.nonzero().flatten()
                    keys.append([*own, ((0,) * group.signs, blank, torch.zeros_like(blank))])
                for key_left, at_left, of_left in keys[0]:
                    unit = torch.full((length,), -1).index_copy(0, at_left, of_left)
                    for key_right, at_right, of_right in keys[1]:
                        is_both = unit[at_right] >= 0
                        if not bool(is_both.any()) or not any((*key_left, *key_right)):
                            continue
                        flat = unit[at_right[is_both]] * right.size + of_right[is_both]
                        grid = products.new_zeros(len(products), left.size * right.size)
                        grid.index_add_(1, flat, products[:, at_right[is_both]])
                        key = (key_left, key_right)
                        grid = grid.reshape(-1, left.size, right.size)
                        terms[key] = terms[key] + grid if key in terms else grid
        return terms

    def _second(self, terms: Mapping[tuple[Character, Character], Tensor], s: Signs, share: Tensor) -> Signs:
        """Return the best signs of the second group, `[family, start, row, unit]`, for given signs of the first
        group.
        """
        costs: dict[Character, Tensor] = {}
        for (left, right), term in terms.items():
            weight = share * _factor(left, s) if any(left) else _factor(left, s)
            cost = (weight.unsqueeze(-1) * term).sum(-2)
            costs[right] = costs[right] + cost if right in costs else cost
        return SignCode.of(*costs).signs(list(costs.values()), self.groups[1].signs)

    def _first(self, terms: Mapping[tuple[Character, Character], Tensor], t: Signs) -> Signs:
        costs: dict[Character, Tensor] = {}
        for (left, right), term in terms.items():
            cost = (_factor(right, t).unsqueeze(-2) * term).sum(-1)
            costs[left] = costs[left] + cost if left in costs else cost
        return SignCode.of(*costs).signs(list(costs.values()), self.groups[0].signs)

    def _objective(self, terms: Mapping[tuple[Character, Character], Tensor], s: Signs, t: Signs) -> Tensor:
        parts = [
            (_factor(left, s).unsqueeze(-1) * _factor(right, t).unsqueeze(-2) * term).sum((-1, -2))
            for (left, right), term in terms.items()
        ]
        return torch.stack(parts).sum(0)


def find_sign_pairs(families: Sequence[Family]) -> list[SignPair]:
    """Return the pairs of families whose outermost groups have signs for the same entries of an axis."""
    pairs = []
    signed = [k for k, one in enumerate(families) if one.root.signs and not one.root.shifts]
    for k, other in combinations(signed, 2):
        first, second = sorted((k, other), key=lambda number: families[number].root.size)
        if families[first].root.size > MOST_UNITS or not _meet(families[k], families[other]):
            continue
        sites: dict[str, list[Site]] = {}
        for number in (first, second):
            for name, local in families[number].sites.items():
                own = [site for site in local if site.group.name == families[number].root.name]
                sites.setdefault(name, []).extend(own)
        if not any(_acts_across(local) for local in sites.values()):
            pairs.append(SignPair(first, second, (families[first].root, families[second].root), sites))
    return pairs


def _meet(one: Family, other: Family) -> bool:
    """Return whether two families multiply the same entries of an axis by signs of their outermost groups."""
    for name in one.sites.keys() & other.sites.keys():
        left, right = (
            [s for s in f.sites[name] if s.group.name == f.root.name and any(s.placement.sign)] for f in (one, other)
        )
        for x in left:
            for y in right:
                if x.placement.axis == y.placement.axis and bool(torch.isin(x.positions, y.positions).any()):
                    return True
    return False


def _acts_across(sites: Sequence[Site]) -> bool:
    """Return whether signs multiply a tensor along several axes, which this module cannot treat."""
    return len({site.placement.axis for site in sites if any(site.placement.sign)}) > 1


def _factor(key: Character, signs: Signs) -> Tensor:
    """Return, for each unit, the product of those signs that an exponent selects, `[..., unit]`."""
    factor = unit_signs(key, Value(sign=signs.movedim(0, -2)))
    return torch.ones(signs.shape[1:], dtype=torch.float64) if factor is None else factor
