"""The cost of a family for many pairs at once: what stays is summed once, what one other group moves is followed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regauge.alignment.engine.links import Link
from regauge.alignment.engine.stacks import Stacks, at, put
from regauge.core.act import Site
from regauge.core.assignment import assign_many
from regauge.core.closest import Character, Closest, Cost, ShiftCost, character, closest, profits, with_order
from regauge.core.element import Value
from regauge.core.families import Family, barycentre, coupled_tensors, inner_products, shift_cost, unfold


def is_absolute(family: Family) -> bool:
    """Whether the best value of a family does not depend on where it is: nothing is nested, turned or acts twice."""
    return not family.is_nested and not coupled_tensors(family) and family.root.matrix == "none"


@dataclass
class _Term:
    """One place where a root acts, and the places of other families on the same tensor.

    Attributes:
        name: The tensor.
        site: Where the root acts.
        others: Numbers and sites of the other families.
        link: Keeps the term up to date where one other group reorders the tensor.
        is_kept: Whether it is part of the kept sums (once `is_present`) instead of being computed anew.
        shift: Its quadratic part, where only the root acts.
    """

    name: str
    site: Site
    others: list[tuple[int, Site]]
    link: Link | None
    is_kept: bool
    is_present: bool = False
    shift: ShiftCost | None = None


class StackCost:
    """The cost of one absolute family for every pair.

    The second networks are seen as all *other* families have moved them. A tensor on which only this family acts enters
    once and is never moved.

    Args:
        stacks: The pairs.
        k: The number of the family.
    """

    def __init__(self, stacks: Stacks, k: int) -> None:
        self._stacks, self._root = stacks, stacks.families[k].root
        self._sums: dict[Character, Tensor] = {}
        self._potentials: Tensor | None = None
        self._terms = []
        for name, local in stacks.own_sites(k).items():
            others = [(o, site) for o, site in stacks.sites[name] if o != k]
            for site in local:
                link = None
                if len(others) == 1 and is_absolute(stacks.families[others[0][0]]):
                    link = Link.between(site, others[0][1], stacks.a[name], stacks.b[name])
                self._terms.append(_Term(name, site, others, link, is_kept=not others or link is not None))

    def closest(self, cost: Cost, rows: Tensor, current: Value, slack: Tensor) -> Closest:
        """The best values, from the potentials of the last search.

        Args:
            cost: Of these pairs.
            rows: Which pairs.
            current: Where they are; orders that are best within `slack` stay.
            slack: `[pair]`.
        """
        if not self._root.is_permuted:
            return closest(self._root, cost)
        profit = profits(self._root, cost)
        if self._potentials is None:
            self._potentials = profit.new_zeros(self._stacks.pairs, self._root.size)
        solved = assign_many(profit, at(self._potentials, rows), current=current.perm, slack=slack)
        put(self._potentials, rows, solved.potentials)
        return with_order(self._root, cost, solved.columns)

    def cost(self, rows: Tensor, unknown: Sequence[int] = ()) -> Cost:
        """The cost for some pairs, with averages over `unknown` families."""
        stacks = self._stacks
        every = None if len(rows) == stacks.pairs else rows
        extra: dict[Character, Tensor] = {}
        shifts: list[ShiftCost] = []
        for term in self._terms:
            hidden = [site for other, site in term.others if other in unknown]
            if term.is_kept and not hidden:
                self._keep(term, rows)
                if term.shift is not None:
                    s = term.shift
                    shifts.append(replace(s, target=at(s.target, every), source=at(s.source, every)))
                continue
            known = [(other, site) for other, site in term.others if other not in unknown]
            b = stacks.moved_by({term.name: known}, every)[term.name] if known else at(stacks.b[term.name], every)
            x, y = barycentre(at(stacks.a[term.name], every), hidden, 1), barycentre(b, hidden, 1)
            if x is None or y is None:
                continue
            left, right, key = unfold(x, term.site, 1), unfold(y, term.site, 1), character(term.site.placement)
            product = inner_products(self._root, left, right)
            extra[key] = extra[key] + product if key in extra else product
            shift = shift_cost(term.site, left, right)
            if shift is not None:
                shifts.append(shift)
        matrices = {key: at(total, every) for key, total in self._sums.items()}
        for key, product in extra.items():
            matrices[key] = matrices[key] + product if key in matrices else product
        if not matrices:
            key = character(self._terms[0].site.placement)
            matrices = {key: torch.zeros(len(rows), self._root.size, self._columns, dtype=torch.float64)}
        return Cost(matrices, tuple(shifts))

    def _keep(self, term: _Term, rows: Tensor) -> None:
        """Bring a kept term up to date; it is part of the sums from then on."""
        if term.link is None and term.is_present:
            return
        stacks, key = self._stacks, character(term.site.placement)
        if key not in self._sums:
            self._sums[key] = stacks.a[term.name].new_zeros(stacks.pairs, self._root.size, self._columns)
        if term.link is not None:
            term.link.update(self._sums[key], rows, stacks.value(term.link.group.name))
            return
        left, right = unfold(stacks.a[term.name], term.site, 1), unfold(stacks.b[term.name], term.site, 1)
        self._sums[key] += inner_products(self._root, left, right)
        term.shift = shift_cost(term.site, left, right)
        term.is_present = True

    @property
    def _columns(self) -> int:
        return self._root.size if self._root.is_permuted or self._root.matrix != "none" else 1
