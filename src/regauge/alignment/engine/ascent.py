"""Coordinate ascent over the groups of a symmetry, written once for every matching objective.

Given two dictionaries of tensors and a symmetry that acts on the second, it climbs

    J(g) = <a, g b> - (|g b|^2 - |b|^2) / 2

one family of groups at a time, each step an exact `closest`. Permutations, signs and rotations keep the norm,
so J is the inner product of the two networks; half-period shifts do not, and with them J is, up to a
constant, half the negative squared distance. What a matching method compares (weights, activations, means
and standard deviations) is only a matter of which tensors it puts into the dictionaries.

The second dictionary is kept moved, so that every step is relative to what is known and its cost needs no
gather.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regauge.alignment.engine.blocks import complete, solve_family
from regauge.alignment.engine.moves import Change, UnitStep, unit_factor
from regauge.alignment.engine.running import Pair, RunningCost
from regauge.core import act as _act
from regauge.core import element as _element
from regauge.core.act import Site
from regauge.core.closest import Character, Cost, character, closest
from regauge.core.element import Element
from regauge.core.families import Family, Tensors, barycentre, coupled_tensors, dot, families
from regauge.core.symmetry import Symmetry

CERTAIN = 1e-5
"""A gain above this share of `sum |a| |b|` of the tensors involved is no rounding error of float32 products."""
DAMPING = (0.1, 0.3, 1.0, 3.0)
"""How strongly a step is held back when a group acts on two axes of one tensor and the full step fails."""

Unknown = Mapping[str, Family]
Averaged = frozenset[tuple[str, int]]
"""The groups that are averaged over, and the axes on which they act."""


class Ascent:
    """One climb: the current element, the moved tensors and the objective.

    Args:
        symmetry: With every size known.
        a: Tensors of the first network that count.
        b: The same of the second.
        start: Where to begin; the identity unless given.
        tolerance: A step must gain more than this share of `sum |a| |b|`.
    """

    def __init__(
        self, symmetry: Symmetry, a: Tensors, b: Tensors, *, start: Element | None = None, tolerance: float = 1e-9
    ) -> None:
        sites = {name: symmetry.sites[name] for name in a}
        self.element = symmetry.identity() if start is None else start
        self._a = dict(a)
        self._b = dict(b)
        self._owned: set[str] = set()  # What may be written in place; everything else still belongs to the caller.
        self.changed: set[str] = set()  # What moved since the last `aim_at`.
        if start is not None:
            self._b = _act.act(symmetry.groups, sites, start, self._b, {name: t.ndim for name, t in b.items()})
        self._symmetry, self._start = symmetry, b
        self._norms: dict[str, float] = {}
        self.gained = 0.0
        self.initial = 0.0
        for name in a:  # Both in one pass: large tensors are read from memory once.
            self._norms[name] = float(torch.linalg.vector_norm(a[name])) * float(torch.linalg.vector_norm(b[name]))
            self.initial += self._objective_of(name)
        self._averages: dict[str, dict[Averaged, Pair]] = {name: {} for name in a}
        self._energies = {(name, Averaged()): norm for name, norm in self._norms.items()}
        self._share, self._tolerance = tolerance, tolerance * sum(self._norms.values())
        self.families = families(symmetry.groups, sites)
        self._neighbors = {
            one.root.name: [
                other for other in self.families if one is not other and one.sites.keys() & other.sites.keys()
            ]
            for one in self.families
        }
        self._coupled = {family.root.name: coupled_tensors(family) for family in self.families}
        self._running = {
            family.root.name: RunningCost(family, self._coupled[family.root.name])
            for family in self.families
            if not family.is_nested
        }
        self._dirty = {family.root.name for family in self.families}

    def start_from_barycentre(self, known: Collection[str] = ()) -> None:
        """Choose every family once, the best anchored first, with unknown ones at their barycentre.

        Families whose root is in `known` stay as they are, and come first in later sweeps.

        An unknown permutation is replaced by the uniform doubly stochastic matrix, unknown signs and
        rotations by zero: their expectation over the group. The family whose cost is best known (through
        inputs, outputs and what is chosen already) comes first. Coordinate ascent from the identity ends in
        poor local optima on residual networks, because there most of the first costs is noise.
        """
        unknown = {family.root.name: family for family in self.families if family.root.name not in known}
        scores: dict[str, float] = {}
        order = [family for family in self.families if family.root.name in known]
        while unknown:
            for name in unknown.keys() - scores.keys():
                scores[name] = self._anchored(unknown[name], unknown)
            best = max(unknown, key=lambda name: scores[name])
            order.append(unknown[best])
            self._choose(unknown[best], unknown)
            del unknown[best]
            for neighbor in self._neighbors[best]:
                scores.pop(neighbor.root.name, None)
        self.families = order
        self._averages = {name: {} for name in self._a}

    def aim_at(self, a: Tensors) -> None:
        """Go on from here with other tensors in the first network; the names that `a` lacks stay as they are.

        Only families that act on these names will be looked at again, from the potentials of their last search.
        `initial` and `gained` go on counting what they counted.
        """
        self.changed.clear()
        for name, tensor in a.items():
            self._a[name] = tensor
            self._averages[name].clear()
            self._norms[name] = float(torch.linalg.vector_norm(tensor) * torch.linalg.vector_norm(self._b[name]))
        self._tolerance = self._share * sum(self._norms.values())
        for family in self.families:
            if family.sites.keys() & a.keys():
                self._dirty.add(family.root.name)
                if not family.is_nested:
                    self._running[family.root.name].forget()

    @property
    def first(self) -> Tensors:
        """The tensors of the first network, as they were aimed at last."""
        return self._a

    @property
    def second(self) -> Tensors:
        """The tensors of the second network as they are now; later steps may write into them."""
        return self._b

    def moved(self) -> dict[str, Tensor]:
        """The tensors of the second network where the action would give the same bits: no shifts, no rotations."""
        return {
            name: tensor
            for name, tensor in self._b.items()
            if not any(site.group.matrix != "none" or any(site.placement.shift) for site in self._symmetry.sites[name])
        }

    def exact_objective(self) -> float:
        """The objective summed anew, without what rounding added up on the way."""
        return sum(self._objective_of(name) for name in self._a)

    def _objective_of(self, name: str) -> float:
        """What one tensor contributes, summed in float64."""
        moved, start = self._b[name], self._start[name]
        total = dot(self._a[name], moved)
        if any(any(site.placement.shift) for site in self._symmetry.sites[name]):
            total -= (dot(moved, moved) - dot(start, start)) / 2
        return total

    def sweep(self) -> bool:
        """Improve every family once whose neighbors moved since its last step; whether anything moved."""
        before = self.gained
        for family in self.families:
            if family.root.name in self._dirty:
                self._improve(family)
        return self.gained > before

    def _choose(self, family: Family, unknown: Unknown) -> None:
        """Set a family to what is best while others are unknown, whatever the objective says."""
        unknown_sites = self._averaged_sites(family, unknown)
        if family.is_nested:
            a, b, sites = {}, {}, {}
            for name, local in family.sites.items():
                others = unknown_sites.get((name, -1), [])
                x, y = self._average(name, others)
                if x is not None and y is not None:
                    a[name], b[name], sites[name] = x.unsqueeze(0), y.unsqueeze(0), local
            if not _acts(family, sites):
                return
            relative = solve_family(replace(family, sites=sites), a, b)[0].item(0)
        else:
            running = self._running[family.root.name]
            found = running.closest(running.cost(self._a, self._b, unknown_sites, self._average))
            relative = complete(family, {family.root.name: found.value}, ())
        if not any(unknown_sites.values()):
            self._dirty.discard(family.root.name)
        self._apply(family, relative, self._changes(family, relative))

    def _improve(self, family: Family) -> None:
        """Take the best step of a family if it gains anything; exact sums decide."""
        root = family.root.name
        self._dirty.discard(root)
        if family.is_nested:
            a, b = ({name: t[name].unsqueeze(0) for name in family.sites} for t in (self._a, self._b))
            steps, gains = solve_family(family, a, b)
            if float(gains) > self._tolerance:
                self._try(family, steps.item(0), float(gains))
            return
        running = self._running[root]
        cost = running.cost(self._a, self._b, {}, self._average)
        found = running.closest(cost)
        gain = float(found.objective - cost.at_identity())
        if gain <= self._tolerance:
            return
        is_moved = self._try(family, complete(family, {root: found.value}, ()), gain)
        if self._coupled[root]:
            for damping in DAMPING:
                if is_moved:
                    self._dirty.add(root)
                    break
                held = closest(family.root, _held_back(cost, damping))
                is_moved = self._try(family, complete(family, {root: held.value}, ()), 0.0)

    def _try(self, family: Family, relative: Element, promised: float) -> bool:
        """Take a step unless it fails to gain; sums in float64 decide where rounding could."""
        changes = self._changes(family, relative)
        scale = sum(self._norms[name] for name in family.sites)
        is_certain = promised > CERTAIN * scale and not self._coupled[family.root.name]
        gain = promised if is_certain else self._gain(family, changes)
        if gain <= self._tolerance:
            return False
        self._apply(family, relative, changes)
        self.gained += gain
        return True

    def _changes(self, family: Family, relative: Element) -> list[Change]:
        """What a step would write."""
        changes = []
        is_plain = not family.is_nested and family.root.matrix == "none"
        members = {group.name for group in family.members}
        units = UnitStep(family.root.size, relative[family.root.name])
        for name, local in family.sites.items():
            own = [site for site in local if site.group.name in members]
            old = self._b[name]
            if is_plain and name not in self._coupled[family.root.name]:
                change = units.change(name, own, old)
                if change is not None:
                    changes.append(change)
            else:
                groups = (*family.members, *family.fixed)
                new = _act.act(groups, {name: own}, relative, {name: old}, {name: old.ndim})[name]
                changes.append(Change(name, None, torch.empty(0), new, old))
        return changes

    def _gain(self, family: Family, changes: list[Change]) -> float:
        """What changes gain, summed in float64."""
        gain = 0.0
        for change in changes:
            target, new = self._a[change.name], change.new
            if change.axis is not None:
                target = target.index_select(change.axis, change.positions)
            gain += dot(target, change.difference)
            if any(any(site.placement.shift) for site in family.sites[change.name]):
                old = new - change.difference
                gain -= (dot(new, new) - dot(old, old)) / 2
        return gain

    def _apply(self, family: Family, relative: Element, changes: list[Change]) -> None:
        root = family.root.name
        for change in changes:
            self.changed.add(change.name)
            self._averages[change.name].clear()
            for neighbor in self._neighbors[root]:
                if change.name in neighbor.sites:
                    self._dirty.add(neighbor.root.name)
                    if not neighbor.is_nested:
                        self._running[neighbor.root.name].neighbor_moved(change, self._a)
            if change.axis is None:
                self._b[change.name] = change.new
            else:
                if change.name not in self._owned:
                    self._b[change.name] = self._b[change.name].clone()
                self._b[change.name].index_copy_(change.axis, change.positions, change.new)
            self._owned.add(change.name)
        if not family.is_nested:
            value = relative[root]
            characters = {character(s.placement): s for local in family.sites.values() for s in local}
            factors = {key: f for key, s in characters.items() if (f := unit_factor(s, value)) is not None}
            self._running[root].self_moved(value, factors)
        groups = (*family.members, *family.fixed)
        moved = _element.compose(groups, relative, self.element)
        for group in family.members:
            self.element = self.element.replace(group.name, moved[group.name])

    def _averaged_sites(self, family: Family, unknown: Unknown) -> dict[tuple[str, int], list[Site]]:
        """For each place of a family (tensor and axis; axis -1 for all) the sites that are still unknown."""
        result = {}
        own = {group.name for group in (*family.members, *family.fixed)}
        for name, local in family.sites.items():
            others = [
                site
                for other in self._neighbors[family.root.name]
                if other.root.name in unknown
                for site in other.sites.get(name, ())
                if site.group.name not in own | {group.name for group in other.fixed}
            ]
            result[name, -1] = others
            for axis in {site.placement.axis for site in local}:
                twice = [site for site in local if site.placement.axis != axis and not family.is_nested]
                result[name, axis] = others + twice
        return result

    def _average(self, name: str, sites: Sequence[Site]) -> Pair:
        """Both tensors of a name, averaged over the groups of `sites`; kept until the second one moves."""
        if not sites:
            return self._a[name], self._b[name]
        known, key = self._averages[name], averaged(sites)
        if key not in known:
            known[key] = (barycentre(self._a[name], sites), barycentre(self._b[name], sites))
        return known[key]

    def _anchored(self, family: Family, unknown: Unknown) -> float:
        """The share of a family's tensors that unknown families cannot change."""
        known = 0.0
        for (name, axis), sites in self._averaged_sites(family, unknown).items():
            if axis >= 0:
                continue
            # What is known already moves the tensor without changing this norm, so it is computed once.
            key = (name, averaged(sites))
            if key not in self._energies:
                x, y = self._average(name, sites)
                self._energies[key] = 0.0 if x is None or y is None else float(x.norm() * y.norm())
            known += self._energies[key]
        return known / (sum(self._norms[name] for name in family.sites) or 1.0)


def averaged(sites: Iterable[Site]) -> Averaged:
    """What identifies an average over the groups of `sites`."""
    return frozenset((site.group.name, site.placement.axis) for site in sites)


def _acts(family: Family, sites: Mapping[str, object]) -> bool:
    return any(s.group.name == family.root.name for name in sites for s in family.sites[name])


def _held_back(cost: Cost, damping: float) -> Cost:
    """The cost with a bonus for the identity: the step becomes smaller and the linear model better."""
    held: dict[Character, Tensor] = {}
    for key, matrix in cost.matrices.items():
        bonus = damping * float(matrix.abs().amax(-1).mean())
        if matrix.shape[-1] == 1:
            held[key] = matrix + bonus
        else:
            held[key] = matrix + bonus * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return Cost(held, cost.shifts)
