"""A coordinate ascent between two checkpoints on disk. The tensors are read in working sets, which fit in memory, one
after the other.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from regauge.alignment.engine.ascent import Ascent, Neighborhoods
from regauge.alignment.engine.first_rotations import STEPS, FirstRotation, chosen_sites, find_products
from regauge.alignment.engine.nested_blocks import solve_family
from regauge.alignment.engine.paired_networks import dots
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.streamed.blocked import BlockedClimb
from regauge.alignment.streamed.passes import Passes
from regauge.alignment.streamed.plan import Plan, WorkingSet
from regauge.alignment.streamed.source import Source, Total, part_cost
from regauge.alignment.streamed.state import ClimbState
from regauge.core.act import Site
from regauge.core.closest import Cost
from regauge.core.element import Element, Value
from regauge.core.families import Tensors, barycenter, row_ranges, unfold
from regauge.core.groups import Group
from regauge.core.lazy_chart import Rows
from regauge.core.params import batch_of_one
from regauge.core.products import matmul

SAVE_SECONDS = 20.0
"""The number of seconds after which the state is saved, as soon as a working set (tensors that are in memory together)
is complete."""


@dataclass
class StreamedAscent:
    """A coordinate ascent in repeated sweeps, each of which reads both networks.

    Attributes:
        source: Both networks, prepared for comparison.
        plan: The plan for both networks.
        method: The method, without restarts and `init`.
        state: The state of the ascent.
        keep: A function that stores the state for a later run.
        passes: The counter of the bytes that are read.
        label: The label of this ascent if there are several.
    """

    source: Source
    plan: Plan
    method: WeightMatching
    state: ClimbState
    keep: Callable[[], None]
    passes: Passes
    label: str = ""

    def __post_init__(self) -> None:
        self._symmetry, self._saved, self._crew = self.plan.symmetry, time.monotonic(), self.passes.crew

    def run(self) -> None:
        """Run sweeps until no step raises the objective.

        If the result is worse than the identity, run the ascent again from the identity.
        """
        state, is_from_barycenter = self.state, self.method.start == "barycenter"
        if not state.is_anchored:
            if is_from_barycenter:
                turned = sum(family.root.matrix == "orthogonal" for family in self.plan.spread.values())
                most = (len(self.plan.spread) + STEPS * turned) * self.plan.sweep_bytes
                with self.passes.timed(f"first values{self.label}", most):
                    state.element = self._crew.first(self._anchor)
            else:
                state.matched = len(self.plan.sets)
            state.is_anchored = True
            self.keep()
        is_converged = self._climb()
        assert state.initial is not None
        if state.history[-1] < state.initial and is_from_barycenter and not state.is_from_identity:
            state.begin_at_identity(self._symmetry)
            state.matched = len(self.plan.sets)
            is_converged = self._climb()
        state.is_converged = is_converged
        self.keep()

    def _anchor(self) -> Element:
        """Choose initial values for the groups whose tensors do not fit in memory together. Return the resulting
        element.

        Initial values are chosen first for the group whose tensors depend least on groups without a value.
        """
        inside = {g.name for one in self.plan.sets for family in one.families for g in family.members}
        waiting = list(self.plan.spread)
        while waiting:
            unknown = inside | set(waiting)
            name = max(waiting, key=lambda spread: self._known_share(spread, unknown))
            waiting.remove(name)
            if self._turn(name):
                continue
            total = self._total(name)
            self.source.refresh()
            for names, own in self.plan.parts(name):
                sites = {n: self._symmetry.sites[n] for n in names if self._is_telling(name, n, unknown)}
                total.add(self._part_cost(total.group, sites, unknown), own)
                self.passes.advance(self.source.nbytes(names))
            self._compose({name: total.closest()[0]})
        return self.state.element

    def _turn(self, name: str) -> bool:
        """Choose the initial rotation of a group that acts on several working sets. Use tensors and products of tensors
        that no other group changes.

        Return whether an initial rotation was chosen.
        """
        group, parts = self._symmetry[name], [names for names, _ in self.plan.parts(name)]
        if group.matrix != "orthogonal":
            return False
        sites = chosen_sites({n: self._symmetry.sites[n] for names in parts for n in names})
        found = [find_products(name, {n: sites[n] for n in names}, self._symmetry.shapes) for names in parts]
        turning = FirstRotation(group, sum(map(len, found)))
        if not turning.count:
            return False
        self.source.refresh()
        for own in (n for n, local in sites.items() if len(local) == 1):
            cost, squares = torch.zeros(1, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
            for rows in row_ranges(self._symmetry, own):
                x, y = (unfold(t, sites[own][0]).unsqueeze(0) for t in self.source.load(own, rows)[:2])
                cost = cost.to(x.device) + matmul(x, y.mT).double()
                squares += torch.stack([dots(x, x), dots(y, y)])
            self.passes.advance(self.source.nbytes([own]))
            turning.add(cost, squares.prod(0).sqrt())
        if not turning.start():
            return False
        is_better = True
        while is_better and turning.steps < STEPS:
            self._set(name, turning.matrix)
            for one in (one for products in found for one in products):
                names, a, b = dict.fromkeys((one.first.name, one.second.name)), {}, {}
                for n in names:
                    a[n], b[n] = (t.unsqueeze(0) for t in self.source.load(n)[:2])
                turning.see(one.of(a), one.of(b))
                self.passes.advance(self.source.nbytes([*names]))
            is_better = turning.step()
        self._set(name, turning.best)
        return True

    def _set(self, name: str, matrix: Tensor) -> None:
        """Set the rotation of a group. The matrix has a leading pair axis."""
        self.state.element = self.state.element.replace(name, Value(matrix=matrix[0]))
        self.source.refresh()

    def _climb(self) -> bool:
        """Sweep until no step raises the objective. Return whether the ascent ended because no step raised the
        objective.
        """
        state, rounds = self.state, self.plan.rounds
        while len(state.history) < self.method.max_sweeps:
            totals = {name: self._total(name) for name in (rounds[len(state.history) % len(rounds)] if rounds else ())}
            again = " from the identity" if state.is_from_identity else ""
            label = f"sweep {len(state.history) + 1}{again}{self.label}"
            with self.passes.timed(label, self.plan.sweep_bytes):
                reached, is_settled = self._sweep(totals)
            if state.initial is None:
                state.initial = self.source.identity
            if state.before is not None and reached <= state.history[-1]:
                state.element, state.before = state.before, None
                return True
            state.before = None
            state.history.append(reached)
            found = self._crew.first(partial(_solve, totals))
            least = self.method.tolerance * self.source.scale
            values = {name: value for name, (value, gain) in found.items() if gain > least}
            state.quiet = 0 if values else state.quiet + 1
            if state.quiet >= max(1, len(rounds)):
                return is_settled
            if values and len(state.history) < self.method.max_sweeps:
                state.before = state.element
                self._compose(values)
            self.keep()
        return False

    def _sweep(self, totals: Mapping[str, Total]) -> tuple[float, bool]:
        """Run the coordinate ascent in every working set (tensors that are in memory together), one after the other.

        Return the objective, and whether the ascents in all working sets converged.
        """
        self.source.refresh()
        crew, is_alone, element = self._crew, self._crew.size == 1, self.state.element

        def visit(k: int) -> tuple[float, bool, dict[str, Value], list[tuple[float, float]]]:
            one, before = self.plan.sets[k], len(self.source.terms)
            gained, is_done = self._visit(k, one, totals)
            self.passes.advance(self.source.nbytes(one.names))
            if is_alone and time.monotonic() - self._saved > SAVE_SECONDS:
                self.keep()
                self._saved = time.monotonic()
            values = {} if is_alone else one.own_values(self.state.element)
            return gained, is_done, values, self.source.terms[before:]

        def read(name: str) -> tuple[list[float], list[tuple[float, float]]]:
            gained, before = [], len(self.source.terms)
            for rows in row_ranges(self._symmetry, name):
                x, y, norm = self.source.load(name, rows)
                gained.append(self.source.objective(name, x, y, norm))
                self._add(totals, {name: x}, {name: y})
            self.passes.advance(self.source.nbytes([name]))
            return gained, self.source.terms[before:]

        found = crew.map(visit, range(len(self.plan.sets)))
        further = crew.map(read, self.plan.loose)
        if not is_alone:
            for one, (_, _, values, _) in zip(self.plan.sets, found, strict=True):
                element = one.take_over(element, values)
            self.state.element, self.state.matched = element, len(self.plan.sets)
            terms = [*(own for *_, own in found), *(own for _, own in further)]
            self.source.terms = [term for own in terms for term in own]
            for total in totals.values():
                total.sum(crew)
        gains = [*(gained for gained, *_ in found), *(gained for own, _ in further for gained in own)]
        return sum(gains), all(is_done for _, is_done, *_ in found)

    def _visit(self, k: int, one: WorkingSet, totals: Mapping[str, Total]) -> tuple[float, bool]:
        """Run the coordinate ascent in one working set, and add its tensors to the costs of groups that act on several
        sets.
        """
        if one.is_blocked:
            return self._visit_blocks(k, one, totals)
        a, b, norms = {}, {}, {}
        for name in one.names:
            a[name], b[name], norms[name] = self.source.load(name)
        around = Neighborhoods.of([*one.sign_families(self._symmetry), *one.families])
        ascent = Ascent(around, batch_of_one(a), batch_of_one(b), solve_family, tolerance=self.method.tolerance)
        del b
        if k >= self.state.matched:
            ascent.start_from_barycenter(first=one.signs)
            self.state.matched = k + 1
        moving, _ = ascent.climb(torch.arange(1), self.method.max_sweeps)
        values, second = dict(ascent.networks.element.item(0)), {n: t[0] for n, t in ascent.networks.second().items()}
        del ascent
        self._compose({name: one.whole_value(self._symmetry, name, value) for name, value in values.items()})
        gained = sum(self.source.objective(name, a[name], second[name], norms[name]) for name in one.names)
        self._add(totals, a, second, one.signs)
        return gained, not len(moving)

    def _visit_blocks(self, k: int, one: WorkingSet, totals: Mapping[str, Total]) -> tuple[float, bool]:
        """Run the ascent in one working set with one tensor in memory at a time. Add each tensor to the costs of the
        groups that act on several working sets.
        """
        climb = BlockedClimb(self.source, self._symmetry, one, self.method.tolerance)
        is_settled = climb.run(self.method.max_sweeps, is_first=k >= self.state.matched)
        self.state.matched = max(self.state.matched, k + 1)
        gained, costs = 0.0, {name: Cost({}) for name in totals}
        for name in one.names:
            for rows in row_ranges(self._symmetry, name):
                gained += self._sum_up(name, rows, totals, costs)
        for spread, total in totals.items():
            total.add(costs[spread], one.signs.get(spread, ()))
        return gained, is_settled

    def _sum_up(self, name: str, rows: Rows, totals: Mapping[str, Total], costs: dict[str, Cost]) -> float:
        """Return the objective of a tensor or of some of its rows.

        Add the tensor to the costs of the groups that act on several working sets, and release it.
        """
        x, y, norm = self.source.load(name, rows)
        for spread, total in totals.items():
            costs[spread] += part_cost(total.group, {name: self._symmetry.sites[name]}, {name: (x, y)}.__getitem__)
        return self.source.objective(name, x, y, norm)

    def _part_cost(self, group: Group, sites: Mapping[str, Sequence[Site]], unknown: Collection[str]) -> Cost:
        """Return the cost of a group that acts on several working sets, for some tensors, which are read one after the
        other.
        """
        cost = Cost({})
        for name, local in sites.items():
            for rows in row_ranges(self._symmetry, name):
                cost += part_cost(group, {name: local}, partial(self._load, rows=rows), unknown)
        return cost

    def _load(self, name: str, rows: Rows = None) -> tuple[Tensor, Tensor]:
        x, y, _ = self.source.load(name, rows)
        return x, y

    def _add(
        self, totals: Mapping[str, Total], a: Tensors, b: Tensors, signs: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Add tensors of both networks to the costs of spread groups, which act on several working sets.

        For each spread group, `signs` lists the sign families that were chosen together with the tensors.
        """
        sites = {name: self._symmetry.sites[name] for name in a}
        for name, total in totals.items():
            total.add(part_cost(total.group, sites, lambda n: (a[n], b[n])), (signs or {}).get(name, ()))

    def _total(self, name: str) -> Total:
        group = self._symmetry[name]
        return Total(group, self.plan.shared_signs(group))

    def _compose(self, values: Mapping[str, Value]) -> None:
        """Multiply the current element by values of some groups, which act after it."""
        relative = Element(values).fill(self._symmetry.identity())
        self.state.element = self._symmetry.compose(relative, self.state.element)

    def _known_share(self, name: str, unknown: set[str]) -> float:
        """Return the fraction of a group's entries on which no other group with an unknown value acts."""
        own, sizes = self.plan.spread[name].sites, self.plan.sizes
        free = [n for n in own if not any(s.group.name in unknown - {name} for s in self._symmetry.sites[n])]
        return sizes.nbytes(free) / max(1, sizes.nbytes(own))

    def _is_telling(self, group: str, name: str, unknown: set[str]) -> bool:
        """Return whether a tensor depends on a group even after the tensor is averaged over all other groups without a
        value.
        """
        hidden = [s for s in self._symmetry.sites[name] if s.group.name in unknown and s.group.name != group]
        return barycenter(torch.empty(self._symmetry.shapes[name], device="meta"), hidden) is not None


def _solve(totals: Mapping[str, Total]) -> dict[str, tuple[Value, float]]:
    """Return the best value of every spread group (a group that acts on several working sets), and how much each value
    raises the objective.
    """
    return {name: total.closest() for name, total in totals.items()}
