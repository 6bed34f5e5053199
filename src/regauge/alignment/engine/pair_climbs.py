"""Climbs of many pairs at once, in portions that bound the memory, and the best of several for each pair."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from regauge.alignment.engine.batched import BatchAscent
from regauge.alignment.engine.blocks import solve_family
from regauge.core.element import Element
from regauge.core.families import Tensors, families
from regauge.core.symmetry import Symmetry

PORTION_PAIRS = 256
"""Most pairs at a time: beyond this nothing is gained, and the caches are left."""
PORTION_BYTES = 1 << 26
"""Most bytes of both networks of the pairs at a time, unless one pair has more; costs take a few times that."""


T = TypeVar("T")


@dataclass(frozen=True)
class PairClimbs:
    """One climb for each pair.

    Attributes:
        element: Where it ended, a batch over all groups.
        objective: There, float64 `[pairs]`.
        history: At its start and after each sweep, float64 `[sweeps + 1, pairs]`.
        sweeps: How many sweeps it took, int64 `[pairs]`.
        is_converged: Whether nothing moved in the last one, bool `[pairs]`.
        moved: Tensors of the second networks where the action would give the same bits.
    """

    element: Element
    objective: Tensor
    history: Tensor
    sweeps: Tensor
    is_converged: Tensor
    moved: Mapping[str, Tensor]

    def at(self, rows: Tensor) -> "PairClimbs":
        """The climbs of some pairs."""
        return PairClimbs(
            self.element.rows(rows),
            self.objective[rows],
            self.history[:, rows],
            self.sweeps[rows],
            self.is_converged[rows],
            {name: t[rows] for name, t in self.moved.items()},
        )

    def but(self, rows: Tensor, other: "PairClimbs") -> "PairClimbs":
        """These climbs, with those of the pairs `rows` replaced by `other`."""
        steps = max(len(self.history), len(other.history))
        history = padded(self.history, steps)
        history[:, rows] = padded(other.history, steps)
        return PairClimbs(
            self.element.zip(other.element, lambda here, there: here.index_copy(0, rows, there)),
            self.objective.index_copy(0, rows, other.objective),
            history,
            self.sweeps.index_copy(0, rows, other.sweeps),
            self.is_converged.index_copy(0, rows, other.is_converged),
            {n: t.index_copy(0, rows, other.moved[n]) for n, t in self.moved.items() if n in other.moved},
        )


def portions(*networks: Mapping[str, Tensor]) -> Iterator[slice]:
    """Slices of pairs that bound what is held at a time; every tensor has a leading axis of pairs."""
    count = len(next(iter(networks[0].values())))
    each = sum(t[0].numel() * t.element_size() for params in networks for t in params.values())
    size = max(1, min(PORTION_PAIRS, PORTION_BYTES // max(1, each)))
    size = math.ceil(count / math.ceil(count / size))
    for first in range(0, count, size):
        yield slice(first, min(count, first + size))


def side_by_side(work: Callable[[slice], T], parts: Sequence[slice]) -> list[T]:
    """The results of `work` on all parts, as many at a time as torch has threads, each with one.

    The operations of a climb are too small to be shared among threads: two that climb with different pairs are
    faster. The number of threads is what it was, afterwards.
    """
    threads = min(torch.get_num_threads(), len(parts))
    if threads < 2:
        return [work(part) for part in parts]
    before, has_gradients = torch.get_num_threads(), torch.is_grad_enabled()

    def one(part: slice) -> T:
        with torch.set_grad_enabled(has_gradients):  # Each thread has a mode, and a number of threads, of its own.
            return work(part)

    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(one, parts))
    finally:
        torch.set_num_threads(before)


def climb_pairs(
    symmetry: Symmetry,
    a: Tensors,
    b: Tensors,
    *,
    start: Element | None,
    is_from_barycentre: bool,
    max_sweeps: int,
    tolerance: float,
) -> PairClimbs:
    """Climb with all pairs at once; see `Ascent` for the objective and the steps.

    Args:
        symmetry: With every size known.
        a: Tensors of the first networks that count, `[pair, ...]`.
        b: The same of the second.
        start: A batch of elements; the identity unless given.
        is_from_barycentre: Choose every family once with unknown ones averaged, before the sweeps.
        max_sweeps: Most sweeps.
        tolerance: A step must gain more than this share of `sum |a| |b|`.
    """
    a, b = ({name: tensor.cpu() for name, tensor in tensors.items()} for tensors in (a, b))
    known = families(symmetry.groups, {name: symmetry.sites[name] for name in a})
    ascent = BatchAscent(known, a, b, solve_family, start=start, tolerance=tolerance)
    if is_from_barycentre:
        ascent.start_from_barycentre()
    gained = [ascent.gained.clone()]
    sweeps = torch.zeros(ascent.pairs, dtype=torch.int64)
    rows = torch.arange(ascent.pairs)
    while len(rows) and len(gained) <= max_sweeps:
        is_moving = ascent.sweep(rows)
        sweeps[rows] += 1
        gained.append(ascent.gained.clone())
        rows = rows[is_moving]
    moved = ascent.stacks.moved()
    reached = ascent.stacks.objectives_of(moved) + ascent.stacks.rest
    element = ascent.stacks.element.fill(symmetry.identity((ascent.pairs,)))
    is_exact = {
        name: not any(site.group.matrix != "none" or any(site.placement.shift) for site in symmetry.sites[name])
        for name in moved
    }
    return PairClimbs(
        element=element,
        objective=reached,
        history=reached - (ascent.gained - torch.stack(gained)),
        sweeps=sweeps,
        is_converged=torch.ones(ascent.pairs, dtype=torch.bool).index_fill(0, rows, False),
        moved={name: tensor for name, tensor in moved.items() if is_exact[name]},
    )


def padded(history: Tensor, steps: int) -> Tensor:
    """A copy with the last row repeated until there are `steps` rows."""
    return torch.cat([history, history[-1:].expand(steps - len(history), -1)])
