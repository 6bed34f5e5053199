"""Weight matching of two checkpoints on disk: balancing, coordinate ascent and (for near copies) fitting of scales."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from regauge.alignment.engine.frames import MOVED, balances_of, have_equal_variances, share_of_rounding, statistics_gap
from regauge.alignment.engine.refit import fitted_groups, is_near_copy
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.result import Result
from regauge.alignment.streamed.balancing import balance_streamed, fit_streamed
from regauge.alignment.streamed.climb import StreamedAscent
from regauge.alignment.streamed.passes import Passes
from regauge.alignment.streamed.plan import Plan
from regauge.alignment.streamed.source import Moved, Source, measure_square
from regauge.alignment.streamed.state import ClimbState, State
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.memory_limit import large_blocks_returned
from regauge.core.balance import count_frozen_gains
from regauge.core.element import Element
from regauge.core.families import move_tensor
from regauge.core.params import Params, batch_of_one
from regauge.core.progress import ALONE, Crew, Progress, no_progress

FITS = 3
"""The number of fitting steps: scales, then all other groups once more, then scales."""


@dataclass(frozen=True)
class StreamedResult(Result[Params]):
    """The result of an alignment of networks on disk.

    `params` is empty until the aligned network is written. Afterwards, `params` is a mapping that reads tensors on
    access.
    """

    timings: tuple[str, ...] = ()

    @property
    def report(self) -> str:
        """Return sentences about the objective, about properties that the second network could not adopt, and about the
        speed.
        """
        gained, *timings = self.course
        return "\n".join([gained, *self.notes, *timings])

    @property
    def course(self) -> tuple[str, ...]:
        """Return sentences about the objective and the reading speed."""
        moving = "" if self.is_converged else "; it was stopped before convergence"
        gained = f"objective {self.initial:.6g} -> {self.objective:.6g} in {len(self.history)} sweeps{moving}"
        return (gained, *self.timings)


def align_streamed(
    a: Checkpoint,
    b: Checkpoint,
    plan: Plan,
    method: WeightMatching,
    *,
    state: State | None = None,
    keep: Callable[[State], None] = lambda state: None,
    progress: Progress = no_progress,
    crew: Crew = ALONE,
) -> StreamedResult:
    """Match the weights of two checkpoints that do not fit in memory.

    Each sweep reads both checkpoints once. The tensors are divided into working sets that fit in memory. Known elements
    are applied to each working set, and then the groups that act only on this working set are optimized in the same way
    as `align` optimizes networks in memory. The tensors of a working set also contribute to the costs of the spread
    groups, which act on several working sets. At the end of the sweep, the spread groups are set to their best values.
    Therefore the groups are optimized one after the other, and the objective rises with every sweep. The initial values
    of the spread groups are computed from tensors that do not become zero if they are averaged over groups without a
    value (`barycenter`). The average over groups without a value is zero for all tensors except embeddings, heads and
    gains. Initial values of rotations also use products of tensors within working sets. Computing the products of
    tensors takes a few passes over the files. Without spread groups, there is only one sweep, and the result equals the
    result of `align`.

    If a group of several working sets acts on two axes of one tensor, the group takes a linearized step. If the
    objective decreases in the next sweep, the linearized step is undone and the ascent ends.

    If scales change running statistics, two ascents are run: with the statistics kept and with the statistics changed.
    The second ascent recognizes copies with transformed statistics. If the networks are nearly equal, the scales of the
    second network are fitted to the scales of the first network.

    Args:
        a: The first network, which stays unchanged.
        b: The second network, which is aligned.
        plan: The plan for reading both networks.
        method: The alignment method, without restarts and `init`.
        state: The state of an earlier run. Every later state is passed to `keep`.
        keep: A function that stores a state for a later run.
        progress: A function that shows the progress in bytes.
        crew: The processes that share the work of each pass. The costs of groups that act on several working sets are
            summed over the processes, and the first process computes the best values.

    Raises:
        ValueError: A tensor contains NaN or Inf.
    """
    state = state or State()
    with large_blocks_returned():
        _Matching(a, b, plan, method, state, keep, Passes((a, b), state.timings, progress, crew)).run()
    climb = state.climbs[state.chosen]
    assert state.found is not None
    assert climb.initial is not None
    return StreamedResult(
        symmetry=plan.symmetry,
        element=state.found,
        params={},
        objective=climb.history[-1],
        initial=climb.initial,
        history=tuple(climb.history),
        starts=(),
        is_converged=climb.is_converged,
        is_judged=False,
        notes=tuple(state.notes),
        timings=tuple(state.timings),
    )


@dataclass
class _Matching:
    """The passes over both networks that complete the state of an alignment."""

    a: Checkpoint
    b: Checkpoint
    plan: Plan
    method: WeightMatching
    state: State
    keep: Callable[[State], None]
    passes: Passes

    def __post_init__(self) -> None:
        symmetry = self.plan.symmetry
        if symmetry.added:
            self.a, self.b = (Moved(one, lambda n, t: symmetry.sums({n: t})[n]) for one in (self.a, self.b))
        self._symmetry = symmetry.on_sums
        self._balances = balances_of(self._symmetry, self.method.scales, None)

    def run(self) -> None:
        state = self.state
        if not state.climbs:
            self._balance()
            self.keep(state)
        for k, climb in enumerate(state.climbs):
            if climb.is_converged is None:
                self._climb(self.b, climb, ", all scales balanced" if k else "")
        if state.found is None:
            state.found = self._choose()
            self.keep(state)
        while state.fits < FITS:
            element, is_closer = self._fit(self._moved(state.found))
            if is_closer:
                state.found = self._symmetry.compose(element, state.found)
                state.notes = []  # Notes name matrices that balancing left unchanged; the fit changed them.
            state.fits = state.fits + 1 if is_closer else FITS
            self.keep(state)

    def _moved(self, element: Element) -> Moved:
        return Moved(self.b, partial(move_tensor, self._symmetry, element))

    def _balance(self) -> None:
        """Balance the networks, and begin one coordinate ascent for each kind of balancing."""
        state, identity = self.state, self._symmetry.identity()
        if not self._balances:
            state.climbs = [ClimbState(identity)]
        alike = self.passes.crew.first(
            lambda: bool(have_equal_variances(self._symmetry, *map(batch_of_one, self._statistics())))
        )
        for buffers in self._balances if alike else self._balances[:1]:
            with self.passes.timed("balancing", self.plan.sweep_bytes):
                (left, right), notes = balance_streamed((self.a, self.b), self._symmetry, buffers, self.passes)
            state.notes = state.notes if state.climbs else list(notes)
            state.climbs.append(ClimbState(identity, left, right))

    def _climb(self, b: Checkpoint, climb: ClimbState, label: str, method: WeightMatching | None = None) -> None:
        source = Source(self.a, b, self._symmetry, climb)
        keep = (lambda: None) if method else (lambda: self.keep(self.state))
        StreamedAscent(source, self.plan, method or self.method, climb, keep, self.passes, label).run()

    def _choose(self) -> Element:
        """Return the element of the best coordinate ascent. If the networks are nearly equal, the state records that
        scales must be fitted next.
        """
        state, symmetry = self.state, self._symmetry
        elements = [climb.found(symmetry) for climb in state.climbs]
        state.fits = FITS
        if len(elements) > 1:
            with self.passes.timed("comparing statistics", self.plan.sweep_bytes):
                state.chosen = int(self._is_moved_copy(*elements))
        element = elements[state.chosen]
        if self.plan.fitted:
            names = sorted({*self.plan.names}.union(*self.plan.fitted))
            with self.passes.timed("distances", self.plan.sweep_bytes):
                square, norm = measure_square(self.a, self._moved(element), symmetry, names, self.passes)
            is_double = all(one.dtype_of(name) == torch.float64 for one in (self.a, self.b) for name in names)
            if bool(is_near_copy(torch.tensor(square), torch.tensor(norm), is_double=is_double)):
                state.fits = 0
        return element

    def _is_moved_copy(self, kept: Element, moved: Element) -> bool:
        """Return whether the second network is a copy of the first one whose running statistics were also transformed;
        see `match_frames`.
        """
        if self._are_equal(kept):
            return False

        def gaps() -> list[float]:
            a, b = self._statistics()
            ends = ({n: move_tensor(self._symmetry, element, n, t) for n, t in b.items()} for element in (kept, moved))
            return [float(statistics_gap(self._symmetry, *map(batch_of_one, (a, end)))) for end in ends]

        before, after = self.passes.crew.first(gaps)
        return after < MOVED * before or self._are_equal(moved)

    def _are_equal(self, element: Element) -> bool:
        """Return whether the transformed second network equals the first network up to rounding."""
        for name in (name for name in self._symmetry.sites if self.a.stored[name].dtype.is_floating_point):
            square, norm = measure_square(self.a, self._moved(element), self._symmetry, [name], self.passes)
            share = share_of_rounding(one.stored[name].dtype for one in (self.a, self.b))
            if square > share**2 * norm:
                return False
        return True

    def _statistics(self) -> tuple[Params, Params]:
        """Return the running statistics of both networks."""
        names = [name for name in self._symmetry.buffers if name in self._symmetry.sites]
        a, b = ({name: one.read(name) for name in names} for one in (self.a, self.b))
        return a, b

    def _fit(self, moved: Moved) -> tuple[Element, bool]:
        """Return the element of one step of `refit_near_copies`, and whether it brings the networks closer."""
        symmetry = self._symmetry
        if self.state.fits != 1:
            with self.passes.timed("fitting scales", self.plan.sweep_bytes):
                buffers = self._balances[self.state.chosen]
                counted = count_frozen_gains(symmetry, buffers)
                groups = fitted_groups(counted, buffers)
                return fit_streamed(self.a, moved, counted, groups, self.plan.fitted, self.passes)
        climb = ClimbState(symmetry.identity())
        self._climb(moved, climb, ", scales fitted", replace(self.method, scales="keep", start="identity"))
        assert climb.initial is not None
        return climb.element, climb.history[-1] > climb.initial
