"""Coordinate ascent for many pairs of networks at once, over the families of one symmetry.

The objective, its steps and their order are those of `Ascent`, pair by pair; what differs is the bookkeeping.
Tensors stay where they are: for one family the second networks are seen as all *other* families have moved them,
so that the closest value of a group is absolute and a tensor on which only one family acts enters its cost
once and is never moved. Every pair has its own order of families and its own dirty flags, and a step works on
the pairs that need it; pairs that have converged cost nothing.

Families in which something is nested, which rotate, or which act along two axes of one tensor take steps relative to
where they are instead.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from regauge.align.ascent.links import Link
from regauge.align.ascent.places import Family, Tensors, barycentre, coupled_tensors, inner_products, shift_cost, unfold
from regauge.core import act as _act
from regauge.core import element as _element
from regauge.core.act import Site
from regauge.core.assignment import assign_many
from regauge.core.closest import Character, Closest, Cost, ShiftCost, character, closest, profits, with_order
from regauge.core.element import Element, Value, map_value

ROUNDING = 16
"""A step that moves every unit must gain this many roundings of the objective's scale, others less in proportion."""
DAMPING = (0.1, 0.3, 1.0, 3.0)
"""How strongly a step is held back when a group acts on two axes of one tensor and the full step fails."""

Solve = Callable[[Family, Tensors, Tensors], tuple[Element, Tensor]]
"""The best element of one family for each pair, and what it gains over the identity."""


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


@dataclass
class _State:
    """What is known of the cost of a root."""

    terms: list[_Term]
    sums: dict[Character, Tensor] = field(default_factory=dict)
    potentials: Tensor | None = None


