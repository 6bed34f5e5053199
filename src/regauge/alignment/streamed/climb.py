"""Alignment of two checkpoints that stay on the disk: the engine climbs in one working set after the other."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from regauge.alignment.engine.ascent import Ascent
from regauge.alignment.engine.blocks import solve_family
from regauge.alignment.engine.frames import buffers_of
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import batch_of_one
from regauge.alignment.result import Result
from regauge.alignment.streamed.memory import row_ranges
from regauge.alignment.streamed.plan import Plan, WorkingSet
from regauge.alignment.streamed.source import Source, Total, part_cost
from regauge.alignment.streamed.state import State
from regauge.core.balance import has_balance
from regauge.core.element import Element, Value
from regauge.core.families import Tensors, barycenter
from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.memory_limit import size_text

SAVE_SECONDS = 20.0
"""The state is saved between working sets when that long has passed."""


@dataclass(frozen=True)
class StreamedResult(Result[Params]):
    """The outcome of an alignment of networks that stay on the disk.

    Until the moved network is written `params` is empty, then a mapping that reads tensors when they are asked for.
    """

    timings: tuple[str, ...] = ()

    @property
    def report(self) -> str:
        """How it went, and how fast the files were read."""
        moving = "" if self.is_converged else "; it was still moving when it stopped"
        gained = f"objective {self.initial:.6g} -> {self.objective:.6g} in {len(self.history)} sweeps{moving}"
        return "\n".join([gained, *self.notes, *self.timings])


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
        state: Where an earlier run stopped; `keep` is given later ones.
        keep: Keeps a state for a later run.
        progress: Counts bytes.

    Raises:
        ValueError: A tensor holds NaN or Inf.
    """
    state = state or State(plan.symmetry.identity())
    if state.is_converged is None:
        _StreamedAscent(Source(a, b, plan.symmetry, state), plan, method, state, keep, progress).run()
    assert state.initial is not None
    element = state.element
    if state.left is not None and state.right is not None:
        back = plan.symmetry.inverse(state.left)
        element = plan.symmetry.compose(back, plan.symmetry.compose(element, state.right))
    return StreamedResult(
        symmetry=plan.symmetry,
        element=element,
        params={},
        objective=state.history[-1],
        initial=state.initial,
        history=tuple(state.history),
        starts=(),
        is_converged=state.is_converged,
        is_judged=False,
        notes=tuple(state.notes),
        timings=tuple(state.timings),
    )


