"""Activation matching, and mixtures of activation matching and weight matching."""

from dataclasses import dataclass
from functools import partial

import torch

from regauge.alignment.activations.costs import (
    Statistic,
    Traces,
    activation_costs,
    held_by_values,
    precision_of,
)
from regauge.alignment.engine.frames import Frame, Scales, match_frames
from regauge.alignment.engine.mixing import Responses, match_mixture
from regauge.alignment.method import Method
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results, join
from regauge.checkpoints.job import FileJob
from regauge.core.outputs import Outputs
from regauge.core.params import batch_of_one
from regauge.core.task import Task

RESPONSES = 13
"""The bytes of all matrices of activation statistics, as a multiple of the bytes of the costs in weight matching."""
TIES = 1e-4
"""The weight of parameters in the objective of activation matching, which decides between equally good elements."""


@dataclass(frozen=True)
class ActivationMatching(Method):
    """A method that finds the element for which the units of two networks respond most similarly to the same inputs.

    The objective is a sum over all units of the first network. Each unit contributes its correlation (or covariance, or
    mean product) with the signed unit of the second network that the element assigns to it. All groups that discovery
    finds are optimized, through their action on the values that layers read. The values that layers read include
    outputs of activation functions, all states of a residual stream, and queries, keys and values of attention heads.
    Values on which a group acts in the same way are summed. Entries along all other axes (images, positions, tokens)
    are samples. For correlations, units that a rotation mixes are all divided by the root of their mean variance.
    Therefore the matched element does not depend on the basis of units that a rotation mixes.

    The data are read once, for all networks and groups. For each activation tensor, memory holds one matrix with an
    entry for each pair of units. Groups do not depend on one another in activation matching, so their order has no
    effect.

    The papers maximize the mean product of activations without centering, and do not change scales. For permutations,
    maximizing the mean product minimizes the squared distance between the activations of both networks. With
    `ActivationMatching(statistic="product", scales="keep")`, the method equals the published method. The default
    settings differ from the published method.

    For every statistic, the method departs from the papers. Parameters have a weight of 1e-4 in the objective. The
    small weight matters only between elements that activations do not distinguish. Without parameters, the choice would
    be arbitrary for units that are always zero, and between a sign and a half-period shift of a sine unit. Arbitrary
    choices raise the loss at the midpoint between the networks.

    Attributes:
        statistic: "correlation" (Pearson's) gives all units equal weight. "covariance" gives units with a large
            variance more weight. "product", as published, is the mean product without centering, and weights units by
            their magnitude.
        max_sweeps: The largest number of sweeps over the groups.
        outputs: The outputs of the module to use, as passed to `discover`.
        scales: The treatment of scales, as in `WeightMatching`. "balance" gives the second network the scales of the
            first, except scales that change running statistics. With "recompute", scales that change running statistics
            also stay unchanged in copies of the first network. With "keep", elements only permute entries and multiply
            them by signs.

    References:
        Li et al. (2016), Convergent learning, section 3 (correlations); Ainsworth et al. (2023), Git Re-Basin,
        section 3.1 (products, an assignment problem for each layer).
    """

    copies = 3
    activations = 1
    statistic: Statistic = "correlation"
    max_sweeps: int = 100
    outputs: Outputs = None
    scales: Scales = "balance"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_sweeps < 1:
            raise ValueError(f"max_sweeps is {self.max_sweeps}, but at least one sweep is needed")

    def _phases(self, job: FileJob, task: Task) -> list[tuple[float, int]]:
        batch = int(self.activations * held_by_values(task, job.checkpoints[0].params))
        return [(self.copies, batch + RESPONSES * job.costs + job.searching)]

    def match(self, problem: Problem) -> Results:
        """Match each pair of networks; see `align`. The module is traced once for all pairs."""
        return self._match_weighted(problem, (TIES,))[0]

    def _match_weighted(self, problem: Problem, weights: tuple[float, ...]) -> list[Results]:
        """Return the results for several weights of the parameters. Each pair reads the data once for all weights."""
        task = problem.require_task(self)
        traces = Traces(problem.symmetry, task.module, precision_of(problem.a, problem.b), self.outputs)
        found = [self._match_pair(problem[k : k + 1], task, traces, weights) for k in range(problem.pairs)]
        return [join(results) for results in zip(*found, strict=True)]

    def _match_pair(self, problem: Problem, task: Task, traces: Traces, weights: tuple[float, ...]) -> list[Results]:
        """Run the ascent on activations and parameters, from the identity or from a better element for activations."""
        known: dict[str, Responses] = {}

        def match(weight: float, frame: Frame) -> Results:
            if frame.buffers not in known:
                known.clear()  # Statistics are large, so only those of one frame are held.
                costs = activation_costs(*frame.turnable(*problem.pair(0)), traces, task, self.statistic)
                a, b = batch_of_one(costs.a), batch_of_one(costs.b)
                reach = torch.tensor([costs.reach], dtype=torch.float64)
                known[frame.buffers] = Responses(costs.symmetry, a, b, reach)
            return match_mixture(problem, frame, known[frame.buffers], weight, self.max_sweeps)

        return [match_frames(problem, self.scales, partial(match, weight)) for weight in weights]


@dataclass(frozen=True)
class MixedMatching(ActivationMatching):
    """Activation matching and weight matching combined in one objective.

    The method maximizes

        share * <activations> / reach + (1 - share) * <a, g b> / sum |a| |b|

    The first term is the objective of `ActivationMatching` divided by its largest possible value, where every unit has
    a perfectly correlated partner. The second term is the objective of `WeightMatching` divided by its largest possible
    value, where every tensor of the second network is parallel to that of the first. Activations are matched first,
    because matching them has no local optima. Coordinate ascent on the sum of both terms continues from the element for
    activations. Parameters are compared after the positive scales of both networks are balanced, as in
    `WeightMatching`. The element gives the second network the scales of the first.

    If networks compute the same function with different features, weights alone match units poorly, especially in
    residual networks. Activations alone ignore the connections between units. The sum of both terms gives better
    matches than either term alone.

    Attributes:
        share: The weight of the activations, from 0 to 1. All other settings are those of `ActivationMatching`.
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share < 1:
            raise ValueError(
                f"share is {self.share}, but must lie between 0 and 1; for activations or weights alone use "
                "ActivationMatching or WeightMatching"
            )

    def match(self, problem: Problem) -> Results:
        """Match each pair of networks; see `align`. The module is traced once for all pairs."""
        return self._match_weighted(problem, (1 - self.share,))[0]
