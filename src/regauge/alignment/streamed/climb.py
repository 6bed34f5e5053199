"""Alignment of two checkpoints that stay on the disk: coordinate ascent in sweeps over their files."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regauge.alignment.engine.climbs import climb, make_ascent
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import batch_of_one
from regauge.alignment.result import Result
from regauge.alignment.streamed.balance import balance_streamed
from regauge.alignment.streamed.plan import Plan, WorkingSet, restricted, sign_group
from regauge.alignment.streamed.state import State
from regauge.alignment.streamed.stream import Stream
from regauge.alignment.streamed.totals import Pair, Total, part_cost
from regauge.core import act as _act
from regauge.core import element as _element
from regauge.core.act import Site
from regauge.core.element import Element, Value
from regauge.core.families import barycenter
from regauge.core.groups import Group
from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.memory_limit import size_text

SAVE_SECONDS = 20.0
"""The state is saved between working sets when that long has passed."""


@dataclass(frozen=True)
class Timing:
    """How long a pass over the checkpoints took.

    Attributes:
        label: The name of the pass.
        nbytes: Bytes that were read.
        read_seconds: Wall-clock time of reading alone, out of the page cache or from the disk.
        seconds: Wall-clock time of the pass.
        cpu_seconds: Processor time of the pass, of all threads.
    """

    label: str
    nbytes: int
    read_seconds: float
    seconds: float
    cpu_seconds: float

    def __str__(self) -> str:
        speed = size_text(self.nbytes / max(self.read_seconds, 1e-9))
        return (
            f"  {self.label}: {self.seconds:.1f} s ({self.cpu_seconds:.1f} s of processor time), of which "
            f"{self.read_seconds:.2f} s reading {size_text(self.nbytes)} ({speed}/s)"
        )


@dataclass(frozen=True)
class StreamedResult(Result[Params]):
    """The outcome of an alignment of networks that stay on the disk.

    Until the moved network is written `params` is empty, then a mapping that reads tensors when they are asked for.

    Attributes:
        timings: How long each pass over the files took.
    """

    timings: tuple[Timing, ...]

    @property
    def report(self) -> str:
        """How it went, and how fast the files were read."""
        moving = "" if self.is_converged else "; it was still moving when it stopped"
        gained = f"objective {self.initial:.6g} -> {self.objective:.6g} in {len(self.history)} sweeps{moving}"
        return "\n".join([gained, *(str(timing) for timing in self.timings if timing.nbytes)])


def align_streamed(
    a: Checkpoint,
    b: Checkpoint,
    plan: Plan,
    method: WeightMatching,
    *,
    state: State | None = None,
    keep: Callable[[State], None] = lambda state: None,
    progress: Progress = no_progress,
) -> StreamedResult:
    """Weight matching of checkpoints that do not fit in memory.

    A sweep reads both checkpoints once. Each working set is moved by what is known, its own groups climb as in memory,
    and what is then known of the spread groups is added to their costs; at the end of the sweep they take their best
    value. So the groups are visited one after the other as in memory, and the objective rises with every sweep. The
    first values of the spread groups come from what the unknown groups cannot change (`barycenter`): embeddings,
    heads, gains. Without spread groups there is one sweep, and the result is that of `align`.

    A spread group that acts on two axes of one tensor takes its linear step; one that does not prove itself in the next
    sweep is taken back, and ends the climb.

    Args:
        a: The network that stays.
        b: The network that moves.
        plan: Made for both.
        method: Without restarts and `init`.
        state: Where an earlier run stopped.
        keep: Is given the state whenever it is worth keeping.
        progress: Shows each pass over the checkpoints, in bytes.

    Raises:
        ValueError: A tensor holds NaN or Inf, or the method cannot stream.
    """
    if method.restarts or method.init is not None:
        raise ValueError("restarts and init need the networks in memory; leave them out, or allow more --memory")
    return _Climb(a, b, plan, method, state or State(plan.symmetry.identity()), keep, progress).run()


class _Climb:
    def __init__(
        self,
        a: Checkpoint,
        b: Checkpoint,
        plan: Plan,
        method: WeightMatching,
        state: State,
        keep: Callable[[State], None],
        progress: Progress,
    ) -> None:
        self._a, self._b, self._plan, self._method = a, b, plan, method
        self._state, self._keep, self._progress = state, keep, progress
        self._symmetry = plan.symmetry
        self._is_balanced = method.scales == "balance" and any(group.scales for group in plan.symmetry.groups)
        self._timings: list[Timing] = []
        self._stream = Stream(a, b, plan, state)
        self._saved = time.monotonic()

    def run(self) -> StreamedResult:
        state = self._state
        if self._is_balanced and state.left is None:
            self._pass("balancing scales", self._balance)
        if not state.is_anchored:
            if self._method.start == "barycenter":
                self._pass("first values", self._anchor, len(self._plan.spread))
            else:
                state.matched = set(range(len(self._plan.sets)))
            state.is_anchored = True
            self._keep(state)
        is_converged = self._sweeps()
        assert state.initial is not None
        if state.history[-1] < state.initial and not state.is_from_identity and self._method.start == "barycenter":
            state.element, state.right, state.before = self._symmetry.identity(), state.left, None
            state.matched, state.is_from_identity = set(range(len(self._plan.sets))), True
            state.history, state.quiet = [], 0
            is_converged = self._sweeps()
        element = state.element
        if state.left is not None and state.right is not None:
            back = self._symmetry.inverse(state.left)
            element = self._symmetry.compose(back, self._symmetry.compose(element, state.right))
        history = tuple(value + (state.offset if state.is_from_identity else 0.0) for value in state.history)
        return StreamedResult(
            symmetry=self._symmetry,
            element=element,
            params={},
            objective=history[-1],
            initial=state.initial,
            history=history,
            starts=(),
            is_converged=is_converged,
            is_judged=False,
            timings=tuple(self._timings),
        )

    # --- passes ------------------------------------------------------------------------------------------------

    def _pass(self, label: str, work: Callable[[], None], times: int = 1) -> None:
        """Do something that reads both checkpoints at most so many times, with a clock beside it."""
        self._left = times * self._plan.sweep_bytes
        before = self._stream.read_so_far()
        start, busy = time.perf_counter(), time.process_time()
        self._show = self._progress(label, self._left)
        work()
        now = self._stream.read_so_far()
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        self._timings.append(Timing(label, now[0] - before[0], now[1] - before[1], seconds, busy))
        self._show(self._left)

    def _advance(self, nbytes: int) -> None:
        self._show(min(nbytes, self._left))
        self._left -= min(nbytes, self._left)

    def _balance(self) -> None:
        self._state.left = balance_streamed(self._plan, self._a, self._advance)
        self._state.right = balance_streamed(self._plan, self._b, self._advance)
        self._keep(self._state)

    def _anchor(self) -> None:
        """First values of the spread groups, those first that are touched least by what is unknown."""
        waiting = list(self._plan.spread)
        roots = {root for one in self._plan.sets for root in one.roots}
        while waiting:
            unknown = self._members(roots) | set(waiting)
            name = max(waiting, key=lambda spread: self._share(spread, unknown))
            waiting.remove(name)
            group = self._symmetry[name]
            total = Total(group, self._plan.shared_signs(group))
            self._stream.refresh()
            for names, own in self._parts(name):
                for rows in self._stream.pieces(names[0]) if names[0] in self._plan.loose else [None]:
                    pair = self._averaging(name, unknown, rows)
                    total.add(part_cost(group, names, self._sites_of(name), pair), own)
                self._advance(self._stream.nbytes(names))
            value, _ = total.closest()
            self._step({name: value})

    def _sweeps(self) -> bool:
        """Sweep until nothing can be improved; whether that was reached."""
        state, rounds = self._state, self._plan.rounds
        while len(state.history) < self._method.max_sweeps:
            chosen = rounds[len(state.history) % len(rounds)] if rounds else ()
            totals = {
                name: Total(self._symmetry[name], self._plan.shared_signs(self._symmetry[name])) for name in chosen
            }
            reached, is_settled = 0.0, True

            def sweep(totals: Mapping[str, Total] = totals) -> None:
                nonlocal reached, is_settled
                reached, is_settled = self._sweep(totals)

            self._stream.begin_sweep()
            self._pass(f"sweep {state.sweeps + 1}", sweep)
            state.sweeps += 1
            if state.initial is None:
                state.initial, state.offset = self._stream.identity, self._stream.identity - self._stream.crossed
            if state.before is not None and reached <= state.history[-1]:
                state.element, state.before = state.before, None
                return True
            state.before = None
            state.history.append(reached)
            values = {}
            for name, total in totals.items():
                value, gain = total.closest()
                if gain > self._method.tolerance * self._stream.scale:
                    values[name] = value
            state.quiet = 0 if values else state.quiet + 1
            if state.quiet >= max(1, len(rounds)):
                self._keep(state)
                return is_settled
            if values and len(state.history) < self._method.max_sweeps:
                state.before = state.element
                self._step(values)
            self._keep(state)
        return False

    def _sweep(self, totals: Mapping[str, Total]) -> tuple[float, bool]:
        self._stream.refresh()
        reached, is_settled = 0.0, True
        for k, one in enumerate(self._plan.sets):
            gained, is_done = self._visit(k, one, totals)
            reached, is_settled = reached + gained, is_settled and is_done
            self._advance(self._stream.nbytes(one.names))
            if time.monotonic() - self._saved > SAVE_SECONDS:
                self._keep(self._state)
                self._saved = time.monotonic()
        for name in self._plan.loose:
            for rows in self._stream.pieces(name):
                x, y, start = self._stream.load(name, rows)
                reached += self._stream.objective(name, x, y, start)
                self._add({name: x}, {name: y}, [name], totals, {})
            self._advance(self._stream.nbytes([name]))
        return reached, is_settled

    def _visit(self, k: int, one: WorkingSet, totals: Mapping[str, Total]) -> tuple[float, bool]:
        """Climb in one working set, and add it to the costs of spread groups."""
        a: dict[str, Tensor] = {}
        b: dict[str, Tensor] = {}
        starts: dict[str, float] = {}
        for name in one.names:
            a[name], b[name], starts[name] = self._stream.load(name)
        members = self._members(one.roots)
        signs = [sign_group(self._symmetry[name], own, one.names) for name, own in one.signs.items()]
        local = restricted(self._symmetry, one.names, members)
        if k not in self._state.matched and signs:
            first = Symmetry(tuple(signs), {name: self._symmetry.shapes[name] for name in one.names})
            found = self._first_signs(first, members, a, b)
            moved = [name for name in first.sites if name in b]
            b |= _act.act(first.groups, {n: first.sites[n] for n in moved}, found, {n: b[n] for n in moved}, _ndims(b))
            self._update_signs(one, found)
        both = replace(local, groups=(*signs, *local.groups))
        ascent = make_ascent(both, batch_of_one(a), batch_of_one(b), tolerance=self._method.tolerance)
        del b
        if k not in self._state.matched:
            ascent.start_from_barycenter(known=[group.name for group in signs])
        moving, _ = ascent.climb(torch.arange(1), self._method.max_sweeps)
        element = ascent.networks.element.fill(both.identity((1,))).item(0)
        second = {name: tensor[0] for name, tensor in ascent.networks.second().items()}
        del ascent
        self._state.matched.add(k)
        self._update_signs(one, element)
        self._update(local.groups, element)
        gained = sum(self._stream.objective(name, a[name], second[name], starts[name]) for name in one.names)
        self._add(a, second, one.names, totals, one.signs)
        return gained, not len(moving)

    def _first_signs(
        self, signs: Symmetry, members: set[str], a: Mapping[str, Tensor], b: Mapping[str, Tensor]
    ) -> Element:
        """Signs of spread groups as far as they are known before the working set's own groups are."""
        means: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for name in signs.sites:
            unknown = [site for site in self._symmetry.sites[name] if site.group.name in members]
            x, y = barycenter(a[name], unknown), barycenter(b[name], unknown)
            if x is not None and y is not None:
                means[0][name], means[1][name] = x, y
        found = climb(signs, batch_of_one(means[0]), batch_of_one(means[1]), tolerance=self._method.tolerance)
        return found.element.item(0)

    def _add(
        self,
        a: Mapping[str, Tensor],
        b: Mapping[str, Tensor],
        names: Sequence[str],
        totals: Mapping[str, Total],
        signs: Mapping[str, Sequence[int]],
    ) -> None:
        for name, total in totals.items():

            def pair(tensor: str, site: Site) -> Pair:
                return a[tensor], b[tensor]

            total.add(part_cost(self._symmetry[name], names, self._sites_of(name), pair), signs.get(name, ()))

    def _averaging(self, name: str, unknown: set[str], rows: tuple[int, int] | None) -> Callable[[str, Site], Pair]:
        """Values averaged over everything that is unknown but the group itself where it is looked at."""

        def pair(tensor: str, site: Site) -> Pair:
            others = [
                other
                for other in self._symmetry.sites[tensor]
                if (other.group.name in unknown and other.group.name != name)
                or (other.group.name == name and other.placement.axis != site.placement.axis)
            ]
            shape = self._symmetry.shapes[tensor]
            if others and barycenter(torch.empty(shape, device="meta"), others) is None:
                return None, None
            x, y, _ = self._stream.load(tensor, rows)
            return barycenter(x, others), barycenter(y, others)

        return pair

    # --- the element -------------------------------------------------------------------------------------------

    def _step(self, values: Mapping[str, Value]) -> None:
        """Spread groups take values relative to where they are."""
        for name, value in values.items():
            blank = _element.identity((self._symmetry[name],))[name]
            self._update((self._symmetry[name],), Element({name: value.fill(blank)}))

    def _update(self, groups: Sequence[Group], relative: Element) -> None:
        moved = _element.compose(tuple(groups), relative, self._state.element)
        for group in groups:
            self._state.element = self._state.element.replace(group.name, moved[group.name])

    def _update_signs(self, one: WorkingSet, relative: Element) -> None:
        for name, own in one.signs.items():
            known, new = self._state.element[name], relative[name]
            assert known.sign is not None
            assert new.sign is not None
            sign = known.sign.clone()
            sign[list(own)] *= new.sign
            self._state.element = self._state.element.replace(name, replace(known, sign=sign))

    # --- what the plan says ------------------------------------------------------------------------------------

    def _members(self, roots: Sequence[str] | set[str]) -> set[str]:
        """Groups of some families: roots and what is repeated within them."""
        return {g.name for g in self._symmetry.groups if g.name in roots or any(base in roots for base in g.within)}

    def _parts(self, name: str) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        """The tensors of a group by the part that they belong to, and which of its signs are chosen there."""
        own = {place.parameter for place in self._symmetry[name].placements}
        parts = [(tuple(n for n in one.names if n in own), tuple(one.signs.get(name, ()))) for one in self._plan.sets]
        return [part for part in [*parts, *(((n,), ()) for n in self._plan.loose if n in own)] if part[0]]

    def _share(self, name: str, unknown: set[str]) -> float:
        """The share of a group's values on which nothing else is unknown."""
        own = {p.parameter for p in self._symmetry[name].placements if self._plan.sizes.has(p.parameter)}
        free = [n for n in own if not any(s.group.name in unknown - {name} for s in self._symmetry.sites[n])]
        return self._plan.sizes.nbytes(free) / max(1, self._plan.sizes.nbytes(own))

    def _sites_of(self, name: str) -> Callable[[str], list[Site]]:
        return lambda tensor: [site for site in self._symmetry.sites[tensor] if site.group.name == name]


def _ndims(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.ndim for name, tensor in tensors.items()}
