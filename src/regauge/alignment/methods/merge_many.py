"""Coordinate ascent for many networks, which matches each network to the mean of the others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from regauge.alignment.engine.climbs import Climbs, Pursuit
from regauge.alignment.many import best_universe, move, one_climb, universe_objective
from regauge.alignment.method import ManyMethod
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import ManyProblem, Problem
from regauge.alignment.result import ManyResult, Results
from regauge.core.element import Element
from regauge.core.families import Tensors, compared
from regauge.core.params import Params, batch_of_one, count_models, select
from regauge.core.symmetry import Symmetry

NETWORKS_AT_ONCE = 512
"""The number of networks whose distances from the mean are computed together."""


@dataclass(frozen=True)
class MergeMany(ManyMethod):
    """A method that matches each network to the mean of the others, until no element changes.

    The method maximizes the sum of inner products over all pairs of transformed networks (`universe_objective`). For K
    networks, a step that raises one network's inner product with the mean of the others raises the objective by K - 1
    times as much. Therefore the objective never decreases. The result is a local optimum: changing one group of one
    network cannot improve it.

    `MergeMany` departs from the paper in the following ways. First, the networks are placed one after the other: each
    network is matched to the mean of the networks placed before it. The mean of networks that are not aligned would be
    a poor target. After placement, all networks are visited in a fixed order. A network is visited again only if other
    networks changed.

    If there are more than `core` networks, only the first `core` networks are visited one by one. Afterwards, all
    further networks are matched at once to the mean of the core networks. Later rounds match all networks to the mean
    of all networks, which lowers the mean squared distance from this mean (`gather`). If there are many networks, their
    mean is nearly the same as the mean without one network. Rounds that match all networks at once are many times
    faster than visits one by one. Rounds that match all networks at once end at `tolerance`, so their result is only
    close to a local optimum.

    Attributes:
        inner: The method that places a network. Later rounds also use the `max_sweeps` and `tolerance` of the inner
            method. Its setting `scales` applies to all of `MergeMany`.
        start: The start: "sequence" places the networks one after the other; "identity", as published, begins with the
            networks as given. With either start, identity elements are returned if they are better than the result.
        restarts: The number of further ascents, with networks in random order. The ascent with the largest objective is
            kept. If there is a task, the ascent with the lowest loss of the mean network is kept instead.
        max_rounds: The largest number of rounds over the networks in each ascent.
        core: The largest number of networks that are visited one by one.
        tolerance: The fraction by which a round must lower the mean squared distance from the mean, if there are more
            than `core` networks.

    References:
        Ainsworth, Hayase and Srinivasa (2023), Git Re-Basin, appendix A.10, algorithm 2 (MergeMany).
    """

    inner: WeightMatching = field(default_factory=WeightMatching)
    start: Literal["sequence", "identity"] = "sequence"
    restarts: int = 0
    max_rounds: int = 100
    core: int = 16
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.restarts < 0 or self.max_rounds < 1:
            raise ValueError(
                f"restarts={self.restarts}, max_rounds={self.max_rounds}: restarts must not be negative, and at least "
                "one round is needed"
            )
        if self.core < 2:
            raise ValueError(f"core={self.core}: at least two networks are needed")
        if self.tolerance < 0:
            raise ValueError(f"tolerance={self.tolerance}: it is a share of the spread, and must not be negative")
        if self.inner.init is not None:
            raise ValueError("inner.init is an element for one pair of networks; leave it out to align many")

    def match_many(self, problem: ManyProblem) -> ManyResult:
        """Align the networks with one another; see `align_many`. If there is a task, the task loss selects among
        restarts.
        """
        count = len(problem.networks)

        def climbs(tensors: Sequence[Tensors]) -> list[Climbs]:
            orders = [list(range(count))]
            for _ in range(self.restarts):
                chance = problem.require_generator(f"restarts={self.restarts} visit the networks in random order")
                orders.append(torch.randperm(count, generator=chance, device=chance.device).tolist())
            return [self._climb(problem, tensors, order) for order in orders]

        def from_identity(tensors: Sequence[Tensors]) -> Climbs:
            return self._climb(replace(problem, generator=None), tensors, list(range(count)), is_placed=False)

        return best_universe(problem, self.inner.scales, climbs, from_identity)

    def _climb(
        self, problem: ManyProblem, tensors: Sequence[Tensors], order: Sequence[int], *, is_placed: bool = True
    ) -> Climbs:
        symmetry, is_placed = problem.symmetry, is_placed and self.start == "sequence"
        if len(tensors) > self.core:
            networks = [{**network, **own} for network, own in zip(problem.networks, tensors, strict=True)]
            stacked = {name: torch.stack([network[name] for network in networks]) for name in networks[0]}
            history = []
            for found in gather(stacked, symmetry, self, order=order, is_placed=is_placed, generator=problem.generator):
                moved = [{name: found.params[name][k] for name in tensors[0]} for k in range(len(tensors))]
                history.append(universe_objective(moved, tensors, symmetry))
            elements = [found.element.item(k) for k in range(len(tensors))]
            return one_climb(elements, history, is_converged=found.is_converged)
        elements = [symmetry.identity()] * len(tensors)
        if is_placed:
            inner, total = replace(self.inner, scales="keep"), dict(tensors[order[0]])
            for count, k in enumerate(order[1:], start=1):
                mean = {name: tensor / count for name, tensor in total.items()} if count > 1 else total
                there, here = (batch_of_one({**problem.networks[k], **own}) for own in (mean, tensors[k]))
                matched = inner.match(Problem(there, here, symmetry, None, problem.generator))
                elements[k] = matched.element.item(0)
                if len(order) == 2 and matched.is_converged is not None and bool(matched.is_converged.all()):
                    # Distances are symmetric: if the second network cannot come closer, the first cannot either.
                    placed: list[Tensors] = list(tensors)
                    placed[k] = {name: matched.params[name][0] for name in tensors[k]}
                    return one_climb(elements, [universe_objective(placed, tensors, symmetry)], is_converged=True)
                total = {name: tensor + matched.params[name][0] for name, tensor in total.items()}
        return improve(tensors, symmetry, elements, self, order)


@dataclass(frozen=True)
class Gathered:
    """The networks of a population after some rounds of alignment: elements, transformed networks, and their mean.

    The spread is the mean squared distance of the networks from their mean, over all parameters.
    """

    element: Element
    params: Params
    mean: Params
    spread: float
    is_converged: bool = False

    @classmethod
    def of(cls, symmetry: Symmetry, element: Element, params: Params) -> "Gathered":
        """Return the population after `element` was applied to the networks."""
        ignored = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
        floating = {name: tensor for name, tensor in params.items() if tensor.is_floating_point()}
        mean = {n: t.mean(0, dtype=torch.float64).to(t.dtype) if n in floating else t[0] for n, t in params.items()}
        deviations = (_squares(tensor, mean[name]) for name, tensor in floating.items() if name not in ignored)
        return cls(element, params, mean, sum(deviations) / count_models(params))


def gather(
    params: Params,
    symmetry: Symmetry,
    settings: MergeMany,
    *,
    order: Sequence[int] | None = None,
    is_placed: bool = True,
    generator: torch.Generator | None = None,
) -> Iterator[Gathered]:
    """Align the networks of a population of any size with one another, in rounds that transform all at once.

    Let x_i be the transformed networks and m their mean. The rounds lower the spread, which is `1/n sum_i |x_i - m|^2`.
    The spread is half the mean squared distance over all ordered pairs of networks. Matching a network to the mean m
    lowers its distance from m. The new mean of the transformed networks minimizes the sum of squared distances.
    Therefore the spread never increases.

    Args:
        params: The population, with a leading model axis on every tensor.
        symmetry: The symmetry of all networks. All sizes of its groups must be known.
        settings: The settings of `MergeMany`. The method `settings.inner` matches networks, while positive scales stay
            unchanged.
        order: The order in which the networks are placed. The first `settings.core` networks in `order` are aligned
            with one another first.
        is_placed: Whether the first networks are aligned with one another before all rounds. If False, all networks
            start at the identity.
        generator: The random number generator, for a method with restarts.

    Yields:
        The population before the first round and after each round. The spread never exceeds that of the given
        population.
    """
    count = count_models(params)
    now = Gathered.of(symmetry, symmetry.identity((count,)), params)
    inner = replace(settings.inner, scales="keep")

    def match(method: WeightMatching, mean: Params, params: Params) -> Results:
        first = {name: tensor.expand(count, *tensor.shape) for name, tensor in mean.items()}
        return method.match(Problem(first, params, symmetry, None, generator))

    if is_placed and count > 1:
        core = torch.as_tensor(range(count) if order is None else order)[: settings.core]
        some = ManyProblem([select(params, k) for k in core.tolist()], symmetry, None, generator)
        climb = settings._climb(some, compared(some.networks, symmetry), range(len(core)))
        element = climb.element.map(lambda t: t[0], (len(core),))
        placed = Gathered.of(symmetry, element, symmetry.act(element, select(params, core)))
        if count > len(core):
            found = match(inner, placed.mean, params)
            placed = Gathered.of(symmetry, found.element, found.params)
        now = placed if placed.spread <= now.spread else now
    yield now
    onwards = replace(inner, start="identity", restarts=0, init=None)
    for _ in range(settings.max_rounds):
        found = match(onwards, now.mean, now.params)
        after = Gathered.of(symmetry, symmetry.compose(found.element, now.element), found.params)
        is_last = not after.spread < (1 - settings.tolerance) * now.spread
        now = replace(after if after.spread < now.spread else now, is_converged=is_last)
        yield now
        if is_last:
            return


def _squares(tensor: Tensor, mean: Tensor) -> float:
    """Return the sum of squared distances of tensors `[n, ...]` from their mean, computed in chunks."""
    parts = torch.split(tensor, NETWORKS_AT_ONCE)
    return sum(float(torch.linalg.vector_norm(part - mean, dtype=torch.float64)) ** 2 for part in parts)


def improve(
    tensors: Sequence[Tensors],
    symmetry: Symmetry,
    elements: Sequence[Element],
    settings: MergeMany,
    order: Sequence[int],
) -> Climbs:
    """Run rounds in which each network is matched to the mean of the others, starting from given elements.

    The state of each network's ascent (a `Pursuit`) is kept between visits. Later visits therefore search only groups
    whose target tensors have changed, and start from the previous dual variables.
    """
    others, inner = len(tensors) - 1, settings.inner
    placed = [move(symmetry, element, network) for element, network in zip(elements, tensors, strict=True)]
    total = {name: torch.stack([p[name] for p in placed]).sum(0) for name in placed[0]}
    pursuits: dict[int, Pursuit] = {}
    moved_at, seen_at = dict.fromkeys(total, 0), dict.fromkeys(order, -1)
    gained, clock, is_moving = [0.0], 0, True
    while is_moving and len(gained) <= settings.max_rounds:
        gained.append(gained[-1])
        for k in order:
            clock += 1
            now = pursuits[k].second if k in pursuits else placed[k]
            aims = {n: (total[n] - now[n]) / others for n, when in moved_at.items() if when > seen_at[k]}
            if k in pursuits:
                pursuits[k].aim_at(aims)
            else:
                pursuits[k] = Pursuit(symmetry, aims, tensors[k], elements[k], inner.tolerance)
            gain = pursuits[k].climb(inner.max_sweeps)
            gained[-1] += others * gain
            seen_at[k] = clock
            if gain:
                first, second = pursuits[k].first, pursuits[k].second
                for name in pursuits[k].changed:
                    total[name] = others * first[name] + second[name]
                    moved_at[name] = clock
        is_moving = gained[-1] > gained[-2]
    reached = universe_objective([pursuits[k].second for k in range(len(tensors))], tensors, symmetry)
    return one_climb(
        [pursuits[k].element for k in range(len(tensors))],
        [reached - (gained[-1] - gain) for gain in gained],
        is_converged=not is_moving,
    )
