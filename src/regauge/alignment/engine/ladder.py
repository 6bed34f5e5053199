"""The ladder of every method that climbs: from each start, from the identity where that is higher, judged by a task."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from regauge.alignment.engine.climbs import Climbs
from regauge.core.element import Element


@dataclass(frozen=True)
class Fallback:
    """A climb for pairs of which the first climb, and fallbacks so far, ended below the point where it begins.

    Attributes:
        worth: The objective of that point.
        climb: Climbs some pairs from there.
    """

    worth: Float64[Tensor, " pair"]
    climb: Callable[[Int64[Tensor, " row"]], Climbs]


def ladder(
    climbs: Sequence[Climbs],
    fallbacks: Sequence[Fallback],
    initial: Float64[Tensor, " pair"],
    losses: Callable[[Element], Tensor] | None = None,
) -> tuple[Climbs, Float64[Tensor, "try pair"]]:
    """Choose the best of several climbs for each pair, after further climbs for pairs that ended too low.

    Args:
        climbs: One climb for each pair from every start; random starts come last.
        fallbacks: Further climbs, tried in this order. The last one begins at the identity.
        initial: The objective of the identity.
        losses: The task loss of each pair at its element. Where given and there are several climbs, it decides between
            those that end at or above the identity; else the objective decides.

    Returns:
        The best climb of each pair, and what every climb reached; NaN for pairs that did not need it.
    """
    ends, first = list(climbs), climbs[0]
    starts = [end.objective for end in ends]
    reached = first.objective
    for fallback in fallbacks:
        rows = (reached < fallback.worth).nonzero().flatten()
        if len(rows):
            found = fallback.climb(rows)
            # A climb counts from the norm of where it begins, which may be another one.
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
