"""What a method that aligns many networks at once is and returns, and the objective that such methods share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from regauge.align.matching import Matching, Method
from regauge.align.places import Tensors, dot
from regauge.core import act as _act
from regauge.core.element import Element
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


@dataclass(frozen=True)
class ManyMatching:
    """What a method found for several networks.

    Attributes:
        elements: One for each network; all of them together bring the networks close to one another.
        objective: What the method maximizes, at `elements`.
        initial: The same at the identities; never larger.
        history: Objective of the best climb from its start on; it never falls.
        is_converged: Whether that climb ended because no single network could be improved.
        starts: Objective that each climb reached.
    """

    elements: tuple[Element, ...]
    objective: float
    initial: float
    history: tuple[float, ...]
    is_converged: bool
    starts: tuple[float, ...]


@runtime_checkable
class ManyMethod(Protocol):
    """A way to align any number of networks with one another: a small frozen dataclass of its settings."""

    def match_many(
        self,
        networks: Sequence[Mapping[str, Tensor]],
        symmetry: Symmetry,
        *,
        task: Task | None,
        generator: torch.Generator | None,
    ) -> ManyMatching:
        """One element for each of two networks or more; all are checked and the symmetry is bound."""
        ...


def match_to_first(
    method: Method,
    networks: Sequence[Mapping[str, Tensor]],
    symmetry: Symmetry,
    *,
    task: Task | None,
    generator: torch.Generator | None,
) -> ManyMatching:
    """Every network to the first, one pair after the other; the objective is the sum over these pairs."""
    found: list[Matching] = [
        method.match(networks[0], other, symmetry, task=task, generator=generator) for other in networks[1:]
    ]
    steps = max(len(one.history) for one in found)
    rows = [(*one.history, *[one.history[-1]] * (steps - len(one.history))) for one in found]
    objective = sum(one.objective for one in found)
    return ManyMatching(
        elements=(symmetry.identity(), *(one.element for one in found)),
        objective=objective,
        initial=sum(one.initial for one in found),
        history=tuple(sum(column) for column in zip(*rows, strict=True)),
        is_converged=all(one.is_converged for one in found),
        starts=(objective,),
    )


def universe_objective(moved: Sequence[Tensors], networks: Sequence[Tensors], symmetry: Symmetry) -> float:
    """How close networks are to one another, the sum over unordered pairs.

        U = sum_{i < j} <x_i, x_j> - (K - 1) / 2 sum_i (|x_i|^2 - |p_i|^2)

    Each pair contributes its inner product, which only half-period shifts make differ from half the negative
    squared distance (up to a constant). It is summed over networks, not over pairs.

    Args:
        moved: The networks x_i where they are compared.
        networks: The same before they were moved, p_i.
        symmetry: Tells which tensors are shifted.
    """
    total = 0.0
    for name in moved[0]:
        before = moved[0][name]
        for network in moved[1:]:
            total += dot(before, network[name])
            before = before + network[name]
        if any(any(site.placement.shift) for site in symmetry.sites[name]):
            excess = sum(dot(x[name], x[name]) - dot(p[name], p[name]) for x, p in zip(moved, networks, strict=True))
            total -= (len(networks) - 1) / 2 * excess
    return total


def move(symmetry: Symmetry, element: Element, tensors: Tensors) -> dict[str, Tensor]:
    """The action on some of the tensors of a network."""
    sites = {name: symmetry.sites[name] for name in tensors}
    return _act.act(symmetry.groups, sites, element, tensors, {name: t.ndim for name, t in tensors.items()})
