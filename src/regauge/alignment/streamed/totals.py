"""The cost of a spread group, summed up over the parts of a network, and the best value for it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from regauge.core import element as _element
from regauge.core.act import Site
from regauge.core.assignment import assign
from regauge.core.closest import Character, Cost, ShiftCost, closest, diagonal
from regauge.core.element import Value
from regauge.core.families import add_term, barycenter
from regauge.core.groups import Group
from regauge.core.signs import SignCode


class Total:
    """What is known of the best value of a group, as a sum over parts of the network.

    A part is a working set or a loose tensor. Some families of signs act in one part alone. Given the signs that parts
    share, each part chooses its own for every pair of units, so that one matrix for each pattern of shared signs
    holds all there is to know: with s the shared and t the own signs of a unit, and C the inner products of a part,

        P_s[i, j] = sum over parts of max_t sum_chi chi(s, t) C_chi[i, j]

    That is exact, and it needs no matrix for each norm of a transformer.

    Families of signs that neither are `shared` nor chosen by a part stay as they are.
    """

    def __init__(self, group: Group, shared: Sequence[int]) -> None:
        self.group, self._shared = group, tuple(shared)
        self._is_by_pattern = bool(group.signs) and not group.shifts
        self._matrices: dict[tuple[int, ...], Tensor] = {}  # By pattern, or else by character.
        self._shifts: list[ShiftCost] = []

    def add(self, cost: Cost, own: Sequence[int]) -> None:
        """Add a part, in which the families of signs `own` are chosen."""
        matrices = cost.matrices
        if self._is_by_pattern and matrices:
            matrices = {p: self._best(matrices, p, own) for p in product((0, 1), repeat=len(self._shared))}
        for key, matrix in matrices.items():
            if key in self._matrices:
                self._matrices[key] += matrix
            else:
                self._matrices[key] = matrix.clone() if len(matrices) > 1 else matrix
        self._shifts.extend(cost.shifts)

    def closest(self) -> tuple[Value, float]:
        """The best value relative to the current one, and what it gains; signs that parts choose are left at one."""
        group, matrices = self.group, list(self._matrices.values())
        if not matrices:
            return _element.identity((group,))[group.name], 0.0
        if not self._is_by_pattern:
            cost = Cost(self._matrices, tuple(self._shifts))
            found = closest(group, cost)
            return found.value, float(found.objective - cost.at_identity())
        best = matrices[0]
        for matrix in matrices[1:]:
            best = torch.maximum(best, matrix)
        perm = torch.from_numpy(assign(best.numpy())) if group.is_permuted else None
        units = torch.arange(group.size)
        reached = torch.stack([m[units, 0 * units if perm is None else perm] for m in matrices])
        chosen = torch.tensor(list(self._matrices)).reshape(len(matrices), len(self._shared))[reached.argmax(0)]
        sign = torch.ones(group.signs, group.size, dtype=torch.int8)
        sign[list(self._shared)] = (1 - 2 * chosen.T).to(torch.int8)
        return Value(perm=perm, sign=sign), float(reached.amax(0).sum() - diagonal(matrices[0]).sum())

    def _best(self, matrices: Mapping[Character, Tensor], pattern: tuple[int, ...], own: Sequence[int]) -> Tensor:
        """The inner products of a part under given shared signs, with its own signs at their best."""
        by_own: dict[Character, Tensor] = {}
        for key, matrix in matrices.items():
            is_flipped = sum(key[f] * bit for f, bit in zip(self._shared, pattern, strict=True)) % 2
            signed, rest = -matrix if is_flipped else matrix, tuple(key[f] for f in own)
            by_own[rest] = by_own[rest] + signed if rest in by_own else signed
        return SignCode(list(by_own)).best(list(by_own.values())) if own else by_own[()]


def part_cost(
    group: Group,
    sites: Mapping[str, Sequence[Site]],
    load: Callable[[str], tuple[Tensor, Tensor]],
    unknown: Collection[str] = (),
) -> Cost:
    """The cost of a group on the tensors of `sites`, which `load` gives for both networks.

    Unknown groups are averaged over; the group itself, if it is unknown, where it acts on another axis of a tensor.
    """
    matrices: dict[Character, Tensor] = {}
    shifts: list[ShiftCost] = []
    for name, local in sites.items():
        for site in (site for site in local if site.group.name == group.name):
            hidden = [
                other
                for other in local
                if other.group.name in unknown
                and (other.group.name != group.name or other.placement.axis != site.placement.axis)
            ]
            x, y = (barycenter(tensor, hidden) for tensor in load(name))
            if x is not None and y is not None:
                add_term(matrices, shifts, site, x, y)
    return Cost(matrices, tuple(shifts))
