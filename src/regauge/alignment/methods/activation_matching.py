"""Activation matching, and mixtures of activation and weight matching."""

from dataclasses import dataclass, replace

import torch

from regauge.alignment.activations.costs import Statistic, Traces, activation_costs, precision_of
from regauge.alignment.engine.ascent import Ascent
from regauge.alignment.engine.balanced import Scales, balanced, require_scales
from regauge.alignment.method import Method, match_each
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.element import Element
from regauge.core.families import compared, dot
from regauge.core.outputs import Outputs
from regauge.core.task import Task

TIES = 1e-4
"""Share of the parameters in activation matching."""
TOLERANCE = 1e-11
"""A step must gain more than this share of the norms involved."""


@dataclass(frozen=True)
class ActivationMatching(Method):
    """The element under which the units of two networks respond most alike to the same inputs.

    It maximizes the sum over all units of the correlation (or covariance) between a unit of the first network and
    the unit, with its sign, that the element puts in its place. All groups that discovery finds take part, with
    what they do to the values that layers read: outputs of activation functions, every state of a residual stream,
    queries, keys and values of attention heads. Values on which a group acts alike are summed. Entries of all other
    axes (images, positions, tokens) are samples; units that a rotation mixes are compared by covariances divided by
    their mean variance, so that the result does not depend on the basis.

    The data are read once, for both networks and all groups; what is held is one matrix of units against units for
    each value. Groups are independent of one another here, so that nothing depends on an order.

    Departure from the papers: where activations leave a choice, the parameters decide, with a share of 1e-4 in the
    objective. Units that never respond, and the sign of a sine unit against half a period, would otherwise be
    chosen arbitrarily, which does harm halfway between the networks.

    Attributes:
        statistic: Pearson's "correlation", in which all units count alike, or "covariance", in which units count
            by how much they vary.
        max_sweeps: Most sweeps over the groups.
        outputs: Which outputs of the module count, as it was given to `discover`.
        scales: As in `WeightMatching`: "balance" brings the second network to the scales of the first; "keep" moves
            values and never multiplies them, but by signs.

    References:
        Li et al. (2016), Convergent learning, section 3; Ainsworth et al. (2023), section 3.1.
    """

    statistic: Statistic = "correlation"
    max_sweeps: int = 100
    outputs: Outputs = None
    scales: Scales = "balance"

    def __post_init__(self) -> None:
        _require_sense(self.statistic, self.max_sweeps, self.scales)

    def match(self, problem: Problem) -> Results:
        """See `align`; the module is traced once for all pairs."""
        return _match(self, problem, TIES)


@dataclass(frozen=True)
class MixedMatching(Method):
    """Activation matching and weight matching in one objective.

    It maximizes

        share * <activations> / reach + (1 - share) * <a, g b> / sum |a| |b|

    where the first term is the objective of `ActivationMatching` divided by what it could be at most (every unit
    correlated perfectly), and the second that of `WeightMatching` divided by its largest value (every tensor of the
    second network parallel to that of the first). Activations are matched first, which is no matter of local optima;
    coordinate ascent on the sum goes on from there. Parameters are compared where the positive scales of both networks
    are balanced, as in `WeightMatching`, and the element brings the second network to the scales of the first.

    On networks that learn the same function with different features the weights alone are a poor guide, most of all
    in residual networks; activations alone ignore how units are connected. The sum is better than either.

    Attributes:
        share: Of the activations, from 0 to 1.
        statistic: As in `ActivationMatching`.
        max_sweeps: Most sweeps over the groups.
        outputs: Which outputs of the module count, as it was given to `discover`.
        scales: As in `WeightMatching`: "balance" brings the second network to the scales of the first; "keep" moves
            values and never multiplies them, but by signs.
    """

    share: float = 0.5
    statistic: Statistic = "correlation"
    max_sweeps: int = 100
    outputs: Outputs = None
    scales: Scales = "balance"

    def __post_init__(self) -> None:
        _require_sense(self.statistic, self.max_sweeps, self.scales)
        if not 0 < self.share < 1:
            raise ValueError(
                f"share is {self.share}, but must lie between 0 and 1; for activations or weights alone use "
                "ActivationMatching or WeightMatching"
            )

    def match(self, problem: Problem) -> Results:
        """See `align`; the module is traced once for all pairs."""
        return _match(self, problem, 1 - self.share)


