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
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from regauge.alignment.engine.stack_costs import StackCost, is_absolute
from regauge.alignment.engine.stacks import Stacks, at
from regauge.core import act as _act
from regauge.core import element as _element
from regauge.core.act import Site
from regauge.core.closest import Character, Cost, ShiftCost, closest
from regauge.core.element import Element, Value
from regauge.core.families import Family, Tensors, add_term, barycentre, coupled_tensors, group_cost

ROUNDING = 16
"""A step that moves every unit must gain this many roundings of the objective's scale, others less in proportion."""
DAMPING = (0.1, 0.3, 1.0, 3.0)
"""How strongly a step is held back when a group acts on two axes of one tensor and the full step fails."""

Solve = Callable[[Family, Tensors, Tensors], tuple[Element, Tensor]]
"""The best element of one family for each pair, and what it gains over the identity."""


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
        stacks: The networks, and where every pair is.
        pairs: Their number.
        gained: What all steps gained so far, float64 `[pair]`.
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
        self.stacks, self._families, self._solve = Stacks(families, a, b, start), list(families), solve
        self.pairs = self.stacks.pairs
        self._norms = {
            name: torch.linalg.vector_norm(a[name].flatten(1), dim=1).double()
            * torch.linalg.vector_norm(b[name].flatten(1), dim=1).double()
            for name in a
        }
        self._scale = sum(self._norms.values(), torch.zeros(self.pairs, dtype=torch.float64))
        self._tolerance = tolerance
        self._eps = max(torch.finfo(t.dtype).eps for t in a.values()) if a else 0.0
        self._coupled = [coupled_tensors(family) for family in self._families]
        self._neighbors = [
            [k for k, other in enumerate(self._families) if other is not one and other.sites.keys() & one.sites.keys()]
            for one in self._families
        ]
        self._costs = {k: StackCost(self.stacks, k) for k, family in enumerate(self._families) if is_absolute(family)}
        self._energies: dict[tuple[str, frozenset[tuple[str, int]]], Tensor] = {}
        self._order = torch.arange(len(self._families)).expand(self.pairs, -1).clone()
        self._dirty = torch.ones(self.pairs, len(self._families), dtype=torch.bool)
        self.gained = torch.zeros(self.pairs, dtype=torch.float64)

    # --- what is public ----------------------------------------------------------------------------------------

    def sweep(self, rows: Tensor) -> Tensor:
        """Improve every family of these pairs once whose neighbors moved; which of them moved, bool `[rows]`."""
        before = self.gained[rows]
        for step in range(len(self._families)):
            family = self._order[rows, step]
            for k in sorted(set(family.tolist())):
                here = rows[(family == k) & self._dirty[rows, k]]
                if len(here):
                    self._dirty[here, k] = False
                    (self._improve if k in self._costs else self._improve_relatively)(k, here)
        return self.gained[rows] > before

    def start_from_barycentre(self) -> None:
        """Choose every family once, each pair its best anchored first, with unknown ones at their barycentre."""
        order = torch.empty_like(self._order)
        pending = [(torch.arange(self.pairs), tuple(range(len(self._families))))]
        while pending:
            rows, unknown = pending.pop()
            if not unknown:
                continue
            scores = torch.stack([self._anchored(k, unknown)[rows] for k in unknown])
            best = torch.from_numpy(np.argmax(scores.numpy(), axis=0))  # The first of equals, as for single pairs.
            for position in sorted(set(best.tolist())):
                here, k = rows[best == position], unknown[position]
                self._choose(k, here, [other for other in unknown if other != k])
                order[here, len(self._families) - len(unknown)] = k
                pending.append((here, tuple(other for other in unknown if other != k)))
        self._order = order

    # --- families of units in which nothing is nested ---------------------------------------------------------

    def _improve(self, k: int, rows: Tensor) -> None:
        cost, current = self._costs[k].cost(rows), self._value(k, rows)
        found = self._costs[k].closest(cost, rows, current, self._slack(rows))
        gain = found.objective - cost.at(current)
        changed = _changed_share(current, found.value)
        better = gain > self._scale[rows] * (ROUNDING * self._eps * changed).clamp(min=self._tolerance)
        if not bool(better.any()):
            return
        if bool(better.all()):
            self._write(k, rows, found.value)
            self.gained[rows] += gain
            return
        self._write(k, rows[better], found.value.map(lambda t: t[better]))
        self.gained[rows[better]] += gain[better]

    # --- families that move relative to where they are ------------------------------------------------------------

    def _improve_relatively(self, k: int, rows: Tensor) -> None:
        family = self._families[k]
        sites = {name: self.stacks.sites[name] for name in family.sites}
        a = {name: at(self.stacks.a[name], rows) for name in family.sites}
        b = self.stacks.moved_by(sites, rows)
        least = self._scale[rows] * max(self._tolerance, ROUNDING * self._eps)
        before = self.stacks.objectives_of(b, rows)
        step, promised = self._solve(family, a, b)
        is_open = promised > least
        if not bool(is_open.any()):
            return
        is_open = is_open & ~self._accepted(k, rows, is_open, step, b, before, least)
        if not self._coupled[k] or not bool(is_open.any()):
            return
        cost = group_cost(family.root, family.sites, a, b, 1)
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
        own = self.stacks.own_sites(k)
        relative = self._whole(k, step)
        ndims = {name: b[name].ndim - 1 for name in own}
        moved = _act.act(self.stacks.groups, own, relative, {name: b[name] for name in own}, ndims)
        gain = self.stacks.objectives_of({**b, **moved}, rows) - before
        better = mask & (gain > least)
        if bool(better.any()):
            self._compose(k, rows[better], relative.rows(better))
            self.gained[rows[better]] += gain[better]
            if self._coupled[k]:
                self._dirty[rows[better], k] = True
        return better

    def _whole(self, k: int, step: Element) -> Element:
        """An element of all groups that is a family's step and nothing else."""
        whole = _element.identity(self.stacks.groups, step.batch)
        for group in self._families[k].members:
            if group.name in step:
                whole = whole.replace(group.name, step[group.name].fill(whole[group.name]))
        return whole

    # --- the barycentre ------------------------------------------------------------------------------------------

    def _choose(self, k: int, rows: Tensor, unknown: Sequence[int]) -> None:
        """Set a family to what is best while others are unknown, whatever the objective says."""
        family = self._families[k]
        hidden = {name: self._hidden(k, name, unknown) for name in family.sites}
        if k in self._costs:
            cost = self._costs[k].cost(rows, unknown)
            found = self._costs[k].closest(cost, rows, self._value(k, rows), self._slack(rows))
            self._write(k, rows, found.value)
        else:
            self._choose_relatively(k, rows, hidden)
        if not any(hidden.values()) and not self._coupled[k]:
            self._dirty[rows, k] = False

    def _choose_relatively(self, k: int, rows: Tensor, hidden: Mapping[str, list[Site]]) -> None:
        family, root = self._families[k], self._families[k].root
        b = self.stacks.moved_by({name: self.stacks.sites[name] for name in family.sites}, rows)
        left, right = {}, {}
        if family.is_nested:
            for name in family.sites:
                x, y = barycentre(at(self.stacks.a[name], rows), hidden[name], 1), barycentre(b[name], hidden[name], 1)
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
                x = barycentre(at(self.stacks.a[name], rows), [*hidden[name], *twice], 1)
                y = barycentre(b[name], [*hidden[name], *twice], 1)
                if x is not None and y is not None:
                    add_term(matrices, shifts, site, x, y, 1)
        if matrices:
            found = closest(root, Cost(matrices, tuple(shifts)))
            self._compose(k, rows, self._whole(k, Element({root.name: found.value}, (len(rows),))))

    def _hidden(self, k: int, name: str, unknown: Iterable[int]) -> list[Site]:
        """Sites of unknown families on a tensor of family k."""
        own = {group.name for group in (*self._families[k].members, *self._families[k].fixed)}
        result = []
        for other in unknown:
            if other != k:
                fixed = {group.name for group in self._families[other].fixed}
                local = self._families[other].sites.get(name, ())
                result += [site for site in local if site.group.name not in own | fixed]
        return result

    def _anchored(self, k: int, unknown: Sequence[int]) -> Tensor:
        """The share of a family's tensors that unknown families cannot change, `[pair]`."""
        known, total = torch.zeros_like(self._scale), torch.zeros_like(self._scale)
        for name in self._families[k].sites:
            total += self._norms[name]
            hidden = self._hidden(k, name, unknown)
            key = (name, frozenset((site.group.name, site.placement.axis) for site in hidden))
            if not hidden:
                self._energies[key] = self._norms[name]
            elif key not in self._energies:
                x, y = barycentre(self.stacks.a[name], hidden, 1), barycentre(self.stacks.b[name], hidden, 1)
                if x is None or y is None:
                    self._energies[key] = torch.zeros_like(self._scale)
                else:
                    self._energies[key] = (x.flatten(1).norm(dim=1) * y.flatten(1).norm(dim=1)).double()
            known += self._energies[key]
        return known / torch.where(total == 0, 1.0, total)

    # --- bookkeeping ---------------------------------------------------------------------------------------------

    def _value(self, k: int, rows: Tensor) -> Value:
        return self.stacks.value(self._families[k].root.name, rows)

    def _slack(self, rows: Tensor) -> Tensor:
        return self._scale[rows] * max(self._tolerance, 4 * self._eps)

    def _write(self, k: int, rows: Tensor, value: Value) -> None:
        self.stacks.write(self._families[k].root.name, rows, value)
        self._soil(k, rows)

    def _compose(self, k: int, rows: Tensor, relative: Element) -> None:
        self.stacks.compose(k, rows, relative)
        self._soil(k, rows)

    def _soil(self, k: int, rows: Tensor) -> None:
        for neighbor in self._neighbors[k]:
            self._dirty[rows, neighbor] = True


def _changed_share(old: Value, new: Value) -> Tensor:
    """The share of units that a step moves."""
    changed: Tensor | None = None
    for part, differs in old.zip(new, torch.ne).items():
        if part != "matrix":
            units = differs if part == "perm" else differs.any(-2)
            changed = units if changed is None else changed | units
    assert changed is not None
    return changed.double().mean(-1)


def _held_back(cost: Cost, damping: float) -> Cost:
    """The cost with a bonus for the identity of each pair: steps become smaller and the linear model better."""
    held: dict[Character, Tensor] = {}
    for key, matrix in cost.matrices.items():
        bonus = damping * matrix.abs().amax(-1).mean(-1)[..., None, None]
        eye = torch.ones(1) if matrix.shape[-1] == 1 else torch.eye(matrix.shape[-1])
        held[key] = matrix + bonus * eye.to(matrix)
    return Cost(held, cost.shifts)
