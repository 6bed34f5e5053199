"""Coordinate ascent over the groups of a symmetry, for many pairs of networks at once.

All alignment methods use the coordinate ascent.

The inputs are two dictionaries of tensors, and a symmetry that acts on the second dictionary. The ascent maximizes

    J(g) = <a, g b> - (|g b|^2 - |b|^2) / 2

over one family of groups at a time. Each step computes an exact optimum by `closest`. Permutations, signs and rotations
do not change norms. For permutations, signs and rotations, J is therefore the inner product of the two networks.
Half-period shifts do change norms. In general, J is minus half of the squared distance, up to a constant. Methods of
matching differ only in the tensors that they compare: weights, activations, or means and standard deviations.

All tensors have one leading pair axis, whose length is one for a single pair. A family is a group, together with all
groups that are nested in it. Every pair of networks has its own order of families and its own list of families to
search. A step skips pairs of networks that have converged. The best element of a family is computed from second
networks on which only the elements of all *other* families have acted. Therefore the best element does not depend on
the current element of the family. Families with nested groups are an exception, because their steps are relative to
their current element.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from regauge.alignment.engine.family_costs import FamilyCost
from regauge.alignment.engine.joint_signs import SignPair, find_sign_pairs
from regauge.alignment.engine.paired_networks import PairedNetworks, act_on, at, norms
from regauge.core.act import Site
from regauge.core.closest import Character, Cost, unit_signs
from regauge.core.element import Element, Value
from regauge.core.families import Family, Tensors, barycenter, complete, coupled_tensors

if TYPE_CHECKING:
    from regauge.alignment.engine.searches import Launch

ROUNDING = 16
"""The smallest gain of a step that changes every unit, as a multiple of the objective's rounding error.

