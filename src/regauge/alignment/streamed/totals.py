"""The cost of a spread group, summed up over the parts of a network, and the best value for it."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product

import torch
from torch import Tensor

from regauge.core import element as _element
from regauge.core.act import Site
from regauge.core.assignment import assign
from regauge.core.closest import Character, Cost, ShiftCost, character, closest
from regauge.core.element import Value
from regauge.core.families import inner_products, shift_cost, unfold
from regauge.core.groups import Group
from regauge.core.signs import SignCode

Pair = tuple[Tensor | None, Tensor | None]


class Total:
    """What is known of the best value of a group, as a sum over parts of the network.

    A part is a working set or a loose tensor. Some families of signs act in one part alone. Given the signs that parts
    share, each part chooses its own for every pair of units, so that one matrix for each pattern of shared signs
    holds all there is to know: with s the shared and t the own signs of a unit, and C the inner products of a part,

        P_s[i, j] = sum over parts of max_t sum_chi chi(s, t) C_chi[i, j]

    That is exact, and it needs no matrix for each norm of a transformer.

    Args:
        group: Nothing is repeated within it.
        shared: Its families of signs that are chosen here; those that no part chooses stay as they are.
    """

    def __init__(self, group: Group, shared: Sequence[int]) -> None:
        self._group, self._shared = group, tuple(shared)
        self._is_by_pattern = bool(group.signs) and not group.shifts
        self._patterns: dict[tuple[int, ...], Tensor] = {}
        self._matrices: dict[Character, Tensor] = {}
        self._shifts: list[ShiftCost] = []

    def add(self, cost: Cost, own: Sequence[int]) -> None:
        """Add a part, in which the families of signs `own` are chosen."""
        if not self._is_by_pattern:
            for key, matrix in cost.matrices.items():
                _accumulate(self._matrices, key, matrix)
            self._shifts.extend(cost.shifts)
            return
        if not cost.matrices:
            return
        for pattern in product((0, 1), repeat=len(self._shared)):
            by_own: dict[Character, Tensor] = {}
            for key, matrix in cost.matrices.items():
                is_flipped = sum(key[f] * bit for f, bit in zip(self._shared, pattern, strict=True)) % 2
                signed = -matrix if is_flipped else matrix
                rest = tuple(key[f] for f in own)
                by_own[rest] = by_own[rest] + signed if rest in by_own else signed
            best = SignCode(list(by_own)).best(list(by_own.values())) if own else by_own[()]
            if pattern in self._patterns:
                self._patterns[pattern] += best
            elif any(best is matrix for matrix in cost.matrices.values()):
                self._patterns[pattern] = best.clone()
            else:
                self._patterns[pattern] = best

    def closest(self) -> tuple[Value, float]:
        """The best value relative to the current one, and what it gains; signs that parts choose are left at one."""
        group = self._group
        if not self._patterns and not self._matrices:
            return _element.identity((group,))[group.name], 0.0
        if not self._is_by_pattern:
            cost = Cost(self._matrices, tuple(self._shifts))
            found = closest(group, cost)
            return found.value, float(found.objective - cost.at_identity())
        before = _diagonal(next(iter(self._patterns.values()))).sum()
        best: Tensor | None = None
        for matrix in self._patterns.values():
            best = matrix if best is None else torch.maximum(best, matrix)
        assert best is not None
        units = torch.arange(group.size)
        perm = torch.from_numpy(assign(best.numpy())) if group.is_permuted else None
        columns = torch.zeros_like(units) if perm is None else perm
        reached = torch.stack([matrix[units, columns] for matrix in self._patterns.values()])
        chosen = torch.tensor(list(self._patterns)).reshape(len(reached), -1)[reached.argmax(0)]
        sign = torch.ones(group.signs, group.size, dtype=torch.int8)
        for k, f in enumerate(self._shared):
            sign[f] = 1 - 2 * chosen[:, k]
        return Value(perm=perm, sign=sign), float(reached.amax(0).sum() - before)


def part_cost(
    group: Group, names: Iterable[str], sites: Callable[[str], Sequence[Site]], pair: Callable[..., Pair]
) -> Cost:
    """The cost of a group on some tensors.

    Args:
        group: Nothing is repeated within it.
        names: The tensors.
        sites: Where the group acts on each of them.
        pair: The values of a tensor in both networks at a site, given its name and the site; None where nothing is
            known of them.
    """
    matrices: dict[Character, Tensor] = {}
    shifts = []
    for name in names:
        for site in sites(name):
            x, y = pair(name, site)
            if x is None or y is None:
                continue
            left, right = unfold(x, site), unfold(y, site)
            _accumulate(matrices, character(site.placement), inner_products(group, left, right))
            shift = shift_cost(site, left, right)
            if shift is not None:
                shifts.append(shift)
    return Cost(matrices, tuple(shifts))


def _accumulate(into: dict[Character, Tensor], key: Character, term: Tensor) -> None:
    if key in into:
        into[key] += term
    else:
        into[key] = term.double()


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.squeeze(-1) if matrix.shape[-1] == 1 else matrix.diagonal()