@dataclass
class _StreamedAscent:
    """The passes over both networks, which bring a state to its end."""

    source: Source
    plan: Plan
    method: WeightMatching
    state: State
    keep: Callable[[State], None]
    progress: Progress

    def __post_init__(self) -> None:
        self._symmetry, self._saved = self.plan.symmetry, time.monotonic()

    def run(self) -> None:
        state, is_from_barycenter = self.state, self.method.start == "barycenter"
        if self.method.scales != "keep" and has_balance(self._symmetry) and state.left is None:
            with self._timed("balancing"):
                state.left, state.right = self.source.balance(buffers_of(self.method.scales, None), self._advance)
            self.keep(state)
        if not state.is_anchored:
            if is_from_barycenter:
                with self._timed("first values", len(self.plan.spread)):
                    self._anchor()
            else:
                state.matched = len(self.plan.sets)
            state.is_anchored = True
            self.keep(state)
        is_converged = self._climb()
        assert state.initial is not None
        if state.history[-1] < state.initial and is_from_barycenter and not state.is_from_identity:
            state.is_from_identity, state.matched, state.before = True, len(self.plan.sets), None
            state.history, state.quiet, state.element = [], 0, self._symmetry.identity()
            if state.left is not None and state.right is not None:  # The identity leads to what balances the first.
                state.element = self._symmetry.compose(state.left, self._symmetry.inverse(state.right))
            is_converged = self._climb()
        state.is_converged = is_converged
        self.keep(state)

    @contextmanager
    def _timed(self, label: str, sweeps: int = 1) -> Iterator[None]:
        """A pass that reads both checkpoints at most this many times, with its progress and a clock."""
        self._left = sweeps * self.plan.sweep_bytes
        self._show = self.progress(label, self._left)
        before = self.source.bytes_and_seconds
        start, busy = time.perf_counter(), time.process_time()
        yield
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        nbytes, reading = (now - then for now, then in zip(self.source.bytes_and_seconds, before, strict=True))
        if nbytes:
            self.state.timings.append(
                f"  {label}: {seconds:.1f} s ({busy:.1f} s of processor time), of which {reading:.2f} s reading "
                f"{size_text(nbytes)} ({size_text(nbytes / max(reading, 1e-9))}/s)"
            )
        self._advance(self._left)

    def _advance(self, nbytes: int) -> None:
        nbytes = min(nbytes, self._left)
        self._show(nbytes)
        self._left -= nbytes

    def _anchor(self) -> None:
        """First values of the spread groups, those first that are touched least by what is unknown."""
        inside = {g.name for one in self.plan.sets for family in one.families for g in family.members}
        waiting = list(self.plan.spread)
        while waiting:
            unknown = inside | set(waiting)
            name = max(waiting, key=lambda spread: self._known_share(spread, unknown))
            waiting.remove(name)
            total = self._total(name)
            self.source.refresh()
            for names, own in self.plan.parts(name):
                sites = {n: self._symmetry.sites[n] for n in names if self._is_telling(name, n, unknown)}
                is_loose = names[0] in self.plan.loose
                for rows in row_ranges(self._symmetry, names[0]) if is_loose else [None]:
                    tensors = {n: self.source.load(n, rows)[:2] for n in sites}
                    total.add(part_cost(total.group, sites, tensors.__getitem__, unknown), own)
                self._advance(self.source.nbytes(names))
            self._compose({name: total.closest()[0]})

    def _climb(self) -> bool:
        """Sweep until nothing can be improved; whether that was reached."""
        state, rounds = self.state, self.plan.rounds
        while len(state.history) < self.method.max_sweeps:
            totals = {name: self._total(name) for name in (rounds[len(state.history) % len(rounds)] if rounds else ())}
            again = " from the identity" if state.is_from_identity else ""
            with self._timed(f"sweep {len(state.history) + 1}{again}"):
                reached, is_settled = self._sweep(totals)
            if state.initial is None:
                state.initial = self.source.identity
            if state.before is not None and reached <= state.history[-1]:
                state.element, state.before = state.before, None
                return True
            state.before = None
            state.history.append(reached)
            found = {name: total.closest() for name, total in totals.items()}
            least = self.method.tolerance * self.source.scale
            values = {name: value for name, (value, gain) in found.items() if gain > least}
            state.quiet = 0 if values else state.quiet + 1
            if state.quiet >= max(1, len(rounds)):
                return is_settled
            if values and len(state.history) < self.method.max_sweeps:
                state.before = state.element
                self._compose(values)
            self.keep(state)
        return False

    def _sweep(self, totals: Mapping[str, Total]) -> tuple[float, bool]:
        """The objective after a climb in every working set, and whether all of them ended by themselves."""
        self.source.refresh()
        reached, is_settled = 0.0, True
        for k, one in enumerate(self.plan.sets):
            gained, is_done = self._visit(k, one, totals)
            reached, is_settled = reached + gained, is_settled and is_done
            self._advance(self.source.nbytes(one.names))
            if time.monotonic() - self._saved > SAVE_SECONDS:
                self.keep(self.state)
                self._saved = time.monotonic()
        for name in self.plan.loose:
            for rows in row_ranges(self._symmetry, name):
                x, y, norm = self.source.load(name, rows)
                reached += self.source.objective(name, x, y, norm)
                self._add(totals, {name: x}, {name: y})
            self._advance(self.source.nbytes([name]))
        return reached, is_settled

    def _visit(self, k: int, one: WorkingSet, totals: Mapping[str, Total]) -> tuple[float, bool]:
        """Climb in one working set, and add it to the costs of spread groups."""
        a, b, norms = {}, {}, {}
        for name in one.names:
            a[name], b[name], norms[name] = self.source.load(name)
        families = [*one.sign_families(self._symmetry), *one.families]
        ascent = Ascent(families, batch_of_one(a), batch_of_one(b), solve_family, tolerance=self.method.tolerance)
        del b
        if k >= self.state.matched:
            ascent.start_from_barycenter(first=one.signs)
            self.state.matched = k + 1
        moving, _ = ascent.climb(torch.arange(1), self.method.max_sweeps)
        values, second = dict(ascent.networks.element.item(0)), {n: t[0] for n, t in ascent.networks.second().items()}
        del ascent
        for name, own in one.signs.items():
            sign, chosen = self._symmetry.identity()[name].sign, values[name].sign
            assert sign is not None
            assert chosen is not None
            values[name] = Value(sign=sign.index_copy(0, torch.tensor(own), chosen))
        self._compose(values)
        gained = sum(self.source.objective(name, a[name], second[name], norms[name]) for name in one.names)
        self._add(totals, a, second, one.signs)
        return gained, not len(moving)

    def _add(
        self, totals: Mapping[str, Total], a: Tensors, b: Tensors, signs: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Add tensors of both networks to the costs of spread groups; `signs` of them were chosen with the tensors."""
        sites = {name: self._symmetry.sites[name] for name in a}
        for name, total in totals.items():
            total.add(part_cost(total.group, sites, lambda n: (a[n], b[n])), (signs or {}).get(name, ()))

    def _total(self, name: str) -> Total:
        group = self._symmetry[name]
        return Total(group, self.plan.shared_signs(group))

    def _compose(self, values: Mapping[str, Value]) -> None:
        """Take values of some groups relative to where they are."""
        relative = Element(values).fill(self._symmetry.identity())
        self.state.element = self._symmetry.compose(relative, self.state.element)

    def _known_share(self, name: str, unknown: set[str]) -> float:
        """The share of a spread group's values on which nothing else is unknown."""
        own, sizes = self.plan.spread[name].sites, self.plan.sizes
        free = [n for n in own if not any(s.group.name in unknown - {name} for s in self._symmetry.sites[n])]
        return sizes.nbytes(free) / max(1, sizes.nbytes(own))

    def _is_telling(self, group: str, name: str, unknown: set[str]) -> bool:
        """Whether anything of a tensor is left for a group when what else is unknown is averaged."""
        hidden = [s for s in self._symmetry.sites[name] if s.group.name in unknown and s.group.name != group]
        return barycenter(torch.empty(self._symmetry.shapes[name], device="meta"), hidden) is not None
