"""The cost of one family of groups in coordinate ascent, for many pairs of networks at once.

Terms of the cost that never change are summed only once. All other terms of the cost are corrected when they change.
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from regauge.alignment.engine.neighbor_terms import NeighborTerm
from regauge.alignment.engine.paired_networks import PairedNetworks, at, put
from regauge.core.act import Site
from regauge.core.closest import Character, Closest, Cost, ShiftCost, character, closest
from regauge.core.element import Value
from regauge.core.families import Family, barycenter, inner_products, shift_cost, unfold


@dataclass
class _Term:
    """One summand of a family's cost. The summand comes from one axis of a tensor on which the family's outermost group
    acts.

    If `is_present`, the term is part of the stored sums. Without `is_present`, the term is computed anew every time. If
    only one other group permutes the tensor, `neighbor` corrects the stored term when this group changes. If no other
    group acts on the tensor, the term may have a quadratic part, `shift`.
    """

    name: str
    site: Site
    others: list[Site]
    neighbor: NeighborTerm | None
    is_kept: bool
    is_present: bool = False
    shift: ShiftCost | None = None


class FamilyCost:
    """The cost (linear objective) of one family of groups without nested groups, for every pair of networks.

    The cost compares the first networks with second networks on which only the elements of the *other* families have
    acted. Therefore the best element does not depend on the current element of the family. A tensor on which no other
    family acts never changes, so its term is computed only once.
    """

    def __init__(self, networks: PairedNetworks, family: Family) -> None:
        self._networks, self._root = networks, family.root
        self._sums: dict[Character, Float[Tensor, "pair target source"]] = {}
        self._potentials: Float[Tensor, "pair source"] | None = None
        self._terms = []
        for name, local in family.own_sites.items():
            for site in local:
                others = [s for s in networks.sites[name] if s.group.name != self._root.name]
                others += [s for s in local if s.placement.axis != site.placement.axis]
                neighbor = None
                if len(others) == 1 and NeighborTerm.fits(networks, name, site, others[0]):
                    neighbor = NeighborTerm(networks, name, site, others[0])
                self._terms.append(_Term(name, site, others, neighbor, is_kept=not others or neighbor is not None))
        # Sums over tensors of several dtypes have the widest dtype.
        self._dtype = functools.reduce(torch.promote_types, {networks.a[term.name].dtype for term in self._terms})

    def aim_at(self, names: Collection[str]) -> None:
        """Mark the stored sums that use the named tensors of the first networks as outdated. The next search computes
        outdated sums again.

        The potentials (dual variables) of the assignments are kept.
        """
        if not any(term.name in names for term in self._terms):
            return
        self._sums.clear()
        for term in self._terms:
            term.is_present = False
            if term.neighbor is not None:
                term.neighbor.aim()

    def closest(self, cost: Cost, rows: Tensor, current: Value, slack: Float64[Tensor, " row"]) -> Closest:
        """Return the best elements for the selected pairs, starting from the last potentials.

        A permutation is kept if no other permutation gains more than `slack`.
        """
        potentials = None if self._potentials is None else at(self._potentials, rows)
        found = closest(self._root, cost, current=current.perm, slack=slack, potentials=potentials, is_repeated=True)
        if found.potentials is not None:
            if self._potentials is None:
                self._potentials = found.potentials.new_zeros(self._networks.pairs, self._root.size)
            put(self._potentials, rows, found.potentials)
        return found

    def cost(self, rows: Tensor, unknown: Collection[str] = ()) -> Cost:
        """Return the cost for the selected pairs of networks. Tensors are averaged over the groups whose elements are
        still unknown.
        """
        networks = self._networks
        every = None if len(rows) == networks.pairs else rows
        extra: dict[Character, Tensor] = {}
        shifts: list[ShiftCost] = []
        for term in self._terms:
            hidden = [site for site in term.others if site.group.name in unknown]
            if term.is_kept and not hidden:
                self._keep(term, rows)
                if term.shift is not None:
                    s = term.shift
                    shifts.append(replace(s, target=at(s.target, every), source=at(s.source, every)))
                continue
            known = [site for site in term.others if site.group.name not in unknown]
            b = networks.moved_by(term.name, known, every) if known else at(networks.b[term.name], every)
            x, y = barycenter(at(networks.a[term.name], every), hidden, 1), barycenter(b, hidden, 1)
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
            matrices = {character(self._terms[0].site.placement): self._zeros(self._terms[0], len(rows))}
        return Cost(matrices, tuple(shifts))

    def _keep(self, term: _Term, rows: Tensor) -> None:
        """Update a term of the cost that is stored in the sums."""
        if term.neighbor is None and term.is_present:
            return
        networks, key = self._networks, character(term.site.placement)
        if key not in self._sums:
            self._sums[key] = self._zeros(term, networks.pairs)
        if term.neighbor is not None:
            term.neighbor.update(self._sums[key], rows)
            return
        left, right = unfold(networks.a[term.name], term.site, 1), unfold(networks.b[term.name], term.site, 1)
        self._sums[key] += inner_products(self._root, left, right)
        term.shift = shift_cost(term.site, left, right)
        term.is_present = True

    def _zeros(self, term: _Term, count: int) -> Tensor:
        columns = self._root.size if self._root.is_permuted or self._root.matrix != "none" else 1
        return self._networks.a[term.name].new_zeros(count, self._root.size, columns, dtype=self._dtype)
