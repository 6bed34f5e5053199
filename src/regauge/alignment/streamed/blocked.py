"""Coordinate ascent in a working set (tensors that are aligned together) that is too large for memory.

The tensors are read one after another, and memory holds only the cost of one group.

A group's cost is a sum over tensors. Each tensor can therefore be released before the next one is read. One matrix in
the dtype of the tensors sums the profits of all pairs of units with their best signs. The assignment is computed in
place, in the memory of the matrix of profits. The steps of the ascent are those of `Ascent`. First, signs are chosen,
where costs are averaged over groups that have no value yet. Next, the permutation of the group is chosen. Choosing
signs and choosing a permutation are repeated until no step gains.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from regauge.alignment.engine.ascent import ROUNDING, SLACK
from regauge.alignment.streamed.plan import WorkingSet
from regauge.alignment.streamed.source import Source
from regauge.core.act import Site
from regauge.core.assignment import assign_in_place
from regauge.core.closest import Character, Cost, character, closest
from regauge.core.element import Value
from regauge.core.families import CHUNK, Family, add_term, barycenter, dot, row_ranges, unfold
from regauge.core.groups import Group
from regauge.core.products import add_matmul
from regauge.core.symmetry import Symmetry


@dataclass
class BlockedClimb:
    """The ascent over the groups of one working set (tensors that are aligned together), whose tensors are read one
    after the other.

    Attributes:
        source: Both networks. The second network has been transformed by the element of the ascent.
        symmetry: The symmetry. All sizes of its groups must be known.
        one: The working set on which the ascent runs.
        tolerance: A step of a family is taken only if it gains more than this fraction of `sum |a| |b|` over the
            tensors of the family.
    """

    source: Source
    symmetry: Symmetry
    one: WorkingSet
    tolerance: float

    def __post_init__(self) -> None:
        self._families = [*self.one.sign_families(self.symmetry), *self.one.families]
        self._sites: dict[str, list[Site]] = {}
        for family in self._families:
            for name, local in family.own_sites.items():
                self._sites.setdefault(name, []).extend(local)
        self._norms: dict[str, float] = {}

    def run(self, max_sweeps: int, *, is_first: bool) -> bool:
        """Repeat steps until no step raises the objective; return whether the ascent converged within `max_sweeps`."""
        waiting = set(range(len(self._families)))
        if is_first:
            for k, family in enumerate(self._families):
                unknown = {other.root.name for other in self._families[k + 1 :]}
                self._improve(family, unknown, is_first=True)
                waiting -= set() if unknown else {k}
        for _ in range(max_sweeps):
            if not waiting:
                break
            for k in sorted(waiting):
                waiting.discard(k)
                if self._improve(self._families[k]):
                    waiting |= {j for j in range(len(self._families)) if j != k and self._share_tensors(j, k)}
        return not waiting

    def _share_tensors(self, j: int, k: int) -> bool:
        return bool(self._families[j].sites.keys() & self._families[k].sites.keys())

    def _improve(self, family: Family, unknown: Collection[str] = (), *, is_first: bool = False) -> bool:
        """Set a family of groups to its best value if the objective rises enough, or if the family had no value before.

        Return whether the family got a new value.
        """
        given, root = self.source.place, family.root
        if root.is_permuted:
            profits, before = self._profits(family)
            perm = assign_in_place(profits, slack=SLACK * self._rounding(family))
            del profits
            changed, bare = perm != torch.arange(root.size), replace(root, is_permuted=False)
            if not root.signs and not bool(changed.any()):
                return False
            self.source.compose({root.name: Value(perm=perm)})
            if not root.signs and is_first:
                return True
            found = closest(bare, self._cost(bare))
            gain = float(found.objective) - before
        else:
            cost = self._cost(root, unknown)
            if not cost.matrices:
                return False
            found = closest(root, cost)
            changed, gain = torch.zeros(root.size, dtype=torch.bool), float(found.objective - cost.at_identity())
        if found.value.sign is not None:
            changed |= (found.value.sign != 1).any(0)
        share = float(changed.double().mean())
        if share and (is_first or gain > max(self._scale(family), ROUNDING * share * self._rounding(family))):
            self.source.compose({root.name: self.one.whole_value(self.symmetry, root.name, found.value)})
            return True
        self.source.go_to(given)
        return False

    def _profits(self, family: Family) -> tuple[Tensor, float]:
        """Return the profit of each pair of units with its best signs, and the total profit of the identity
        permutation.

        The products of signs ("characters") that multiply the tensors are independent. With the best signs, each
        product of signs therefore contributes the absolute value of the inner products that it multiplies.
        """
        terms: dict[Character, list[tuple[str, Site]]] = {}
        for name, local in family.own_sites.items():
            for site in local:
                terms.setdefault(character(site.placement), []).append((name, site))
        dtype = reduce(torch.promote_types, (self.source.dtype_of(name) for name in family.own_sites))
        total, reached = torch.zeros(0), 0.0
        for key in sorted(terms, key=lambda key: not any(key)):
            is_free, is_new = not any(key), not len(total)
            own = total if is_free and not is_new else torch.zeros(family.root.size, family.root.size, dtype=dtype)
            before = own.diagonal().double()
            for name, site in terms[key]:
                self._add_products(own, name, site)
            reached += float((own.diagonal().double() - before).sum())
            own = own if is_free else own.abs_()
            total = own if is_new or own is total else total.add_(own)
        return total, reached

    def _add_products(self, total: Tensor, name: str, site: Site) -> None:
        """Compute the inner products of all pairs of units along an axis of a tensor, and add them to the profits, in
        chunks of units.
        """
        step = max(1, CHUNK // (4 * len(total)))
        for x, y in self._pairs(name):
            left, right = unfold(x, site), unfold(y, site).to(total.dtype)
            for first in range(0, len(total), step):
                add_matmul(total[first : first + step], left[first : first + step].to(total.dtype), right.mT)

    def _cost(self, group: Group, unknown: Collection[str] = ()) -> Cost:
        """Return the cost of a group whose units are not permuted, averaged over the values of unknown groups."""
        cost = Cost({})
        for name, local in self._sites.items():
            own = [replace(site, group=group) for site in local if site.group.name == group.name]
            if own:
                cost += self._cost_of(name, own, [site for site in local if site.group.name in unknown])
        return cost

    def _cost_of(self, name: str, own: Sequence[Site], hidden: Sequence[Site]) -> Cost:
        matrices: dict[Character, Tensor] = {}
        for pair in self._pairs(name):
            x, y = (barycenter(tensor, hidden) for tensor in pair)
            for site in own:
                if x is not None and y is not None:
                    add_term(matrices, [], site, x, y)
        return Cost(matrices)

    def _pairs(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tensors with a name from both networks, in chunks if no group acts on the first axis."""
        squares = torch.zeros(2, dtype=torch.float64)
        for rows in row_ranges(self.symmetry, name):
            x, y = self.source.pair(name, rows)
            squares += torch.tensor([dot(x, x), dot(y, y)], dtype=torch.float64)
            yield x, y
        self._norms[name] = float(squares.prod().sqrt())

    def _scale(self, family: Family) -> float:
        return self.tolerance * sum(self._norms[name] for name in family.own_sites)

    def _rounding(self, family: Family) -> float:
        eps = {name: torch.finfo(self.source.dtype_of(name)).eps for name in family.own_sites}
        return sum(self._norms[name] * eps[name] for name in family.own_sites)
