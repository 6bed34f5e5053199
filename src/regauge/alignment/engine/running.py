"""The cost of a family kept up to date: computed in full once, then corrected by what moved."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regauge.alignment.engine.moves import Change
from regauge.core.act import Site
from regauge.core.assignment import Floats
from regauge.core.closest import Character, Closest, Cost, character, closest
from regauge.core.element import Value
from regauge.core.families import Family, Tensors, inner_products, shift_cost, unfold

Pair = tuple[Tensor | None, Tensor | None]
"""A tensor of the first network and of the second; None where averaging leaves nothing."""


@dataclass
class _Term:
    """One place where the root acts. A kept term is part of the running cost once it is present."""

    name: str
    site: Site
    is_kept: bool
    is_present: bool = False


class RunningCost:
    """The cost of a family in which nothing is nested, in coordinates of the moved second network.

    Terms of tensors on which the root acts twice, and of values that shifts change, are not kept: they are
    computed anew each time.

    Args:
        family: Its root is the only member.
        coupled: Tensors on which the root acts along two axes.
    """

    def __init__(self, family: Family, coupled: frozenset[str]) -> None:
        self._group = family.root
        self._terms = [
            _Term(name, site, name not in coupled and not any(site.placement.shift))
            for name, local in family.sites.items()
            for site in local
        ]
        self._sums: dict[Character, Tensor] = {}
        self._potentials: Floats | None = None

    def forget(self) -> None:
        """Compute every term anew next time; the potentials stay."""
        self._sums.clear()
        for term in self._terms:
            term.is_present = False

    def closest(self, cost: Cost) -> Closest:
        """The best value, from the potentials of the last search."""
        found = closest(self._group, cost, potentials=self._potentials, is_repeated=True)
        self._potentials = found.potentials
        return found

    def cost(
        self,
        a: Tensors,
        b: Tensors,
        unknown: Mapping[tuple[str, int], list[Site]],
        average: Callable[[str, Sequence[Site]], Pair],
    ) -> Cost:
        """The cost; terms take `average` where `unknown` (by tensor and axis) names sites."""
        extra: dict[Character, Tensor] = {}
        shifts = []
        for term in self._terms:
            if term.is_present:
                continue
            sites = unknown.get((term.name, term.site.placement.axis), [])
            x, y = average(term.name, sites) if sites else (a[term.name], b[term.name])
            if x is None or y is None:
                continue
            left, right = unfold(x, term.site), unfold(y, term.site)
            product = inner_products(self._group, left, right)
            if term.is_kept and not sites:
                term.is_present = True
                _accumulate(self._sums, character(term.site.placement), product)
            else:
                _accumulate(extra, character(term.site.placement), product)
            shift = shift_cost(term.site, left, right)
            if shift is not None:
                shifts.append(shift)
        matrices = dict(self._sums)
        for key, matrix in extra.items():
            matrices[key] = matrices[key] + matrix if key in matrices else matrix
        if not matrices:
            n, some = self._group.size, self._terms[0]
            columns = n if self._group.is_permuted or self._group.matrix != "none" else 1
            matrices = {character(some.site.placement): torch.zeros(n, columns, dtype=torch.float64)}
        return Cost(matrices, tuple(shifts))

    def neighbor_moved(self, change: Change, a: Tensors) -> None:
        """Correct the terms of a tensor of which another group moved some positions."""
        for term in self._terms:
            if term.name != change.name or not term.is_present:
                continue
            left, axis = a[change.name], term.site.placement.axis
            if change.axis is not None and change.axis != axis:
                left, right = left.index_select(change.axis, change.positions), change.difference
            elif change.axis is not None:
                if not bool(torch.isin(change.positions.cpu(), term.site.positions).any()):
                    continue
                right = torch.zeros_like(left).index_copy(change.axis, change.positions, change.difference)
            else:
                right = change.difference
            product = inner_products(self._group, unfold(left, term.site), unfold(right, term.site))
            _accumulate(self._sums, character(term.site.placement), product)

    def self_moved(self, value: Value, factors: Mapping[Character, Tensor]) -> None:
        """Follow a step of the group itself: its columns move with the second network."""
        for key, matrix in self._sums.items():
            if value.matrix is not None:
                self._sums[key] = matrix @ value.matrix.to(matrix).mT
            elif self._group.is_permuted:
                assert value.perm is not None
                moved = _columns(matrix, value.perm)
                self._sums[key] = moved * factors[key].to(matrix) if key in factors else moved
            elif key in factors:
                self._sums[key] = matrix * factors[key].to(matrix).unsqueeze(-1)
        if self._potentials is not None and value.perm is not None:
            self._potentials = self._potentials[value.perm.numpy()]


def _accumulate(into: dict[Character, Tensor], key: Character, term: Tensor) -> None:
    """Sum in place, in float64: the sums belong to nobody else."""
    if key in into:
        into[key] += term
    else:
        into[key] = term.double()


def _columns(matrix: Tensor, perm: Tensor) -> Tensor:
    if matrix.device.type != "cpu":
        return matrix.index_select(1, perm.to(matrix.device))
    # numpy gathers columns several times faster than torch.
    return torch.from_numpy(np.take(matrix.numpy(), perm.numpy(), axis=1))
