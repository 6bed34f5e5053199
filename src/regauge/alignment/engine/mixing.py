"""Coordinate ascent on a mixture of activations and weights, for methods that compare both."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from regauge.alignment.engine.climbs import Climbs, Fallback, climb, ladder
from regauge.alignment.engine.frames import Frame
from regauge.alignment.engine.paired_networks import act_on, at, dots, norms
from regauge.alignment.engine.refit import refit_near_copies
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.act import Site
from regauge.core.element import Element
from regauge.core.families import Tensors
from regauge.core.symmetry import Symmetry

MAX_SWEEPS = 20
"""The largest number of sweeps over groups that act on activations, if no sweeps over the mixture follow."""
LEAST_GAIN = 1e-11
"""The smallest gain of a step, as a fraction of the norms of the tensors on which the step acts."""


@dataclass(frozen=True)
class Responses:
    """Tensors of both networks, such as activations, on which the groups of the symmetry act as on parameters.

    Attributes:
        symmetry: The symmetry of the networks, whose groups also have placements on the tensors in `a` and `b`.
        a: The tensors of the first networks, `[pair, ...]`.
        b: The tensors of the second networks.
        reach: An upper bound on the inner product of `a` and `b` after any element has acted on `b`.
    """

    symmetry: Symmetry
    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    reach: Float64[Tensor, " pair"]


def match_mixture(
    problem: Problem,
    frame: Frame,
    found: Responses,
    weight: float,
    max_sweeps: int,
    *,
    is_completed: bool = False,
) -> Results:
    """Find the elements that maximize `(1 - weight) <responses> / reach + weight <a, g b> / sum |a| |b|`.

    The term of the responses is maximized first. If no two groups act on one tensor of responses, the solution for each
    group is exact. Ascent on the sum of both terms continues from the maximizer of the first term, or from the identity
    if the identity is better. If `max_sweeps` is zero, there is no further ascent.

    Responses do not always determine rotations and signs. If `is_completed`, the parameters first determine rotations
    and signs, while permutations of units stay fixed. As in weight matching, groups come first if their cost depends
    little on unknown groups, and tensors are averaged over unknown groups.
    """
    norm = sum((norms(frame.a[name]) * norms(frame.b[name]) for name in frame.a), torch.zeros(problem.pairs).double())
    norm = torch.where(norm == 0, 1.0, norm)
    # The parameters are not rescaled, because shifts of periodic units add constants to them.
    ratio = (1 - weight) / weight * norm / torch.where(found.reach == 0, 1.0, found.reach)
    raised = {name: _times(ratio, tensor) for name, tensor in found.a.items()}
    every = torch.arange(problem.pairs)

    def climb_mixture(rows: Tensor, start: Element | None, *, is_from_original: bool) -> Climbs:
        here = frame.rows(rows) if len(rows) < problem.pairs else frame
        a = {**here.a, **_at(raised, rows)}
        b = {**(here.original() if is_from_original else here.b), **_at(found.b, rows)}
        ended = climb(found.symmetry, a, b, start=start, max_sweeps=max_sweeps, tolerance=LEAST_GAIN)
        return here.lead_back(ended, is_from_original=is_from_original)

    first = None
    if found.a:
        first = climb(found.symmetry, found.a, found.b, max_sweeps=max_sweeps or MAX_SWEEPS, tolerance=LEAST_GAIN)
        first = replace(first, moved={})
    initial = frame.identity_objective() if frame.a else torch.zeros(problem.pairs, dtype=torch.float64)
    initial = initial + sum(dots(raised[name], found.b[name]) for name in raised)
    start = None if first is None else first.element
    if is_completed:
        start = _complete(problem.symmetry, frame.a, frame.b, start)
    climbs = [climb_mixture(every, start, is_from_original=False)]
    if first is not None and not max_sweeps:
        climbs = [replace(climbs[0], is_converged=first.is_converged)]
    fallback = Fallback(initial, lambda rows: climb_mixture(rows, None, is_from_original=True))
    best, starts = ladder(climbs, [fallback], initial)
    unit = weight / norm
    result = problem.result(
        best.element,
        objective=unit * best.objective,
        initial=unit * initial,
        history=unit * best.history,
        starts=unit * starts,
        is_converged=best.is_converged,
        notes=frame.notes,
    )
    return refit_near_copies(problem, result, frame)


def _complete(symmetry: Symmetry, a: Tensors, b: Tensors, start: Element | None) -> Element:
    """Return signs, shifts and matrices that complete an element's permutations.

    A group comes early if its cost depends little on groups that have no value yet.
    """
    groups = tuple(group.unordered for group in symmetry.groups)
    fixed, blank = replace(symmetry, groups=groups), symmetry.identity((len(next(iter(b.values()))),))
    start = blank if start is None else start
    moved = act_on(symmetry.groups, {name: symmetry.sites[name] for name in b}, start, b)
    # Tensors that are only permuted contain no further information. In `climb`, they would count as known parts of
    # costs.
    names = [name for name in a if any(_turns(site) for site in symmetry.sites[name])]
    if not names:
        return start
    left, right = ({name: one[name] for name in names} for one in (a, moved))
    found = climb(fixed, left, right, is_from_barycenter=True, max_sweeps=MAX_SWEEPS, tolerance=LEAST_GAIN).element
    whole = Element({n: replace(found[n], perm=blank[n].perm) if n in found else blank[n] for n in blank}, blank.batch)
    return symmetry.compose(whole, start)


def _turns(site: Site) -> bool:
    """Return whether a group also scales, flips, shifts or rotates the entries of a tensor, instead of only permuting
    them.
    """
    place = site.placement
    return site.group.matrix != "none" or any((*place.sign, *place.parity, *place.shift))


def _times(factors: Tensor, tensor: Tensor) -> Tensor:
    return factors.to(tensor).reshape(-1, *[1] * (tensor.ndim - 1)) * tensor


def _at(tensors: Tensors, rows: Tensor) -> Tensors:
    return {name: at(tensor, rows) for name, tensor in tensors.items()}
