"""Losses for matchers: recognition of changed copies, loss on linear paths, and distance of networks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regauge.alignment.engine.frames import Frame
from regauge.alignment.engine.mixing import match_mixture
from regauge.alignment.engine.paired_networks import act_on
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.element import Element
from regauge.core.interpolation import interpolate
from regauge.core.params import Params, select
from regauge.core.symmetry import Symmetry
from regauge.core.task import Batch, Task
from regauge.learn.learn_configs import LineKind
from regauge.learn.learned_matching import TIES, completing
from regauge.learn.soft_matching import SoftMoves, copy_loss, relative_distances
from regauge.learn.unit_vectors import Placed, length_of, place, read_vectors, responses
from regauge.weightspace.metanet import Metanet

MOST_SHARP, START = 100.0, 20.0
"""The upper bound and the initial value of the factor of cosines. With larger factors, plans have useless gradients."""
KEPT = 1 << 27
"""The number of features of pairs of units, over all layers, that are kept for gradients at once: a few gigabytes."""
RATE = 10.0
"""The learning rate of the sharpness, relative to the learning rate of other parameters."""


class Siamese(nn.Module):
    """The net that reads the two networks of a pair, and the factor by which cosines of the net's vectors are
    multiplied.
    """

    def __init__(self, net: Metanet) -> None:
        super().__init__()
        self.net = net
        self.raw = nn.Parameter(torch.logit(torch.tensor(START / MOST_SHARP)) / RATE)

    @property
    def sharpness(self) -> Tensor:
        """The factor by which cosines are multiplied, an inverse temperature of plans; at most `MOST_SHARP`."""
        return MOST_SHARP * (RATE * self.raw).sigmoid()


@dataclass(frozen=True)
class LossWeights:
    """The weight of each loss; a weight of zero disables the loss."""

    supervised: float
    line: float
    distance: float


@dataclass(frozen=True, eq=False)
class Copies:
    """Changed copies of networks, and the elements that transformed the copies. Without transformations, the elements
    are None.
    """

    params: Mapping[str, Tensor]
    element: Element | None


@dataclass(frozen=True, eq=False)
class Losses:
    """The losses for one architecture and one layout, that is, for one set of tensor shapes.

    Attributes:
        siamese: The net that is trained.
        symmetry: The symmetry of the networks, in which the size of every group is known.
        weights: The weights of the losses.
        task: The task that defines the loss on the linear path; None for no task.
        line: The loss that is minimized on the linear path.
        tolerance: The largest error of a plan's row and column sums.
        max_iterations: The largest number of Sinkhorn iterations.
    """

    siamese: Siamese
    symmetry: Symmetry
    weights: LossWeights
    task: Task | None
    line: LineKind
    tolerance: float
    max_iterations: int

    def placed(self, params: Mapping[str, Tensor]) -> Placed:
        """Return the vectors of networks as tensors on which the groups of the symmetry act."""
        net = self.siamese.net
        return place(self.symmetry, net.layout_of(params), length_of(net))

    def step(
        self,
        first: Mapping[str, Tensor],
        second: Mapping[str, Tensor] | None,
        copies: Copies | None,
        batch: Batch | None,
        chance: torch.Generator,
    ) -> Tensor:
        """Return the mean training loss of some networks, `[models, ...]`.

        Args:
            first: The networks.
            second: The partner of each network; if None, the next network in `first`.
            copies: Copies of the networks in `first`, if the net must recognize copies.
            batch: A batch of the task, for the loss on the linear path.
            chance: Random generator of the points on the paths.
        """
        placed, sharpness, count = self.placed(first), self.siamese.sharpness, _count(first)
        needs_pairs = bool(self.weights.distance or (self.weights.line and batch is not None))
        several = [first]
        several += [second] if second is not None and needs_pairs else []
        several += [copies.params] if copies is not None else []
        joined = dict(first) if len(several) == 1 else {n: torch.cat([one[n] for one in several]) for n in first}
        vectors = self.read(joined, placed)
        own = select(vectors, slice(0, count))
        total = 0.0 * sharpness
        if copies is not None:
            found = select(vectors, slice(-count, None))
            if copies.element is not None:
                found = _move(placed, self.symmetry.inverse(copies.element), found)
            total = total + self.weights.supervised * copy_loss(placed, own, found, sharpness)
        if not needs_pairs:
            return total
        if second is None:
            order = (torch.arange(count) + _shift(count, chance)) % count
            second, theirs = select(first, order), select(vectors, order)
        else:
            theirs = select(vectors, slice(count, 2 * count))
        return total + self.between(placed, (first, own), (second, theirs), batch, chance)

    def read(self, params: Mapping[str, Tensor], placed: Placed) -> dict[str, Tensor]:
        """Return the vectors of networks.

        To save memory, large populations are read in chunks, and the net reads each chunk again to compute gradients.
        """
        net, count = self.siamese.net, _count(params)
        settings, layout = net.settings, net.layout_of(params)
        pairs = sum(math.prod(block.sizes) for block in layout.pair_blocks) if settings.layer.traits.keeps_pairs else 0
        size = max(1, KEPT // max(1, settings.depth * settings.width * pairs))
        if count <= size or not torch.is_grad_enabled():
            return read_vectors(net, params, placed)
        groups = [select(params, slice(start, start + size)) for start in range(0, count, size)]
        made = [checkpoint(read_vectors, net, group, placed, use_reentrant=False) for group in groups]
        return {name: torch.cat([one[name] for one in made]) for name in made[0]}

    def between(
        self,
        placed: Placed,
        a: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
        b: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
        batch: Batch | None,
        chance: torch.Generator,
    ) -> Tensor:
        """Return the mean loss of pairs of networks, given their vectors: distance plus loss on the linear path."""
        with torch.no_grad():
            hard = match_vectors(Problem(a[0], b[0], self.symmetry, self.task), placed, a[1], b[1])
        theirs = _move(placed, hard.element, b[1])
        left, right = ({n: t for n, t in one.items() if t.is_floating_point()} for one in (a[0], hard.params))
        moves = SoftMoves(placed, self.symmetry, right, tolerance=self.tolerance, max_iterations=self.max_iterations)
        moved = moves(a[1], theirs, right, self.siamese.sharpness)
        # Plans also transform running statistics, but operators do not differentiate with respect to them.
        moved = {name: t.detach() if name in self.symmetry.buffers else t for name, t in moved.items()}
        total = 0.0 * self.siamese.sharpness
        if self.weights.distance:
            names = [name for name in left if name in self.symmetry.sites and name not in self.symmetry.buffers]
            total = total + self.weights.distance * relative_distances({n: left[n] for n in names}, moved).mean()
        if self.weights.line and batch is not None:
            where = torch.rand(_count(left), generator=chance)
            total = total + self.weights.line * self.on_line({**a[0], **left}, {**hard.params, **moved}, where, batch)
        return total

    def on_line(self, a: Params, b: Params, where: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of the pairs, each at a point on the path between its networks, or the mean of `excess`
        at the chosen points.
        """
        assert self.task is not None
        between = {name: t.to(a[name].dtype) for name, t in interpolate(a, b, where).items()}
        if self.line == "loss":
            task = self.task
            return torch.func.vmap(lambda params: task.loss(params, batch))(between).mean()
        return self.excess(a, b, between, where, batch).mean()

    def excess(self, a: Params, b: Params, between: Params, where: Tensor, batch: Batch) -> Tensor:
        """Return each pair's mean squared difference between the outputs of `between` and the interpolated outputs."""
        task = self.task
        assert task is not None
        run = torch.func.vmap(lambda params: task.run(params, batch[0]))
        with torch.no_grad():
            left, right = run(a), run({name: t.detach() for name, t in b.items()})
        share = where.to(left).reshape(-1, *[1] * (left.ndim - 1))
        return (run(between) - (1 - share) * left - share * right).square().flatten(1).mean(1)

    def midpoint_excesses(self, a: Params, moved: Params) -> Tensor | None:
        """Return the loss at the midpoint of two networks minus the mean of the two networks' losses; None without a
        task.
        """
        if self.task is None:
            return None
        pairs = range(_count(a))
        if self.line == "outputs":
            half = torch.full((_count(a),), 0.5)
            middle = interpolate(a, moved, 0.5)
            return torch.stack([self.excess(a, moved, middle, half, batch) for batch in self.task.batches]).mean(0)
        ends = [[self.task.evaluate_average(select(one, k))["loss"] for one in (a, moved)] for k in pairs]
        halfway = [self.task.midpoint_loss(select(a, k), select(moved, k)) for k in pairs]
        return torch.tensor(halfway, dtype=torch.float64) - torch.tensor(ends, dtype=torch.float64).mean(1)