A step that changes fewer units needs proportionally less gain.
"""
SLACK = 4
"""A permutation is replaced only if the objective rises by more than this multiple of its rounding error."""
DAMPING = (0.1, 0.3, 1.0, 3.0)
"""The damping strengths that are tried if a full step of a group on two axes of one tensor lowers the objective."""

Solve = Callable[[Family, Tensors, Tensors], tuple[Element, Tensor]]
"""A function that returns the best element of one family for each pair, and the gain of this element over the
identity."""
Rows = Int64[Tensor, " row"]
T = TypeVar("T")


@dataclass(frozen=True)
class Neighborhoods:
    """The families (groups with the groups nested in them), and for each family the other families that influence its
    best element.

    Attributes:
        families: The families to optimize.
        coupled: For each family, whether it acts on two axes of one tensor.
        neighbors: For each family, the families whose best element depends on the element of this family.
        sign_pairs: Pairs of families whose signs are optimized jointly at the end.
        others: For each tensor of each family, the axes on which other families act, by the index of the other family.
        near: For each family, the indices of the families that act on the same tensors.
    """

    families: tuple[Family, ...]
    coupled: tuple[bool, ...]
    neighbors: tuple[tuple[int, ...], ...]
    sign_pairs: tuple[SignPair, ...]
    others: tuple[Mapping[str, Mapping[int, Sequence[Site]]], ...]
    near: tuple[frozenset[int], ...]

    @classmethod
    def of(cls, families: Sequence[Family]) -> "Neighborhoods":
        """Find which families of groups influence each other's best elements.

        Axes on which groups act are numbered without the leading axis of the tensors.
        """
        coupled = tuple(bool(coupled_tensors(family)) for family in families)
        neighbors = tuple(
            tuple(
                k
                for k, other in enumerate(families)
                if (coupled[k] if other is one else bool(other.sites.keys() & one.sites.keys()))
            )
            for one in families
        )
        others = tuple(_other_sites(families, k) for k in range(len(families)))
        has_several = sum(one.root.signs > 0 for one in families) > 1  # Else no two families share signs.
        sign_pairs = find_sign_pairs(families) if has_several else ()
        near = tuple(frozenset(number for local in own.values() for number in local) for own in others)
        return cls(tuple(families), coupled, neighbors, tuple(sign_pairs), others, near)


class Ascent:
    """One coordinate ascent for each pair of networks. All tensors have one leading axis of pairs.

    Args:
        around: The families to optimize, and the dependencies between them.
        a: The tensors of the first networks.
        b: The tensors of the second networks.
        solve: A function that optimizes a family with nested groups.
        start: A batch of initial elements without positive scales. Default: the identity.
        tolerance: A step is taken only if it gains more than this fraction of the pair's `sum |a| |b|`.
        searches: The largest number of families that are searched at the same time because they do not depend on one
            another.

    Attributes:
        networks: The networks, and the current element of each pair.
        pairs: The number of pairs.
        gained: The total gain of all steps so far.
    """

    def __init__(
        self,
        around: Neighborhoods,
        a: Tensors,
        b: Tensors,
        solve: Solve,
        *,
        start: Element | None = None,
        tolerance: float = 1e-9,
        searches: int = 1,
    ) -> None:
        self._around, self._families, self._solve = around, around.families, solve
        self.networks = PairedNetworks(around.families, a, b, start)
        self.pairs = self.networks.pairs
        self._second_norms = {name: norms(b[name]) for name in a}
        self._norms: dict[str, Tensor] = {}
        self._tolerance, self._searches = tolerance, searches
        self._measure(a)
        self._costs = {
            k: FamilyCost(self.networks, family) for k, family in enumerate(self._families) if not family.is_nested
        }
        self._shares: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self._averages: dict[tuple[str, frozenset[tuple[str, int]]], Tensor] = {}
        # Arrays of NumPy, which indexes small arrays several times as fast as torch.
        self._order = np.tile(np.arange(len(self._families)), (self.pairs, 1))
        self._dirty = np.ones((self.pairs, len(self._families)), dtype=np.bool_)
        self.gained: Float64[Tensor, " pair"] = torch.zeros(self.pairs, dtype=torch.float64)

    def sweep(self, rows: Rows) -> Bool[Tensor, " row"]:
        """For the given pairs of networks, search once the best element of every family whose neighboring families have
        changed.

        Return the pairs that changed.

        Families that do not depend on one another are searched at the same time. Steps are accepted in the order of the
        families, so the result is the same as after a search of one family after another.
        """
        before, numbers = self.gained[rows], rows.numpy()
        waiting: dict[int, Callable[[], None]] = {}

        def accept() -> None:
            for finish in waiting.values():
                finish()
            waiting.clear()

        with self._searching() as start:
            for step in range(len(self._families)):
                family = self._order[numbers, step]
                for k in sorted(set(family.tolist())):
                    if len(waiting) == self._searches or not waiting.keys().isdisjoint({k, *self._around.neighbors[k]}):
                        accept()
                    is_here = (family == k) & self._dirty[numbers, k]
                    if is_here.any():
                        self._dirty[numbers[is_here], k] = False
                        improve = self._improve if k in self._costs else self._improve_nested
                        waiting[k] = improve(k, _chosen(rows, is_here), start)
            accept()
        return self.gained[rows] > before

    def _searching(self) -> AbstractContextManager["Launch"]:
        """Start searches in threads within a `with` block, or run each search immediately."""
        if self._searches == 1 or not self.networks.a:
            return nullcontext(_at_once)
        from regauge.alignment.engine.searches import searching  # matching on a CPU does not need it

        return searching(self._searches, next(iter(self.networks.a.values())).device)

    def climb(self, rows: Rows, max_sweeps: int) -> tuple[Rows, list[Tensor]]:
        """Sweep over all families until no pair of networks changes.

        Return the pairs that changed in the last sweep, and the total gain after each sweep.
        """
        gained: list[Tensor] = []
        while len(rows) and len(gained) < max_sweeps:
            is_moving = self.sweep(rows)
            if self._around.sign_pairs and not bool(is_moving.all()):
                is_moving[~is_moving] = self._join_signs(rows[~is_moving])
            rows = rows[is_moving]
            gained.append(self.gained.clone())
        return rows, gained

    def start_from_barycenter(self, first: Collection[str] = ()) -> None:
        """Choose an initial element for every family, one family after the other.

        Costs are averaged over all elements of each family whose element is not chosen yet.

        The average of a permutation over its group is the uniform doubly stochastic matrix. The average of signs or
        rotations is zero. In each pair of networks, the next family is the family whose cost depends least on families
        without an element. The known part of a cost comes from inputs, outputs and families that already have an
        element. On residual networks, coordinate ascent from the identity would end in poor local optima, because the
        first costs are mostly noise. Rotations are chosen before all other families, from tensors that no other family
        changes; see `first_rotations`.

        Args:
            first: The names of the outermost groups of those families whose elements are chosen before all others. In
                later sweeps, the families in `first` are also optimized before all others.
        """
        rows, numbers = torch.arange(self.pairs), {f.root.name: k for k, f in enumerate(self._families)}
        rotated = [self._families[k].root for k in self._costs if self._families[k].root.matrix == "orthogonal"]
        turned = dict[str, Value]()
        if rotated:
            from regauge.alignment.engine.first_rotations import first_rotations  # few networks need it

            turned = first_rotations(rotated, self.networks.sites, self.networks.a, self.networks.b)
        for name, value in turned.items():
            self._write(numbers[name], rows, value)
        ahead = [k for name, k in numbers.items() if name in first]
        unknown = tuple(k for name, k in numbers.items() if k not in ahead and name not in turned)
        for position, k in enumerate(ahead):
            self._choose(k, rows, (*ahead[position + 1 :], *unknown))
        order = np.empty_like(self._order)
        ahead += [numbers[name] for name in turned]
        order[:, : len(ahead)] = ahead
        pending = [(rows, unknown)]
        while pending:
            rows, unknown = pending.pop()
            if not unknown:
                continue
            best = np.zeros(len(rows), dtype=np.intp)
            if len(unknown) > 1:
                scores = [at(self._anchored(k, unknown), rows).numpy() for k in unknown]
                best = np.argmax(scores, axis=0)  # ties: the first family
            for position in sorted(set(best.tolist())):
                here, k = _chosen(rows, best == position), unknown[position]
                rest = tuple(other for other in unknown if other != k)
                self._choose(k, here, rest)
                order[here.numpy(), len(self._families) - len(unknown)] = k
                pending.append((here, rest))
        self._order = order

    def aim_at(self, a: Tensors) -> None:
        """Replace tensors of the first networks. After the replacement, the ascent continues from the current element
        toward the new tensors.

        Tensors of the first networks that `a` lacks are not changed. Only families that act on replaced tensors are
        searched again, beginning with the potentials (dual variables) of their last search. The total gain in `gained`
        is not reset.
        """
        self.networks.a |= a
        self._measure(a)
        for k, family in enumerate(self._families):
            if family.sites.keys() & a.keys():
                self._dirty[:, k] = True
            if k in self._costs:
                self._costs[k].aim_at(a.keys())

    def objectives(self) -> Float64[Tensor, " pair"]:
        """Return the objective, computed again from the tensors, without the rounding errors of summed gains."""
        return self.networks.objectives(self.networks.second())

    def _measure(self, a: Tensors) -> None:
        self._norms |= {name: norms(tensor) * self._second_norms[name] for name, tensor in a.items()}
        none = torch.zeros(self.pairs, dtype=torch.float64)
        self._scale = sum(self._norms.values(), none)
        # The rounding error of each tensor depends on its own dtype: large float64 tensors, such as responses, add
        # little.
        eps = {name: torch.finfo(self.networks.a[name].dtype).eps for name in self._norms}
        self._rounding = sum((norm * eps[name] for name, norm in self._norms.items()), none)

    def _least(self, rows: Rows, roundings: float | Tensor) -> Float64[Tensor, " row"]:
        """Return the gain that a step must exceed: the tolerance, or the objective's rounding error if it is larger."""
        return torch.maximum(at(self._scale, rows) * self._tolerance, at(self._rounding, rows) * roundings)

    def _improve(self, k: int, rows: Rows, start: "Launch") -> Callable[[], None]:
        """Search the best step of a family. Return a function that applies the step to all pairs of networks whose
        objective rises.
        """
        cost, current, slack = self._costs[k].cost(rows), self._value(k, rows), self._least(rows, SLACK)

        def search() -> tuple[Value, Tensor]:
            found = self._costs[k].closest(cost, rows, current, slack)
            return found.value, found.objective - cost.at(current)

        found = start(search)

        def accept() -> None:
            value, gain = found()
            least = self._least(rows, ROUNDING * _changed_share(current, value))
            if self._around.coupled[k]:
                self._accept_coupled(k, rows, cost, current, value, gain > least)
            else:
                self._accept(k, rows, value, gain, least)

        return accept

    def _accept_coupled(
        self, k: int, rows: Rows, cost: Cost, current: Value, found: Value, is_open: Bool[Tensor, " row"]
    ) -> None:
        """Take a full or a shorter step of a group that acts on two axes of one tensor, if the step raises the exact
        objective. If a group acts on two axes of one tensor, the exact objective is a quadratic function of the group's
        element.

        The cost is the linear model of the objective at the current value. At the maximum of the linear model, the
        exact objective may be lower than before. If a step lowers the exact objective, a shorter step is tried.
        """
        family, least = self._families[k], self._least(rows, ROUNDING * _changed_share(current, found))
        before = self._objectives(family, rows) if bool(is_open.any()) else torch.zeros_like(least)
        for damping in (0.0, *DAMPING):
            if not bool(is_open.any()):
                return
            value = found
            if damping:
                value = self._costs[k].closest(_held_back(cost, current, damping), rows, current, 0 * least).value
            self.networks.write(family.root.name, rows, value)
            gain = torch.where(is_open, self._objectives(family, rows) - before, -torch.inf)
            self.networks.write(family.root.name, rows, current)
            is_open &= ~self._accept(k, rows, value, gain, least)

    def _accept(self, k: int, rows: Rows, value: Value, gain: Tensor, least: Tensor) -> Bool[Tensor, " row"]:
        """Set a family to a new element in all pairs of networks in which the objective rises enough. Return these
        pairs.
        """
        better = gain > least
        if bool(better.all()):
            self._write(k, rows, value)
            self.gained[rows] += gain
        elif bool(better.any()):
            self._write(k, rows[better], value.map(lambda t: t[better]))
            self.gained[rows[better]] += gain[better]
        return better

    def _objectives(self, family: Family, rows: Rows) -> Tensor:
        return self.networks.objectives(self.networks.moved(family.sites, rows), rows)

    def _improve_nested(self, k: int, rows: Rows, start: "Launch") -> Callable[[], None]:
        """Search a step of a family with nested groups. Return a function that applies the step to all pairs of
        networks whose objective rises.
        """
        family = self._families[k]
        a = {name: at(self.networks.a[name], rows) for name in family.sites}
        b = self.networks.moved(family.sites, rows)
        found = start(lambda: self._solve(family, a, b))

        def accept() -> None:
            step, promised = found()
            least = self._least(rows, ROUNDING)
            if not bool((promised > least).any()):
                return
            relative = self._whole(family, step)
            moved = act_on((*family.members, *family.fixed), family.own_sites, relative, b)
            gain = self.networks.objectives(moved, rows) - self.networks.objectives(b, rows)
            better = (promised > least) & (gain > least)
            if bool(better.any()):
                self.networks.compose(family, rows[better], relative.rows(better), moved)
                self.gained[rows[better]] += gain[better]
                self._soil(k, rows[better])

        return accept

    def _join_signs(self, rows: Rows) -> Bool[Tensor, " row"]:
        """Optimize the signs of two families that share an axis jointly.

        Return the pairs of networks whose objective rose.
        """
        before = self.gained[rows]
        for pair in self._around.sign_pairs:
            names = list(pair.sites)
            a, b = {name: at(self.networks.a[name], rows) for name in names}, self.networks.moved(names, rows)
            *signs, gain = pair.closest(a, b)
            better = gain > self._least(rows, ROUNDING)
            if bool(better.any()):
                for k, sign in zip((pair.first, pair.second), signs, strict=True):
                    self._multiply(k, rows[better], sign.movedim(0, 1)[better])
                self.gained[rows[better]] += gain[better]
        return self.gained[rows] > before

    def _multiply(self, k: int, rows: Rows, sign: Tensor) -> None:
        """Multiply the signs of a family's outermost group by further signs."""
        family, current = self._families[k], self.networks.value(self._families[k].root.name, rows)
        if k in self._costs:
            assert current.sign is not None
            self._write(k, rows, replace(current, sign=current.sign * sign))
            return
        step = complete(family, {family.root.name: Value(sign=sign)}, (len(rows),))
        self.networks.compose(family, rows, step, {})
        self._soil(k, rows)

    def _whole(self, family: Family, step: Element) -> Element:
        """Return a step as an element of all groups of the family; groups without a value get the identity."""
        return complete(family, {group.name: step[group.name] for group in family.members}, step.batch)

    def _choose(self, k: int, rows: Rows, unknown: Sequence[int]) -> None:
        """Choose the best element of a family while other families have no element yet, even if the objective
        decreases.
        """
        family = self._families[k]
        hidden = {name: self._hidden(k, name, unknown) for name in family.sites}
        if k in self._costs:
            groups = {group.name for other in unknown for group in self._families[other].members}
            cost, current = self._costs[k].cost(rows, groups | {family.root.name}), self._value(k, rows)
            self._write(k, rows, self._costs[k].closest(cost, rows, current, self._least(rows, SLACK)).value)
        else:
            self._choose_nested(k, rows, hidden)
        if not any(hidden.values()) and not self._around.coupled[k]:
            self._dirty[rows.numpy(), k] = False

    def _choose_nested(self, k: int, rows: Rows, hidden: Mapping[str, Sequence[Site]]) -> None:
        family, left, right = self._families[k], {}, {}
        for name, b in self.networks.moved(family.sites, rows).items():
            x, y = barycenter(at(self.networks.a[name], rows), hidden[name], 1), barycenter(b, hidden[name], 1)
            if x is not None and y is not None:
                left[name], right[name] = x, y
        if any(s.group.name == family.root.name for name in left for s in family.sites[name]):
            step, _ = self._solve(replace(family, sites={n: family.sites[n] for n in left}), left, right)
            self.networks.compose(family, rows, self._whole(family, step), {})
            self._soil(k, rows)

    def _hidden(self, k: int, name: str, unknown: Iterable[int]) -> list[Site]:
        """Return the axes of a tensor of family k on which groups without a chosen element act."""
        others = self._around.others[k].get(name, {})
        return [site for number in unknown if number in others for site in others[number]]

    def _anchored(self, k: int, unknown: Sequence[int]) -> Float64[Tensor, " pair"]:
        """Return how much of a family's tensors, as a fraction, does not depend on other families that have no element
        yet.
        """
        near = tuple(other for other in unknown if other in self._around.near[k])
        if (k, near) not in self._shares:
            known, total = torch.zeros_like(self._scale), torch.zeros_like(self._scale)
            for name in self._families[k].sites:
                total += self._norms[name]
                known += self._known_norms(name, self._hidden(k, name, near))
            self._shares[k, near] = known / torch.where(total == 0, 1.0, total)
        return self._shares[k, near]

    def _known_norms(self, name: str, hidden: Sequence[Site]) -> Float64[Tensor, " pair"]:
        """Return the product of the norms of both networks' tensors after they are averaged over some groups."""
        if not hidden:
            return self._norms[name]
        key = (name, frozenset((site.group.name, site.placement.axis) for site in hidden))
        if key not in self._averages:
            x, y = barycenter(self.networks.a[name], hidden, 1), barycenter(self.networks.b[name], hidden, 1)
            self._averages[key] = torch.zeros_like(self._scale)
            if x is not None and y is not None:
                self._averages[key] = norms(x) * norms(y)
        return self._averages[key]

    def _value(self, k: int, rows: Rows) -> Value:
        value = self.networks.value(self._families[k].root.name, rows)
        return value.map(torch.clone) if self._around.coupled[k] else value

    def _write(self, k: int, rows: Rows, value: Value) -> None:
        self.networks.write(self._families[k].root.name, rows, value)
        self._soil(k, rows)

    def _soil(self, k: int, rows: Rows) -> None:
        numbers = rows.numpy()
        for neighbor in self._around.neighbors[k]:
            self._dirty[numbers, neighbor] = True


