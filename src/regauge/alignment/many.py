"""The objective of methods that align many networks, and the choice of the best of several coordinate ascents."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regauge.alignment.engine.climbs import Climbs, Fallback, ladder
from regauge.alignment.engine.frames import (
    Scales,
    are_moved_copies,
    balances_of,
    have_equal_variances,
    is_stretched,
    move_by,
    notes_on,
)
from regauge.alignment.engine.refit import refit
from regauge.alignment.problem import ManyProblem
from regauge.alignment.result import ManyResult
from regauge.core import act as _act
from regauge.core.balance import Buffers, balance_alike, has_balance
from regauge.core.element import Element, concatenate, stack
from regauge.core.families import Tensors, compared, dot
from regauge.core.interpolation import mean
from regauge.core.params import batch_of_one
from regauge.core.symmetry import Symmetry


def best_universe(
    problem: ManyProblem,
    scales: Scales,
    climbs_from: Callable[[Sequence[Tensors]], Sequence[Climbs]],
    climb_from_identity: Callable[[Sequence[Tensors]], Climbs],
) -> ManyResult:
    """Balance the networks, run several coordinate ascents, and return the best result. If no result is better than
    identity elements, return identity elements.

    Unless scales are kept, networks are compared as the networks of smallest norm on their orbits, as in
    `WeightMatching`. The smallest norm is taken over positive scales and invertible matrices. All networks get the
    scales and matrices of the first network.

    Args:
        problem: The networks as given. If there is a task, the loss of the mean network selects among ascents that are
            at least as good as the identity elements.
        scales: The treatment of scales, as in `WeightMatching`.
        climbs_from: Functions that run one ascent on the compared tensors of all networks; see `one_climb`.
        climb_from_identity: One more ascent, which starts at the identity elements. The objective of the ascent from
            the identity never falls below the initial value.
    """
    networks, symmetry = problem.networks, problem.symmetry
    ways = balances_of(symmetry, scales, problem.task)
    if not ways:
        blank = symmetry.identity((len(networks),))
        return _universe(problem, blank, climbs_from, climb_from_identity)

    def match(buffers: Buffers) -> ManyResult:
        balanced = balance_alike(networks, symmetry, buffers=buffers)
        factors = stack([one.element for one in balanced])
        best = _universe(problem, factors, climbs_from, climb_from_identity)
        return _refit(problem, best, buffers, {name: flags.reshape(1) for name, flags in balanced[0].rigid.items()})

    found = match("keep")
    first, *given = (batch_of_one(network) for network in networks)
    if "move" not in ways or not all(bool(have_equal_variances(symmetry, first, network)) for network in given):
        return found
    # As in `match_frames`: if all networks are copies of the first, their statistics are transformed too.
    other = match("move")
    pairs = zip(found.params[1:], other.params[1:], strict=True)
    copies = (are_moved_copies(symmetry, first, batch_of_one(kept), batch_of_one(moved)) for kept, moved in pairs)
    return other if all(bool(is_copy) for is_copy in copies) else found


def _refit(problem: ManyProblem, found: ManyResult, buffers: Buffers, rigid: Mapping[str, Tensor]) -> ManyResult:
    """Fit networks that nearly equal the first network to it; see `regauge.alignment.engine.refit`."""
    elements, params, is_fitted = list(found.elements), list(found.params), []
    first = batch_of_one(params[0])
    for k, other in enumerate(params[1:], start=1):
        element, is_closer = refit(problem.symmetry, buffers, first, batch_of_one(other))
        is_fitted.append(bool(is_closer))
        if is_fitted[-1]:
            elements[k] = problem.symmetry.compose(element.item(0), elements[k])
            params[k] = problem.symmetry.act(elements[k], problem.networks[k])
    notes = () if is_fitted and all(is_fitted) else notes_on(rigid)
    return replace(found, element=stack(elements), params=tuple(params), notes=notes)


def _universe(
    problem: ManyProblem,
    factors: Element,
    climbs_from: Callable[[Sequence[Tensors]], Sequence[Climbs]],
    climb_from_identity: Callable[[Sequence[Tensors]], Climbs],
) -> ManyResult:
    """Return the best elements for networks that are compared after the scales and matrices in `factors` have acted on
    them.
    """
    networks, symmetry, task = problem.networks, problem.symmetry, problem.task
    given = tensors = compared(networks, symmetry)
    if has_balance(symmetry):
        tensors = [move_by(symmetry, factors.item(k), network) for k, network in enumerate(given)]

    def as_first(names: Iterable[str]) -> list[Tensors]:
        """Return tensors of all networks with the scales of the first network: the element that balances the first
        network has acted on each network.
        """
        own: list[Tensors] = [{name: network[name] for name in names} for network in given]
        if not has_balance(symmetry):
            return own
        return [move_by(symmetry, factors.item(0), one) for one in own]

    def lead_back(found: Climbs, factors: Element = factors) -> Climbs:
        """Convert elements that act on balanced networks to elements that act on the given networks.

        The first network stays unchanged by the converted elements.
        """
        elements = symmetry.compose(found.element.map(lambda t: t[0], (len(networks),)), factors)
        elements = symmetry.compose(symmetry.inverse(elements.item(0)), elements)
        return replace(
            found, element=_in_one_row(concatenate([symmetry.identity((1,)), elements.rows(slice(1, None))]))
        )

    def from_identity(rows: Tensor) -> Climbs:
        return lead_back(
            climb_from_identity(as_first(given[0])), factors.rows(torch.zeros(len(networks), dtype=torch.int64))
        )

    def mean_loss(elements: Element) -> Tensor:
        moved = [symmetry.act(elements.item(0, k), network) for k, network in enumerate(networks)]
        assert task is not None
        return torch.tensor([task.evaluate(mean(moved))["loss"]], dtype=torch.float64)

    objective = sum(universe_objective(as_first([name]), tensors, symmetry) for name in given[0])
    initial = torch.tensor([objective], dtype=torch.float64)
    climbs = [lead_back(found) for found in climbs_from(tensors)]
    best, starts = ladder(climbs, [Fallback(initial, from_identity)], initial, None if task is None else mean_loss)
    return problem.result(
        [best.element.item(0, k) for k in range(len(networks))],
        objective=float(best.objective),
        initial=float(initial),
        history=best.history[:, 0].tolist(),
        is_converged=bool(best.is_converged),
        starts=[value for value in starts[:, 0].tolist() if value == value],
    )


def one_climb(elements: Sequence[Element], history: Sequence[float], *, is_converged: bool) -> Climbs:
    """Return a single ascent over many networks as a batch of size one."""
    return Climbs(
        element=_in_one_row(stack(elements)),
        objective=torch.tensor(history[-1:], dtype=torch.float64),
        history=torch.tensor(history, dtype=torch.float64).unsqueeze(1),
        is_converged=torch.tensor([is_converged]),
    )


def _in_one_row(elements: Element) -> Element:
    return elements.map(lambda t: t.unsqueeze(0), (1, *elements.batch))


def universe_objective(moved: Sequence[Tensors], networks: Sequence[Tensors], symmetry: Symmetry) -> float:
    """Return the objective of many networks: their similarity, summed over unordered pairs.

        U = sum_{i < j} <x_i, x_j> - (K - 1) / 2 sum_i (|x_i|^2 - |p_i|^2)

    Each pair contributes its inner product or, equivalently up to a constant, minus half of its squared distance. Inner
    products and squared distances differ only if shifts, scales or matrices change norms. The objective is computed as
    a sum over networks instead of pairs. `networks` contains the networks p_i, and `moved` contains the transformed
    networks x_i.
    """
    total = 0.0
    for name in moved[0]:
        before = moved[0][name]
        for network in moved[1:]:
            total += dot(before, network[name])
            before = before + network[name]
        if is_stretched(symmetry, name):
            excess = sum(dot(x[name], x[name]) - dot(p[name], p[name]) for x, p in zip(moved, networks, strict=True))
            total -= (len(networks) - 1) / 2 * excess
    return total


def move(symmetry: Symmetry, element: Element, tensors: Tensors) -> dict[str, Tensor]:
    """Return some tensors of a network after an element was applied."""
    sites = {name: symmetry.sites[name] for name in tensors}
    return _act.act(symmetry.groups, sites, element, tensors, {name: t.ndim for name, t in tensors.items()})
