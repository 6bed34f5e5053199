"""Weight matching: the element that brings the parameters of one network closest to another's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regauge.align.ascent import Ascent
from regauge.align.matching import Matching, require_generator
from regauge.align.places import compared
from regauge.core.element import Element
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


@dataclass(frozen=True)
class WeightMatching:
    """Coordinate ascent on the inner product of the parameters, over every group of the symmetry.

    It maximizes `<a, g b>`, which is to minimize `|a - g b|`, over reorderings, signs, half-period shifts and
    rotations; positive scales stay as they are (balance them with canonicalization first) and an invertible
    matrix is chosen among the orthogonal ones. Each step is the exact optimum of one group and what is nested
    in it, given all others. The result is a local optimum; it is global where one group is all there is.

    Departures from the paper: the first costs use the barycentre of what is not known yet, best anchored group
    first (planted permutations of residual networks are then recovered, which fails from the identity); groups
    are visited in a fixed order and only when a neighbor moved; buffers move but do not count.

    Attributes:
        start: Begin at the "barycentre", or at the "identity" as published. Whatever the start, the identity
            is tried when the result would be worse than it.
        restarts: Further climbs from random elements; the best is kept.
        max_sweeps: Most sweeps over the groups in each climb.
        tolerance: A step must gain more than this share of `sum |a| |b|`.

    References:
        Ainsworth, Hayase and Srinivasa (2023), Git Re-Basin, section 3.2, algorithm 1.
    """

    start: Literal["barycentre", "identity"] = "barycentre"
    restarts: int = 0
    max_sweeps: int = 100
    tolerance: float = 1e-9

    def __post_init__(self) -> None:
        if self.start not in ("barycentre", "identity"):
            raise ValueError(f"start is {self.start!r}; choose 'barycentre' or 'identity'")
        if self.restarts < 0 or self.max_sweeps < 1 or self.tolerance < 0:
            raise ValueError(
                f"restarts={self.restarts}, max_sweeps={self.max_sweeps}, tolerance={self.tolerance}: restarts and "
                "tolerance must not be negative, and at least one sweep is needed"
            )

    def match(
        self,
        params_a: Mapping[str, Tensor],
        params_b: Mapping[str, Tensor],
        symmetry: Symmetry,
        *,
        task: Task | None,
        generator: torch.Generator | None,
    ) -> Matching:
        """See `align`; the task is not looked at."""
        a, b = compared([params_a, params_b], symmetry)
        climbs = [self._climb(symmetry, a, b, self.start, None)]
        for _ in range(self.restarts):
            chance = require_generator(generator, f"restarts={self.restarts} begin at random elements")
            climbs.append(self._climb(symmetry, a, b, "identity", _random_start(symmetry, chance)))
        initial = climbs[0].initial
        if self.start != "identity" and max(c.objective for c in climbs) < initial:
            climbs.append(self._climb(symmetry, a, b, "identity", None))
        best = max(climbs, key=lambda climb: climb.objective)
        return Matching(
            element=best.element,
            objective=best.objective,
            initial=initial,
            history=best.history,
            is_converged=best.is_converged,
            starts=tuple(climb.objective for climb in climbs),
            moved={name: t for name, t in best.moved.items() if _is_alike(t, params_b[name])},
        )

    def _climb(
        self,
        symmetry: Symmetry,
        a: Mapping[str, Tensor],
        b: Mapping[str, Tensor],
        start: str,
        element: Element | None,
    ) -> "_Climb":
        ascent = Ascent(symmetry, a, b, start=element, tolerance=self.tolerance)
        if start == "barycentre":
            ascent.start_from_barycentre()
        gained, is_moving = [0.0], True
        while is_moving and len(gained) <= self.max_sweeps:
            is_moving = ascent.sweep()
            gained.append(ascent.gained)
        reached = ascent.exact_objective()
        history = tuple(reached - (ascent.gained - gain) for gain in gained)
        return _Climb(ascent.initial, ascent.element, reached, history, not is_moving, ascent.moved())


@dataclass(frozen=True)
class _Climb:
    initial: float
    element: Element
    objective: float
    history: tuple[float, ...]
    is_converged: bool
    moved: Mapping[str, Tensor]


def _is_alike(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.device == y.device


def _random_start(symmetry: Symmetry, generator: torch.Generator) -> Element:
    """A random element that keeps every norm: no scales, no shifts, no invertible matrices that stretch."""
    element, blank = symmetry.random(generator, ("permutation", "sign", "linear")), symmetry.identity()
    for group in symmetry.groups:
        if group.matrix == "linear":
            element = element.replace(group.name, blank[group.name])
    return element
