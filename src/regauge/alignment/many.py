"""What methods for many networks share: their objective, and the choice between climbs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from regauge.alignment.problem import ManyProblem
from regauge.alignment.result import ManyResult
from regauge.core import act as _act
from regauge.core.element import Element
from regauge.core.families import Tensors, compared, dot
from regauge.core.interpolation import mean
from regauge.core.scales import balance
from regauge.core.symmetry import Symmetry


@dataclass(frozen=True)
class Climb:
    """Where one climb ended."""

    elements: tuple[Element, ...]
    objective: float
    history: tuple[float, ...]
    is_converged: bool


def best_climb(
    problem: ManyProblem,
    scales: Literal["balance", "keep"],
    climbs_from: Callable[[Sequence[Tensors]], Sequence[Climb]],
    climb_from_identity: Callable[[Sequence[Tensors]], Climb],
) -> ManyResult:
    """What methods have in common: balanced scales, the choice between climbs, the identity as a last resort.

    With "balance" the networks are compared at the points of smallest norm on their orbits under positive scales,
    as `WeightMatching` does; all of them take over the scales of the first network.

    Args:
        problem: The networks as given. A task chooses between the climbs that end at or above the identities, by the
            loss of the plain mean.
        scales: Whether to balance.
        climbs_from: Climbs between networks of which only what counts is left.
        climb_from_identity: One more, from the identities; it never falls below where it begins.
    """
    networks, symmetry, task = problem.networks, problem.symmetry, problem.task
    tensors = compared(networks, symmetry)
    start, factors = tensors, [symmetry.identity()] * len(tensors)
    if scales == "balance" and any(group.scales for group in symmetry.groups):
        factors = [balance(network, symmetry, buffers="keep") for network in networks]
        start = [move(symmetry, factors[0], network) for network in tensors]
        tensors = [move(symmetry, factor, network) for factor, network in zip(factors, tensors, strict=True)]
    initial = universe_objective(start, tensors, symmetry)
    ends = [(climb, _as_given(symmetry, climb.elements, factors)) for climb in climbs_from(tensors)]
    if max(climb.objective for climb, _ in ends) < initial:
        climb = climb_from_identity(start)
        offset = initial - universe_objective(start, start, symmetry)
        history = tuple(value + offset for value in climb.history)
        climb = Climb(climb.elements, climb.objective + offset, history, climb.is_converged)
        ends.append((climb, _as_given(symmetry, climb.elements, [factors[0]] * len(tensors))))
    best, elements = max(ends, key=lambda end: end[0].objective)
    if task is not None and len(ends) > 1:

        def mean_loss(end: tuple[Climb, tuple[Element, ...]]) -> float:
            moved = [symmetry.act(element, network) for element, network in zip(end[1], networks, strict=True)]
            return task.evaluate(mean(moved))["loss"]

        candidates = [end for end in ends if end[0].objective >= initial]
        best, elements = min(candidates, key=mean_loss)
    return problem.result(
        elements,
        objective=best.objective,
        initial=initial,
        history=best.history,
        is_converged=best.is_converged,
        starts=[climb.objective for climb, _ in ends],
    )


def universe_objective(moved: Sequence[Tensors], networks: Sequence[Tensors], symmetry: Symmetry) -> float:
    """How close networks are to one another, the sum over unordered pairs.

        U = sum_{i < j} <x_i, x_j> - (K - 1) / 2 sum_i (|x_i|^2 - |p_i|^2)

    Each pair contributes its inner product, or half its negative squared distance up to a constant: the two
    differ only where shifts and scales change norms. It is summed over networks, not over pairs.

    Args:
        moved: The networks x_i where they are compared.
        networks: The same before they were moved, p_i.
        symmetry: Tells which tensors are shifted or scaled.
    """
    total = 0.0
    for name in moved[0]:
        before = moved[0][name]
        for network in moved[1:]:
            total += dot(before, network[name])
            before = before + network[name]
        if any(any((*site.placement.scale, *site.placement.shift)) for site in symmetry.sites[name]):
            excess = sum(dot(x[name], x[name]) - dot(p[name], p[name]) for x, p in zip(moved, networks, strict=True))
            total -= (len(networks) - 1) / 2 * excess
    return total


def move(symmetry: Symmetry, element: Element, tensors: Tensors) -> dict[str, Tensor]:
    """The action on some of the tensors of a network."""
    sites = {name: symmetry.sites[name] for name in tensors}
    return _act.act(symmetry.groups, sites, element, tensors, {name: t.ndim for name, t in tensors.items()})


def _as_given(symmetry: Symmetry, elements: Sequence[Element], factors: Sequence[Element]) -> tuple[Element, ...]:
    """Elements of scaled networks as elements of the networks as given, the first of which stays where it is."""
    back = symmetry.inverse(symmetry.compose(elements[0], factors[0]))
    pairs = list(zip(elements, factors, strict=True))[1:]
    return (
        symmetry.identity(),
        *(symmetry.compose(back, symmetry.compose(element, factor)) for element, factor in pairs),
    )
