"""Barriers between all pairs of networks, many midpoints in one call."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regauge.alignment import align_pairs
from regauge.alignment.method import Method
from regauge.core.interpolation import interpolate
from regauge.core.params import Params, count_models, select
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.zoo.populations.orbit_distances import PairBlock, is_mutual, pair_matrix, require_same_architecture

ALONE = (nn.modules.conv._ConvNd, nn.RNNBase)
"""Networks with such a part are evaluated alone: stacked, convolutions are slower on a CPU, recurrence impossible."""


@dataclass(frozen=True)
class Barriers:
    """The barrier on the straight line between each network of one population and each of another.

    Entry (i, j) is what `rg.line` calls the barrier: the largest excess of the loss over the straight line between the
    end losses, never negative. It is NaN where a loss is. With a symmetry, each pair is aligned first, by a method with
    other optima the other way round in the better of both directions; moving both ends of a line alike changes no loss
    on it, so the matrix of the exchanged populations is the transpose. For the barriers in a population that was
    aligned as a whole, give that population and no symmetry.

    Attributes:
        task: Model, data and loss; its `prepare` is applied to every network between the ends.
        symmetry: The symmetry of the architecture; the networks are taken as they are unless given.
        points: Networks on each line, ends included; three are the midpoint alone, as in the paper's figure.
        method: The method that aligns pairs; `WeightMatching()` unless given.
        seed: The seed of the method's generator.
        at_once: Networks that are evaluated together; the activations of all are in memory.

    References:
        Erdogan (2025), section 7.2 and figure 7.2.
    """

    task: Task
    symmetry: Symmetry | None = None
    points: int = 3
    method: Method | None = None
    seed: int = 0
    at_once: int = 64

    def __post_init__(self) -> None:
        if self.points < 3 or self.at_once < 1:
            raise ValueError(
                f"points={self.points}, at_once={self.at_once}: a line needs both ends and a point between them, and "
                "at least one network is evaluated at a time"
            )
        if self.symmetry is None and self.method is not None:
            raise ValueError("a method is for aligning pairs, which needs a symmetry; give one, or leave it out")

    def __call__(self, first: Params, second: Params) -> Tensor:
        """The matrix, float64 `[n, m]`; half of it is computed where both are the same object.

        Raises:
            ValueError: The networks are of different architectures, or cannot be aligned.
        """
        require_same_architecture(first, second)
        ends_first = self._losses(first)
        ends_second = ends_first if first is second else self._losses(second)
        generator = torch.Generator().manual_seed(self.seed)

        def compare(pairs: PairBlock) -> Tensor:
            a, b = pairs.first, pairs.second
            if self.symmetry is not None:
                a, b = _align_both_ways(pairs, self.symmetry, self.method, generator)
            excess = torch.zeros(len(pairs.i), dtype=torch.float64)
            for k in range(1, self.points - 1):
                t = k / (self.points - 1)
                chord = (1 - t) * ends_first[pairs.i] + t * ends_second[pairs.j]
                excess = torch.maximum(excess, self._losses(interpolate(a, b, t), is_between=True) - chord)
            return excess

        return pair_matrix(first, second, compare)

    def _losses(self, params: Params, *, is_between: bool = False) -> Tensor:
        """The loss of every network, float64 on the CPU."""
        count, prepare = count_models(params), self.task.prepare if is_between else None
        if prepare is not None or any(isinstance(part, ALONE) for part in self.task.module.modules()):
            networks = (select(params, k) for k in range(count))
            ready = networks if prepare is None else map(prepare, networks)
            return torch.tensor([self.task.evaluate(one)["loss"] for one in ready], dtype=torch.float64)
        parts = torch.split(torch.arange(count), self.at_once) if count else ()
        losses = [self.task.evaluate_each(select(params, part))["loss"] for part in parts]
        return torch.cat(losses).double().cpu() if losses else torch.zeros(0, dtype=torch.float64)


def mean_barrier(matrix: Tensor) -> tuple[float, float]:
    """Mean and standard deviation over the pairs of different networks, NaN left out."""
    n = len(matrix)
    values = matrix[tuple(torch.triu_indices(n, n, 1))]
    values = values[~values.isnan()]
    return float(values.mean()), float(values.std(correction=0))


def _align_both_ways(
    pairs: PairBlock, symmetry: Symmetry, method: Method | None, generator: torch.Generator | None
) -> tuple[Params, Params]:
    """Align the second network of each pair to the first, or the first to the second if that gains more.

    Exchanging the populations exchanges the results, up to motions of both networks of a pair alike.
    """
    there = align_pairs(pairs.first, pairs.second, symmetry, method=method, generator=generator)
    if is_mutual(method):
        return pairs.first, there.params
    back = align_pairs(pairs.second, pairs.first, symmetry, method=method, generator=generator)
    is_back = back.objective > there.objective
    return _where(is_back, back.params, pairs.first), _where(is_back, pairs.second, there.params)


def _where(mask: Tensor, yes: Params, no: Params) -> Params:
    return {name: torch.where(mask.view(-1, *[1] * (x.ndim - 1)).to(x.device), x, no[name]) for name, x in yes.items()}