class BatchAscent:
    """One climb for each pair. All tensors have one leading axis of pairs.

    Args:
        families: What is chosen; their sites are relative to the tensors without their leading axis.
        a: First networks.
        b: Second networks.
        solve: Solves a family in which something is nested.
        start: Where to begin, a batch of elements; the identity unless given.
        tolerance: A step must gain more than this share of `sum |a| |b|` of its pair.

    Attributes:
        gained: What all steps gained so far, float64 `[pairs]`.
        rest: What tensors contribute for which nothing is chosen, float64 `[pairs]`.
    """

    def __init__(
        self,
        families: Sequence[Family],
        a: Tensors,
        b: Tensors,
        solve: Solve,
        *,
        start: Element | None = None,
        tolerance: float = 1e-9,
    ) -> None:
        self.families, self._a, self._b, self._solve = list(families), dict(a), dict(b), solve
        self.pairs = len(next(iter(b.values())))
        groups = {group.name: group for family in families for group in family.fixed}
        groups |= {group.name: group for family in families for group in family.members}
        self._groups = tuple(groups.values())
        blank = _element.identity(self._groups, (self.pairs,))
        given = blank if start is None else start
        # Positive factors stay at one and are left out.
        self._values = {n: map_value(replace(given[n], scale=None), lambda t: t.contiguous().clone()) for n in blank}
        self._norms = {
            name: torch.linalg.vector_norm(a[name].flatten(1), dim=1).double()
            * torch.linalg.vector_norm(b[name].flatten(1), dim=1).double()
            for name in a
        }
        self._scale = sum(self._norms.values(), torch.zeros(self.pairs, dtype=torch.float64))
        self._tolerance = tolerance
        self._eps = max(torch.finfo(t.dtype).eps for t in a.values()) if a else 0.0
        self._sites = self._member_sites()
        self._coupled = [coupled_tensors(family) for family in self.families]
        self._neighbors = [
            [k for k, other in enumerate(self.families) if other is not one and other.sites.keys() & one.sites.keys()]
            for one in self.families
        ]
        self._states = [self._state(k) if self._is_absolute(k) else None for k in range(len(self.families))]
        self._energies: dict[tuple[str, frozenset[tuple[str, int]]], Tensor] = {}
        self._order = torch.arange(len(self.families)).expand(self.pairs, -1).clone()
        self._dirty = torch.ones(self.pairs, len(self.families), dtype=torch.bool)
        self.rest = torch.zeros(self.pairs, dtype=torch.float64)
        for name in a.keys() - self._sites.keys():
            self.rest += dots(a[name], b[name])
        self.gained = torch.zeros(self.pairs, dtype=torch.float64)

    # --- what is public ----------------------------------------------------------------------------------------

    @property
    def element(self) -> Element:
        """Where every pair is; groups outside the families are not in it."""
        return Element(self._values, (self.pairs,))

    def sweep(self, rows: Tensor) -> Tensor:
        """Improve every family of these pairs once whose neighbors moved; which of them moved, bool `[rows]`."""
        before = self.gained[rows]
        for step in range(len(self.families)):
            family = self._order[rows, step]
            for k in sorted(set(family.tolist())):
                here = rows[(family == k) & self._dirty[rows, k]]
                if len(here):
                    self._dirty[here, k] = False
                    (self._improve if self._is_absolute(k) else self._improve_relatively)(k, here)
        return self.gained[rows] > before

    def start_from_barycentre(self) -> None:
        """Choose every family once, each pair its best anchored first, with unknown ones at their barycentre."""
        order = torch.empty_like(self._order)
        pending = [(torch.arange(self.pairs), tuple(range(len(self.families))))]
        while pending:
            rows, unknown = pending.pop()
            if not unknown:
                continue
            scores = torch.stack([self._anchored(k, unknown)[rows] for k in unknown])
            best = torch.from_numpy(np.argmax(scores.numpy(), axis=0))  # The first of equals, as for single pairs.
            for position in sorted(set(best.tolist())):
                here, k = rows[best == position], unknown[position]
                self._choose(k, here, [other for other in unknown if other != k])
                order[here, len(self.families) - len(unknown)] = k
                pending.append((here, tuple(other for other in unknown if other != k)))
        self._order = order

    def objectives(self, rows: Tensor | None = None) -> Tensor:
        """The objective, summed anew from tensors that are moved by the current element, float64 `[rows]`."""
        return self.objectives_of(self.moved(rows), rows) + _at(self.rest, rows)

    def initial(self) -> Tensor:
        """The objective of the identity, float64 `[pairs]`."""
        return self.objectives_of({name: self._b[name] for name in self._sites}) + self.rest

    def moved(self, rows: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors of the second networks that anything is chosen for, moved by the current element."""
        return self.moved_by(self._sites, rows)

    def objectives_of(self, moved: Tensors, rows: Tensor | None = None) -> Tensor:
        """`<a, moved> - (|moved|^2 - |b|^2) / 2` over the tensors in `moved`; only shifts change the second part."""
        total = torch.zeros(self.pairs if rows is None else len(rows), dtype=torch.float64)
        for name, y in moved.items():
            total += dots(_at(self._a[name], rows), y)
            if any(any(site.placement.shift) for _, site in self._sites[name]):
                z = _at(self._b[name], rows)
                total -= (dots(y, y) - dots(z, z)) / 2
        return total

    def moved_by(
        self, sites: Mapping[str, Sequence[tuple[int, Site]]], rows: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Tensors of the second networks as the current values move them at the given places alone."""
        element = self._element_at({site.group.name for local in sites.values() for _, site in local}, rows)
        result = {}
        for name, local in sites.items():
            own = [site for _, site in local]
            tensor = _at(self._b[name], rows)
            moved = _act.act(self._groups, {name: own}, element, {name: tensor}, {name: tensor.ndim - 1})
            result[name] = moved[name]
        return result

    # --- families of units in which nothing is nested ---------------------------------------------------------

    def _is_absolute(self, k: int) -> bool:
        return not self.families[k].is_nested and not self._coupled[k] and self.families[k].root.matrix == "none"

    def _improve(self, k: int, rows: Tensor) -> None:
        cost = self._cost(k, rows, ())
        current = self._value(k, rows)
        found = self._closest(k, cost, rows, current)
        gain = found.objective - cost.at(current)
        changed = _changed_share(current, found.value)
        better = gain > self._scale[rows] * (ROUNDING * self._eps * changed).clamp(min=self._tolerance)
        if not bool(better.any()):
            return
        if bool(better.all()):
            self._write(k, rows, found.value)
            self.gained[rows] += gain
            return
        self._write(k, rows[better], map_value(found.value, lambda t: t[better]))
        self.gained[rows[better]] += gain[better]

    def _closest(self, k: int, cost: Cost, rows: Tensor, current: Value) -> Closest:
        group, state = self.families[k].root, self._states[k]
        assert state is not None
        if not group.is_permuted:
            return closest(group, cost)
        profit = profits(group, cost)
        if state.potentials is None:
            state.potentials = profit.new_zeros(self.pairs, group.size)
        slack = self._scale[rows] * max(self._tolerance, 4 * self._eps)
        solved = assign_many(profit, _at(state.potentials, rows), current=current.perm, slack=slack)
        _put(state.potentials, rows, solved.potentials)
        return with_order(group, cost, solved.columns)

    def _cost(self, k: int, rows: Tensor, unknown: Sequence[int]) -> Cost:
        """The cost of a root for some pairs, with averages over `unknown` families."""
        group, state = self.families[k].root, self._states[k]
        assert state is not None
        every = None if len(rows) == self.pairs else rows
        extra: dict[Character, Tensor] = {}
        shifts = []
        for term in state.terms:
            key = character(term.site.placement)
            hidden = [site for other, site in term.others if other in unknown]
            if term.is_kept and not hidden:
                self._keep(state, term, rows)
                if term.shift is not None:
                    s = term.shift
                    shifts.append(replace(s, target=_at(s.target, every), source=_at(s.source, every)))
                continue
            known = [(other, site) for other, site in term.others if other not in unknown]
            b = self.moved_by({term.name: known}, every)[term.name] if known else _at(self._b[term.name], every)
            x, y = barycentre(_at(self._a[term.name], every), hidden, 1), barycentre(b, hidden, 1)
            if x is None or y is None:
                continue
            left, right = unfold(x, term.site, 1), unfold(y, term.site, 1)
            product = inner_products(group, left, right)
            extra[key] = extra[key] + product if key in extra else product
            shift = shift_cost(term.site, left, right)
            if shift is not None:
                shifts.append(shift)
        matrices = {key: _at(total, every) for key, total in state.sums.items()}
        for key, product in extra.items():
            matrices[key] = matrices[key] + product if key in matrices else product
        if not matrices:
            columns = group.size if group.is_permuted or group.matrix != "none" else 1
            key = character(state.terms[0].site.placement)
            matrices = {key: torch.zeros(len(rows), group.size, columns, dtype=torch.float64)}
        return Cost(matrices, tuple(shifts))

    def _keep(self, state: _State, term: _Term, rows: Tensor) -> None:
        """Bring a kept term up to date; it is part of the sums from then on."""
        key, group = character(term.site.placement), term.site.group
        if term.link is None and term.is_present:
            return
        if key not in state.sums:
            columns = group.size if group.is_permuted or group.matrix != "none" else 1
            state.sums[key] = self._a[term.name].new_zeros(self.pairs, group.size, columns)
        if term.link is not None:
            term.link.update(state.sums[key], rows, self._values[term.link.group.name])
            return
        left, right = unfold(self._a[term.name], term.site, 1), unfold(self._b[term.name], term.site, 1)
        state.sums[key] += inner_products(group, left, right)
        term.shift = shift_cost(term.site, left, right)
        term.is_present = True

    # --- families that move relative to where they are ------------------------------------------------------------

    def _improve_relatively(self, k: int, rows: Tensor) -> None:
        family = self.families[k]
        sites = {name: self._sites[name] for name in family.sites}
        a = {name: _at(self._a[name], rows) for name in family.sites}
        b = self.moved_by(sites, rows)
        least = self._scale[rows] * max(self._tolerance, ROUNDING * self._eps)
        before = self.objectives_of(b, rows)
        step, promised = self._solve(family, a, b)
        is_open = promised > least
        if not bool(is_open.any()):
            return
        is_open = is_open & ~self._accepted(k, rows, is_open, step, b, before, least)
        if not self._coupled[k] or not bool(is_open.any()):
            return
        cost = _relative_cost(family, a, b)
        for damping in DAMPING:
            held = closest(family.root, _held_back(cost, damping))
            step = Element({family.root.name: held.value}, (len(rows),))
            is_open = is_open & ~self._accepted(k, rows, is_open, step, b, before, least)
            if not bool(is_open.any()):
                return

    def _accepted(
        self, k: int, rows: Tensor, mask: Tensor, step: Element, b: Tensors, before: Tensor, least: Tensor
    ) -> Tensor:
        """Take a step where the mask is true and exact sums say that it gains; where it was taken."""
        own = self._own_sites(k)
        relative = self._whole(k, step)
        ndims = {name: b[name].ndim - 1 for name in own}
        moved = _act.act(self._groups, own, relative, {name: b[name] for name in own}, ndims)
        gain = self.objectives_of({**b, **moved}, rows) - before
        better = mask & (gain > least)
        if bool(better.any()):
            self._compose(k, rows[better], Element(_selected(relative, better), (int(better.sum()),)))
            self.gained[rows[better]] += gain[better]
            if self._coupled[k]:
                self._dirty[rows[better], k] = True
        return better

    def _compose(self, k: int, rows: Tensor, relative: Element) -> None:
        names = {group.name for group in self._groups}
        moved = _element.compose(self._groups, relative, self._element_at(names, rows))
        for group in self.families[k].members:
            self._write_group(group.name, rows, moved[group.name])
        self._soil(k, rows)

    def _whole(self, k: int, step: Element) -> Element:
        """An element of all groups that is a family's step and nothing else."""
        whole = _element.identity(self._groups, step.batch)
        for group in self.families[k].members:
            if group.name in step:
                chosen = step[group.name]
                fields = {f: t for f in ("perm", "sign", "shift", "matrix") if (t := getattr(chosen, f)) is not None}
                whole = whole.replace(group.name, replace(whole[group.name], **fields))
        return whole

    # --- the barycentre ------------------------------------------------------------------------------------------

    def _choose(self, k: int, rows: Tensor, unknown: Sequence[int]) -> None:
        """Set a family to what is best while others are unknown, whatever the objective says."""
        family = self.families[k]
        hidden = {name: self._hidden(k, name, unknown) for name in family.sites}
        if self._is_absolute(k):
            found = self._closest(k, self._cost(k, rows, unknown), rows, self._value(k, rows))
            self._write(k, rows, found.value)
        else:
            self._choose_relatively(k, rows, hidden)
        if not any(hidden.values()) and not self._coupled[k]:
            self._dirty[rows, k] = False

    def _choose_relatively(self, k: int, rows: Tensor, hidden: Mapping[str, list[Site]]) -> None:
        family, root = self.families[k], self.families[k].root
        b = self.moved_by({name: self._sites[name] for name in family.sites}, rows)
        left, right = {}, {}
        if family.is_nested:
            for name in family.sites:
                x, y = barycentre(_at(self._a[name], rows), hidden[name], 1), barycentre(b[name], hidden[name], 1)
                if x is not None and y is not None:
                    left[name], right[name] = x, y
            if any(s.group.name == root.name for name in left for s in family.sites[name]):
                step, _ = self._solve(replace(family, sites={n: family.sites[n] for n in left}), left, right)
                self._compose(k, rows, self._whole(k, step))
            return
        matrices: dict[Character, Tensor] = {}
        shifts: list[ShiftCost] = []
        for name, local in family.sites.items():
            for site in local:
                twice = [other for other in local if other.placement.axis != site.placement.axis]
                x = barycentre(_at(self._a[name], rows), [*hidden[name], *twice], 1)
                y = barycentre(b[name], [*hidden[name], *twice], 1)
                if x is not None and y is not None:
                    _add_term(matrices, shifts, root, site, x, y)
        if matrices:
            found = closest(root, Cost(matrices, tuple(shifts)))
            self._compose(k, rows, self._whole(k, Element({root.name: found.value}, (len(rows),))))

    def _hidden(self, k: int, name: str, unknown: Iterable[int]) -> list[Site]:
        """Sites of unknown families on a tensor of family k."""
        own = {group.name for group in (*self.families[k].members, *self.families[k].fixed)}
        result = []
        for other in unknown:
            if other != k:
                fixed = {group.name for group in self.families[other].fixed}
                local = self.families[other].sites.get(name, ())
                result += [site for site in local if site.group.name not in own | fixed]
        return result

    def _anchored(self, k: int, unknown: Sequence[int]) -> Tensor:
        """The share of a family's tensors that unknown families cannot change, `[pairs]`."""
        known, total = torch.zeros_like(self._scale), torch.zeros_like(self._scale)
        for name in self.families[k].sites:
            total += self._norms[name]
            hidden = self._hidden(k, name, unknown)
            key = (name, frozenset((site.group.name, site.placement.axis) for site in hidden))
            if not hidden:
                self._energies[key] = self._norms[name]
            elif key not in self._energies:
                x, y = barycentre(self._a[name], hidden, 1), barycentre(self._b[name], hidden, 1)
                if x is None or y is None:
                    self._energies[key] = torch.zeros_like(self._scale)
                else:
                    self._energies[key] = (x.flatten(1).norm(dim=1) * y.flatten(1).norm(dim=1)).double()
            known += self._energies[key]
        return known / torch.where(total == 0, 1.0, total)

    # --- bookkeeping ---------------------------------------------------------------------------------------------

    def _member_sites(self) -> dict[str, list[tuple[int, Site]]]:
        """For each tensor the number of the family and the site of every group that is chosen."""
        result: dict[str, list[tuple[int, Site]]] = {}
        for k, family in enumerate(self.families):
            names = {group.name for group in family.members}
            for name, local in family.sites.items():
                result.setdefault(name, []).extend((k, site) for site in local if site.group.name in names)
        return result

    def _own_sites(self, k: int) -> dict[str, list[Site]]:
        return {name: [s for o, s in self._sites[name] if o == k] for name in self.families[k].sites}

    def _state(self, k: int) -> _State:
        terms = []
        for name, local in self._own_sites(k).items():
            others = [(o, site) for o, site in self._sites[name] if o != k]
            for site in local:
                link = None
                if len(others) == 1 and self._is_absolute(others[0][0]):
                    link = Link.between(site, others[0][1], self._a[name], self._b[name])
                is_kept = not others or (link is not None)
                terms.append(_Term(name, site, others, link, is_kept))
        return _State(terms)

    def _value(self, k: int, rows: Tensor) -> Value:
        return self._value_at(self.families[k].root.name, None if len(rows) == self.pairs else rows)

    def _value_at(self, name: str, rows: Tensor | None) -> Value:
        return self._values[name] if rows is None else map_value(self._values[name], lambda t: t[rows])

    def _element_at(self, names: Iterable[str], rows: Tensor | None) -> Element:
        count = self.pairs if rows is None else len(rows)
        return Element({name: self._value_at(name, rows) for name in names}, (count,))

    def _write(self, k: int, rows: Tensor, value: Value) -> None:
        self._write_group(self.families[k].root.name, rows, value)
        self._soil(k, rows)

    def _write_group(self, name: str, rows: Tensor, value: Value) -> None:
        for part in ("perm", "sign", "shift", "matrix"):
            new = getattr(value, part)
            if new is not None:
                _put(getattr(self._values[name], part), rows, new)

    def _soil(self, k: int, rows: Tensor) -> None:
        for neighbor in self._neighbors[k]:
            self._dirty[rows, neighbor] = True


def _at(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None or len(rows) == len(tensor) else tensor[rows]


def _put(into: Tensor, rows: Tensor, new: Tensor) -> None:
    if len(rows) == len(into):
        into.copy_(new)
    else:
        into[rows] = new


def _selected(element: Element, mask: Tensor) -> dict[str, Value]:
    return {name: map_value(value, lambda t: t[mask]) for name, value in element.items()}


def dots(x: Tensor, y: Tensor) -> Tensor:
    """Inner products of each pair: rows in their own precision, the sum over rows in float64."""
    rows = 1 if x.ndim < 3 else 2
    products: Tensor = torch.linalg.vecdot(x.flatten(rows), y.flatten(rows))
    return products.flatten(1).sum(1, dtype=torch.float64) if rows == 2 else products.double()


def _changed_share(old: Value, new: Value) -> Tensor:
    """The share of units that a step moves."""
    changed: Tensor | None = None
    for part in ("perm", "sign", "shift"):
        x, y = getattr(old, part), getattr(new, part)
        if y is not None:
            differs = x != y if part == "perm" else (x != y).any(-2)
            changed = differs if changed is None else changed | differs
    assert changed is not None
    return changed.double().mean(-1)


def _relative_cost(family: Family, a: Tensors, b: Tensors) -> Cost:
    matrices: dict[Character, Tensor] = {}
    shifts: list[ShiftCost] = []
    for name, local in family.sites.items():
        for site in local:
            _add_term(matrices, shifts, family.root, site, a[name], b[name])
    return Cost(matrices, tuple(shifts))


def _add_term(
    matrices: dict[Character, Tensor], shifts: list[ShiftCost], root: object, site: Site, x: Tensor, y: Tensor
) -> None:
    left, right = unfold(x, site, 1), unfold(y, site, 1)
    key, product = character(site.placement), inner_products(site.group, left, right).double()
    matrices[key] = matrices[key] + product if key in matrices else product
    shift = shift_cost(site, left, right)
    if shift is not None:
        shifts.append(shift)


def _held_back(cost: Cost, damping: float) -> Cost:
    """The cost with a bonus for the identity of each pair: steps become smaller and the linear model better."""
    held: dict[Character, Tensor] = {}
    for key, matrix in cost.matrices.items():
        bonus = damping * matrix.abs().amax(-1).mean(-1)[..., None, None]
        eye = torch.ones(1) if matrix.shape[-1] == 1 else torch.eye(matrix.shape[-1])
        held[key] = matrix + bonus * eye.to(matrix)
    return Cost(held, cost.shifts)