def match_vectors(problem: Problem, placed: Placed, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Results:
    """Return the matching of pairs of networks, computed only from the vectors of their units."""
    problem = replace(problem, a=_detached(problem.a), b=_detached(problem.b))
    frame = Frame.of(problem.a, problem.b, problem.symmetry, "balance")
    return match_mixture(
        problem, frame, responses(placed, _detached(a), _detached(b)), TIES, completing(problem.symmetry)
    )


def _move(placed: Placed, element: Element, vectors: Mapping[str, Tensor]) -> Params:
    """Return the vectors of networks, transformed by an element."""
    return act_on(placed.symmetry.groups, {n: placed.symmetry.sites[n] for n in vectors}, element, vectors)


def _detached(tensors: Mapping[str, Tensor]) -> Params:
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _count(params: Mapping[str, Tensor]) -> int:
    return len(next(iter(params.values())))


def _shift(count: int, chance: torch.Generator) -> int:
    """Return a random offset from each network to its partner in a batch. A single network is its own partner."""
    return int(torch.randint(1, max(2, count), (), generator=chance))


def batches_of(task: Task) -> Sequence[Batch]:
    """Return the batches of a task as a list, from which each training step takes one."""
    return task.batches if isinstance(task.batches, Sequence) else tuple(task.batches)