def _chosen(rows: Rows, is_chosen: NDArray[np.bool_]) -> Rows:
    return rows if is_chosen.all() else rows[torch.from_numpy(is_chosen)]


def _at_once(work: Callable[[], T]) -> Callable[[], T]:
    found = work()
    return lambda: found


def _changed_share(old: Value, new: Value) -> Float64[Tensor, " pair"]:
    """Return the fraction of units that a step changes. If the group is rotated, all units count as changed."""
    changed: Tensor | None = None
    before = dict(old.items())
    for part, tensor in new.items():
        differs = tensor != before[part]
        if part == "matrix":
            return torch.ones(len(differs), dtype=torch.float64)
        units = differs if part == "perm" else differs.any(-2)
        changed = units if changed is None else changed | units
    assert changed is not None
    return changed.double().mean(-1)


def _held_back(cost: Cost, current: Value, damping: float) -> Cost:
    """Return the cost of a group plus a term that favors its current value, for each pair of networks.

    The additional term makes steps smaller, so the linear model of the objective is more accurate.
    """
    # <g, C> + d <g, g_now>: all elements have the same norm, so the second term is a penalty -d |g - g_now|^2 / 2.
    held: dict[Character, Tensor] = {}
    for key, matrix in cost.matrices.items():
        bonus = damping * matrix.abs().amax(-1).mean(-1)[..., None, None]
        if current.matrix is not None:
            held[key] = matrix + bonus * current.matrix.to(matrix)
            continue
        factor = unit_signs(key, current)
        here = torch.ones(matrix.shape[:-1]) if factor is None else factor
        here = (bonus * here.to(matrix).unsqueeze(-1)).expand(*matrix.shape[:-1], 1)
        if current.perm is None:
            held[key] = matrix + here
        else:
            held[key] = matrix.scatter_add(-1, current.perm.to(matrix.device).unsqueeze(-1), here)
    return Cost(held, cost.shifts)


