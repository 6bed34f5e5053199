"""Coordinate ascents for many pairs at once, in chunks, and the choice of the best one for each pair."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from regauge.alignment.engine.ascent import Ascent, Neighborhoods
from regauge.alignment.engine.nested_blocks import solve_family
from regauge.alignment.result import extend
from regauge.core import act as _act
from regauge.core.element import Element
from regauge.core.families import Tensors, families
from regauge.core.params import batch_of_one
from regauge.core.remembered import remembered
from regauge.core.symmetry import Symmetry

PORTION_PAIRS = 256
"""The largest number of pairs of networks in a chunk.

Larger chunks are not faster, because they exceed the processor's caches.
"""
PORTION_BYTES = 3 << 23
"""The largest number of bytes of all networks in a chunk, unless a single pair needs more.

Costs need several times as much memory as the networks.
"""


T = TypeVar("T")


@dataclass(frozen=True)
class Climbs:
    """The results of one coordinate ascent for each pair of networks.

    Attributes:
        element: The element at the end of each ascent, as a batch over all groups.
        objective: The objective of `element`.
        history: The objective at the start and after each sweep. For a pair that ended earlier, the last objective is
            repeated.
        is_converged: Whether no group changed in the last sweep.
        moved: Tensors of the second networks after `element` was applied, with the same bits as `Symmetry.act` returns.
    """

    element: Element
    objective: Float64[Tensor, " pair"]
    history: Float64[Tensor, "step pair"]
    is_converged: Bool[Tensor, " pair"]
    moved: Mapping[str, Tensor] = field(default_factory=dict)

    def at(self, rows: Tensor) -> "Climbs":
        """Return the results of the coordinate ascents for the selected pairs of networks."""
        if len(rows) == len(self.objective):
            return self
        return Climbs(
            self.element.rows(rows),
            self.objective[rows],
            self.history[:, rows],
            self.is_converged[rows],
            {name: t[rows.to(t.device)] for name, t in self.moved.items()},
        )

    def but(self, rows: Tensor, other: "Climbs") -> "Climbs":
        """Return a copy in which the coordinate ascents of the pairs `rows` are replaced by `other`."""
        if len(rows) == len(self.objective):
            return other
        steps = max(len(self.history), len(other.history))
        return Climbs(
            self.element.zip(other.element, lambda here, there: here.index_copy(0, rows, there)),
            self.objective.index_copy(0, rows, other.objective),
            extend(self.history, steps).index_copy(1, rows, extend(other.history, steps)),
            self.is_converged.index_copy(0, rows, other.is_converged),
            {n: t.index_copy(0, rows.to(t.device), other.moved[n]) for n, t in self.moved.items() if n in other.moved},
        )

    def lift(self, offset: Tensor) -> "Climbs":
        """Return a copy in which all objectives of a pair are increased by a number, with one number for each pair."""
        return replace(self, objective=self.objective + offset, history=self.history + offset)


def portions(*networks: Mapping[str, Tensor]) -> Iterator[slice]:
    """Yield slices of pairs, small enough for the limits on a chunk. Every tensor must have a leading pair axis."""
    count = len(next(iter(networks[0].values())))
    each = sum(t.numel() * t.element_size() for params in networks for t in params.values()) // max(1, count)
    size = max(1, min(PORTION_PAIRS, PORTION_BYTES // max(1, each)))
    size = math.ceil(count / math.ceil(count / size))
    for first in range(0, count, size):
        yield slice(first, min(count, first + size))


def side_by_side(work: Callable[[slice], T], parts: Sequence[slice]) -> list[T]:
    """Return the results of `work` on all parts, computed in parallel by as many threads as torch uses.

    The operations of an ascent are too small to be divided among threads. Therefore each thread processes its own share
    of the pairs, which is faster. Torch's number of threads is restored afterwards.
    """
    threads = min(torch.get_num_threads(), len(parts))
    if threads < 2:
        return [work(part) for part in parts]
    before, has_gradients = torch.get_num_threads(), torch.is_grad_enabled()

    def one(part: slice) -> T:
        with torch.set_grad_enabled(has_gradients):  # Gradient mode and thread count are per thread.
            return work(part)

    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(one, parts))
    finally:
        torch.set_num_threads(before)


def climb(
    symmetry: Symmetry,
    a: Tensors,
    b: Tensors,
    *,
    start: Element | None = None,
    is_from_barycenter: bool = False,
    max_sweeps: int = 100,
    tolerance: float = 1e-9,
) -> Climbs:
    """Run one coordinate ascent for each pair; see `Ascent` for the objective and the steps.

    Args:
        symmetry: The symmetry. All sizes of its groups must be known.
        a: The compared tensors of the first networks, `[pair, ...]`.
        b: The compared tensors of the second networks.
        start: A batch of initial elements without positive scales. Default: the identity.
        is_from_barycenter: Whether an initial element of every family is chosen before the sweeps, by averaging over
            families without an element.
        max_sweeps: The largest number of sweeps.
        tolerance: A step is taken only if it gains more than this fraction of `sum |a| |b|`.
    """
    ascent = make_ascent(symmetry, a, b, start=start, tolerance=tolerance)
    if is_from_barycenter:
        ascent.start_from_barycenter()
    first = ascent.gained.clone()
    rows, gained = ascent.climb(torch.arange(ascent.pairs), max_sweeps)
    moved = ascent.networks.moved()
    reached = ascent.objectives()
    return Climbs(
        element=ascent.networks.element.fill(symmetry.identity((ascent.pairs,))),
        objective=reached,
        history=reached - (ascent.gained - torch.stack([first, *gained])),
        is_converged=torch.ones(ascent.pairs, dtype=torch.bool).index_fill(0, rows, False),
        moved={n: t.clone() if t is b[n] else t for n, t in moved.items() if is_exact(symmetry, n)},
    )


def make_ascent(
    symmetry: Symmetry, a: Tensors, b: Tensors, *, start: Element | None = None, tolerance: float = 1e-9
) -> Ascent:
    """Return an ascent over all families of a symmetry that act on the given tensors, `[pair, ...]`."""
    around, searches = _neighborhoods(symmetry, tuple(a)), 1
    if all(tensor.device.type != "cpu" for tensor in a.values()):
        from regauge.alignment.engine.searches import count_searches  # matching on a CPU does not need it

        searches = count_searches()
    return Ascent(around, a, b, solve_family, start=start, tolerance=tolerance, searches=searches)


@remembered
def _neighborhoods(symmetry: Symmetry, names: tuple[str, ...]) -> Neighborhoods:
    return Neighborhoods.of(families(symmetry.groups, {name: symmetry.sites[name] for name in names}))


def is_exact(symmetry: Symmetry, name: str) -> bool:
    """Return whether a coordinate ascent transforms a tensor to the same bits as `Symmetry.act`.

    Shifts and rotations would be rounded differently.
    """
    return not any(site.group.matrix != "none" or any(site.placement.shift) for site in symmetry.sites[name])


class Pursuit:
    """Repeated coordinate ascents for one pair of networks, whose first network changes between ascents.

    Every ascent begins at the end of the previous ascent, with the dual variables (potentials) of its assignments. An
    ascent searches only groups that act on changed tensors of the first network. The tensors are the compared tensors,
    without a leading axis of pairs. The initial element `start` may be any element. `changed` contains the names of the
    second network's tensors that the last ascent changed.
    """

    def __init__(self, symmetry: Symmetry, a: Tensors, b: Tensors, start: Element, tolerance: float = 1e-9) -> None:
        self._symmetry, self._start = symmetry, start
        sites = {name: symmetry.sites[name] for name in b}
        placed = _act.act(symmetry.groups, sites, start, b, {name: t.ndim for name, t in b.items()})
        self._ascent = make_ascent(symmetry, batch_of_one(a), batch_of_one(placed), tolerance=tolerance)
        self.changed: set[str] = set()

    def aim_at(self, a: Tensors) -> None:
        """Replace some tensors of the first network, toward which the second network is aligned, by the tensors in
        `a`.
        """
        self._ascent.aim_at(batch_of_one(a))

    def climb(self, max_sweeps: int) -> float:
        """Sweep until no group changes, and return the gain."""
        before, writes = float(self._ascent.gained), dict(self._ascent.networks.writes)
        self._ascent.climb(torch.arange(1), max_sweeps)
        moved = {name for name, count in self._ascent.networks.writes.items() if count != writes[name]}
        sites = self._ascent.networks.sites.items()
        self.changed = {name for name, local in sites if any(site.group.name in moved for site in local)}
        return float(self._ascent.gained) - before

    @property
    def element(self) -> Element:
        """The element that maps the given second network to its current state."""
        found = self._ascent.networks.element.fill(self._symmetry.identity((1,))).item(0)
        return self._symmetry.compose(found, self._start)

    @property
    def first(self) -> dict[str, Tensor]:
        """The tensors of the first network, as of the last call of `aim_at`."""
        return {name: tensor[0] for name, tensor in self._ascent.networks.a.items()}

    @property
    def second(self) -> dict[str, Tensor]:
        """The current tensors of the second network. Later ascents may overwrite the returned tensors."""
        return {name: tensor[0] for name, tensor in self._ascent.networks.second().items()}


@dataclass(frozen=True)
class Fallback:
    """A further coordinate ascent from a known element. The ascent runs for those pairs of networks whose earlier
    ascents all ended below the objective of the known element.

    Attributes:
        worth: The objective of the known element, from which the ascent starts.
        climb: A function that runs the ascent from the known element for the selected pairs.
    """

    worth: Float64[Tensor, " pair"]
    climb: Callable[[Int64[Tensor, " row"]], Climbs]


def ladder(
    climbs: Sequence[Climbs],
    fallbacks: Sequence[Fallback],
    initial: Float64[Tensor, " pair"],
    losses: Callable[[Element], Tensor] | None = None,
) -> tuple[Climbs, Float64[Tensor, "try pair"]]:
    """Choose the best coordinate ascent for each pair, after further ascents for pairs that are not yet as good as a
    known element.

    Args:
        climbs: For every start, one ascent for each pair. Ascents from random starts come last.
        fallbacks: Further ascents, which are tried in the order of the list. The last fallback starts at the identity.
        initial: The objective at the identity.
        losses: A function that returns the task loss of each pair for the elements of ascents. If there are losses and
            several ascents, the loss selects among ascents that are as good as the identity or better. Without losses,
            the ascent with the largest objective is selected.

    Returns:
        The best ascent of each pair, and the objectives that all ascents reached. The objective is NaN for an ascent
        that was not run for a pair.
    """
    ends, first = list(climbs), climbs[0]
    starts = [end.objective for end in ends]
    reached = first.objective
    for fallback in fallbacks:
        rows = (reached < fallback.worth).nonzero().flatten()
        if len(rows):
            found = fallback.climb(rows)
            # The objective of an ascent refers to the norm of its initial networks, which may differ between ascents.
            found = found.lift(fallback.worth[rows] - found.history[0])
            ends.append(first.but(rows, found))
            reached = torch.maximum(reached, ends[-1].objective)
            starts.append(torch.full_like(initial, torch.nan).index_copy(0, rows, found.objective))
    best = ends[0]
    if len(ends) > 1:
        scores = torch.stack([end.objective for end in ends])
        if losses is not None:
            scores = torch.where(scores >= initial, -torch.stack([losses(end.element) for end in ends]), -torch.inf)
        chosen = scores.argmax(0)
        for k, end in enumerate(ends[1:], start=1):
            rows = (chosen == k).nonzero().flatten()
            if len(rows):
                best = best.but(rows, end.at(rows))
    return best, torch.stack(starts)