def _require_sense(statistic: str, max_sweeps: int, scales: str) -> None:
    if statistic not in ("correlation", "covariance"):
        raise ValueError(f"statistic is {statistic!r}; choose 'correlation' or 'covariance'")
    require_scales(scales)
    if max_sweeps < 1:
        raise ValueError(f"max_sweeps is {max_sweeps}, but at least one sweep is needed")


def _match(method: ActivationMatching | MixedMatching, problem: Problem, weight: float) -> Results:
    """Match the pairs one after the other, with the same traces of the module."""
    task = problem.require_task(method)
    traces = Traces(problem.symmetry, task.module, precision_of(problem.a, problem.b), method.outputs)
    return match_each(problem, lambda pair: _match_pair(method, pair, task, weight, traces))


def _match_pair(
    method: ActivationMatching | MixedMatching, problem: Problem, task: Task, weight: float, traces: Traces
) -> Results:
    """Ascent on the mixture, from the best element for the activations alone, or from the identity if it is better."""
    symmetry = problem.symmetry
    params_a, params_b = problem.pair(0)
    costs = activation_costs(
        params_a, params_b, symmetry, task, statistic=method.statistic, outputs=method.outputs, traces=traces
    )
    a, b = compared([params_a, params_b], symmetry)
    frame = balanced(params_a, params_b, a, b, symmetry, scales=method.scales)
    norm = (
        sum(float(torch.linalg.vector_norm(frame.a[k])) * float(torch.linalg.vector_norm(frame.b[k])) for k in a) or 1.0
    )
    # The parameters keep their units, because shifts of periodic units add constants to them.
    ratio = (1 - weight) / weight * norm / (costs.reach or 1.0)
    first = Ascent(costs.symmetry, costs.a, costs.b, tolerance=TOLERANCE)
    _climbed(first, method.max_sweeps)
    target = {**frame.a, **{name: ratio * matrix for name, matrix in costs.a.items()}}
    mixed = Ascent(costs.symmetry, target, {**frame.b, **costs.b}, start=first.element, tolerance=TOLERANCE)
    climb = _climb(mixed, method.max_sweeps)
    climbs = [replace(climb, element=symmetry.compose(frame.back, symmetry.compose(climb.element, frame.scales)))]
    blank = Ascent(costs.symmetry, target, {**frame.original, **costs.b}, tolerance=TOLERANCE)
    # An ascent counts from the norm of where it starts; the identity is worth less if that is the larger one.
    offset = float(frame.identity_objective(symmetry)) - sum(dot(frame.a[k], frame.original[k]) for k in frame.a)
    initial = blank.initial + offset
    if climb.reached < initial:
        climb = _climb(blank, method.max_sweeps)
        element = symmetry.compose(frame.back, symmetry.compose(climb.element, frame.original_scales))
        history = tuple(value + offset for value in climb.history)
        climbs.append(replace(climb, element=element, reached=climb.reached + offset, history=history))
    best = max(climbs, key=lambda climb: climb.reached)
    unit = weight / norm
    return problem.result(
        best.element,
        objective=unit * best.reached,
        initial=unit * initial,
        history=[unit * value for value in best.history],
        starts=[unit * climb.reached for climb in climbs],
        is_converged=best.is_converged,
    )


@dataclass(frozen=True)
class _Climb:
    element: Element
    reached: float
    history: tuple[float, ...]
    is_converged: bool


def _climb(ascent: Ascent, max_sweeps: int) -> _Climb:
    gained, is_converged = _climbed(ascent, max_sweeps)
    reached = ascent.exact_objective()
    return _Climb(ascent.element, reached, tuple(reached - (gained[-1] - gain) for gain in gained), is_converged)


def _climbed(ascent: Ascent, max_sweeps: int) -> tuple[list[float], bool]:
    """Sweep until nothing moves: what was gained after each sweep, and whether it ended."""
    gained, is_moving = [0.0], True
    while is_moving and len(gained) <= max_sweeps:
        is_moving = ascent.sweep()
        gained.append(ascent.gained)
    return gained, not is_moving