MAX_SWEEPS = 20
"""The largest number of sweeps in each of the two coordinate ascents."""


def climb_from_two_starts(families: Sequence[Family], a: Tensors, b: Tensors, solve: Solve) -> tuple[Element, Tensor]:
    """Find one element for each problem by two coordinate ascents, from the identity and from averages over all
    elements.

    Args:
        families: The families of groups. The families act on common tensors, so the best value of each family depends
            on all other families.
        a: The first networks, `[problem, ...]`.
        b: The second networks.
        solve: A function that optimizes a family with nested groups while the other families are fixed.

    Returns:
        For each problem, the better result of the two ascents, and its gain over the identity, which is never negative.
    """
    around = Neighborhoods.of(families)
    ends = [Ascent(around, a, b, solve), Ascent(around, a, b, solve)]
    before = ends[0].objectives()
    ends[1].start_from_barycenter()
    for end in ends:
        end.climb(torch.arange(end.pairs), MAX_SWEEPS)
    gains = [end.objectives() - before for end in ends]
    return ends[1].networks.element.where(gains[1] > gains[0], ends[0].networks.element), torch.maximum(*gains)


def _other_sites(families: Sequence[Family], k: int) -> dict[str, dict[int, list[Site]]]:
    """Return where groups of other families act on the tensors of family k, by tensor name and family index."""
    own = {group.name for group in (*families[k].members, *families[k].fixed)}
    result: dict[str, dict[int, list[Site]]] = {}
    for number, other in enumerate(families):
        if number == k:
            continue
        skipped = own | {group.name for group in other.fixed}
        for name in other.sites.keys() & families[k].sites.keys():
            sites = [site for site in other.sites[name] if site.group.name not in skipped]
            if sites:
                result.setdefault(name, {})[number] = sites
    return result
