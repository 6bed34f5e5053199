"""Weight matching of many pairs: several climbs for each pair, portion by portion, and the best of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regauge.alignment.engine.balanced import balanced
from regauge.alignment.engine.pair_climbs import PairClimbs, portions, side_by_side
from regauge.alignment.engine.stacks import dots
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results, join
from regauge.core.element import Element
from regauge.core.families import Tensors, compared
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task

Climb = Callable[[Tensors, Tensors, Element | None], PairClimbs]
"""From two batches of networks and where to begin (None: where the method begins by itself) to climbs."""


def match_in_portions(
    problem: Problem, climb: Climb, starts: Sequence[Element | None], *, is_balanced: bool
) -> Results:
    """The best of one climb per start, for every pair; none ends below the identity.

    Args:
        problem: The pairs. Where it has a task and there are several starts, the loss at the midpoint decides between
            the climbs that end at or above the identity; else the objective does.
        climb: Runs one batched climb from a given start.
        starts: Batches of elements, one for each pair, or None.
        is_balanced: Whether networks are brought to their points of smallest norm under positive scales first.
    """

    def match(part: slice) -> Results:
        here = [None if start is None else start.rows(part) for start in starts]
        return _match(problem[part], climb, here, is_balanced)

    parts = list(portions(problem.a, problem.b))
    # A task runs one module, which holds the parameters of one network at a time.
    return join(side_by_side(match, parts) if problem.task is None else [match(part) for part in parts])


def _match(problem: Problem, climb: Climb, starts: Sequence[Element | None], is_balanced: bool) -> Results:
    symmetry, params_a, params_b, pairs = problem.symmetry, problem.a, problem.b, problem.pairs
    a, b = compared([params_a, params_b], symmetry)
    if not a:
        zero = torch.zeros(pairs)
        converged = torch.ones(pairs, dtype=torch.bool)
        return problem.result(
            symmetry.identity((pairs,)), objective=zero, initial=zero, history=zero, is_converged=converged
        )
    frame = balanced(params_a, params_b, a, b, symmetry) if is_balanced else None
    if frame is None:
        initial = worth = _inner_products(a, b)
        climbs = [climb(a, b, start) for start in starts]
    else:
        initial, worth = frame.identity_objective(symmetry), _inner_products(frame.a, frame.b)
        climbs = [climb(frame.a, frame.b, start) for start in starts]
        climbs = [_moved_back(symmetry, found, frame.back, frame.scales) for found in climbs]
    first, home = climbs[0], None if frame is None else (frame.back, frame.scales)
    left, right = (a, b) if frame is None else (frame.a, frame.b)
    reached = [found.objective for found in climbs]
    rows = (first.objective < worth).nonzero().flatten()
    if len(rows):
        climbs.append(first.but(rows, _from_identity(symmetry, climb, left, right, rows, worth, home)))
        reached.append(_only(climbs[-1].objective, rows))
    rows = (torch.stack([found.objective for found in climbs]).amax(0) < initial).nonzero().flatten()
    if frame is not None and len(rows):
        home = (frame.back, frame.original_scales)
        climbs.append(first.but(rows, _from_identity(symmetry, climb, left, frame.original, rows, initial, home)))
        reached.append(_only(climbs[-1].objective, rows))
    best = _best(climbs, initial, params_a, params_b, symmetry, problem.task)
    return problem.result(
        best.element,
        objective=best.objective,
        initial=initial,
        history=best.history,
        starts=torch.stack(reached),
        is_converged=best.is_converged,
        moved=best.moved,
    )


def _only(values: Tensor, rows: Tensor) -> Tensor:
    """The values of some pairs; NaN for others."""
    return torch.full_like(values, torch.nan).index_copy(0, rows, values[rows])


def _from_identity(
    symmetry: Symmetry,
    climb: Climb,
    a: Tensors,
    b: Tensors,
    rows: Tensor,
    worth: Tensor,
    home: tuple[Element, Element] | None,
) -> PairClimbs:
    """Climbs of some pairs from the identity, which is worth so much; `home` leads back from a and b."""
    found = climb(_at(a, rows), _at(b, rows), symmetry.identity((len(rows),)))
    offset = worth[rows] - found.history[0]
    found = replace(found, objective=found.objective + offset, history=found.history + offset)
    return found if home is None else _moved_back(symmetry, found, *(element.rows(rows) for element in home))


def _best(
    climbs: Sequence[PairClimbs],
    initial: Tensor,
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    symmetry: Symmetry,
    task: Task | None,
) -> PairClimbs:
    """For each pair the best climb; those that end below the identity come last."""
    if len(climbs) == 1:
        return climbs[0]
    scores = torch.stack([found.objective for found in climbs])
    if task is not None:
        losses = [_midpoint_losses(found, params_a, params_b, symmetry, task) for found in climbs]
        scores = torch.where(scores >= initial, -torch.stack(losses), -torch.inf)
    chosen = scores.argmax(0)
    best = climbs[0]
    for k, found in enumerate(climbs[1:], start=1):
        rows = (chosen == k).nonzero().flatten()
        if len(rows):
            best = best.but(rows, found.at(rows))
    return best


def _midpoint_losses(
    found: PairClimbs,
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    symmetry: Symmetry,
    task: Task,
) -> Tensor:
    moved = symmetry.act(found.element, params_b)
    pairs = ((_one(params_a, k), _one(moved, k)) for k in range(len(found.objective)))
    return torch.tensor([task.midpoint_loss(x, y) for x, y in pairs], dtype=torch.float64)


def _moved_back(symmetry: Symmetry, found: PairClimbs, back: Element, scales: Element) -> PairClimbs:
    """A climb between balanced networks as one of the networks as they are."""
    element = symmetry.compose(back, symmetry.compose(found.element, scales))
    return replace(found, element=element, moved={})


def _inner_products(a: Tensors, b: Tensors) -> Tensor:
    return torch.stack([dots(a[name], b[name]) for name in a]).sum(0).cpu()


def _one(params: Mapping[str, Tensor], k: int) -> dict[str, Tensor]:
    return {name: tensor[k] for name, tensor in params.items()}


def _at(tensors: Tensors, rows: Tensor) -> dict[str, Tensor]:
    return {name: tensor[rows.to(tensor.device)] for name, tensor in tensors.items()}
