"""Positive scales fitted to the first network once units are matched, for networks that are nearly copies.

Balancing a network by itself gives a gain with a single value as much weight as all values of a filter. Where that gain
is small next to its noise, so is what balancing knows about the unit's scale. When units are matched the scales can be
fitted to those of the first network instead, each place weighted by its size there. The same holds for signs, which are
chosen once more between the networks as they then are.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor

from regauge.alignment.engine.climbs import climb
from regauge.alignment.engine.frames import move_by
from regauge.alignment.engine.paired_networks import dots
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.balance import Buffers
from regauge.core.element import Element, Value
from regauge.core.families import Tensors, compared, connected, unit_values
from regauge.core.groups import Group
from regauge.core.symmetry import Symmetry

NEAR = 0.05
"""Squared distance of nearly equal networks, as a share of the squared norm."""
EXACT = 1e-12
"""Below this share nothing is left to fit."""
SWEEPS = 100
"""Most rounds over all groups."""
SETTLED = 1e-10
"""A round that changes no logarithm of a factor by more is the last one."""


def refit_near_copies(problem: Problem, found: Results, buffers: Buffers) -> Results:
    """Fit the scales of second networks that are nearly their first ones, where that brings them closer."""
    symmetry = problem.symmetry
    groups = fitted_groups(symmetry, buffers)
    if not groups:
        return found
    a, b = compared([problem.a, found.params], symmetry)
    before, norm = squared_distances(a, b), torch.stack([dots(t, t) for t in a.values()]).sum(0)
    is_near = is_near_copy(before, norm)
    if not bool(is_near.any()):
        return found
    steps: list[Callable[[Tensors], Element]] = [
        lambda moved: fit_scales(symmetry, groups, a, moved),
        lambda moved: climb(symmetry, a, moved).element,
        lambda moved: fit_scales(symmetry, groups, a, moved),
    ]
    for step in steps:
        element = symmetry.compose(step(b), found.element)
        other = replace(found, element=element, params=problem.move(element))
        _, closer = compared([problem.a, other.params], symmetry)
        found = found.but(is_near & (squared_distances(a, closer) < squared_distances(a, b)), other)
        _, b = compared([problem.a, found.params], symmetry)
    return found


def fitted_groups(symmetry: Symmetry, buffers: Buffers) -> list[Group]:
    """The groups whose scales are fitted: those that move running statistics only where balancing may, too."""
    return [group for group in symmetry.groups if group.scales and (buffers == "move" or not _moves(symmetry, group))]


def fitted_parts(symmetry: Symmetry, groups: Collection[Group], names: Collection[str]) -> list[frozenset[str]]:
    """The tensors of some names that `fit_scales` looks at, in parts that do not depend on one another."""
    moved: dict[tuple[str, int], set[str]] = {}
    for group in groups:
        for place in (place for place in group.placements if place.parameter in names):
            for family in (k for k, exponent in enumerate(place.scale) if exponent):
                moved.setdefault((group.name, family), set()).add(place.parameter)
    return connected(moved.values())


def is_near_copy(square: Tensor, norm: Tensor) -> Tensor:
    """Whether a squared distance is that of a nearly equal network, by the squared norm, where anything is left."""
    return (square < NEAR * norm) & (square > EXACT * norm)


def fit_scales(symmetry: Symmetry, groups: list[Group], a: Tensors, b: Tensors) -> Element:
    """The scales that bring the norms of the units of `b` close to those of `a`, `[pair, ...]`.

    For each unit `sum_p |a_p|^2 (log |a_p| - log |b_p| - sum_f e_pf t_f)^2` is least, over the places p where its
    families f act with exponents e; units without values on one side keep their scales.
    """
    pairs = len(next(iter(a.values())))
    total, moved = symmetry.identity((pairs,)), dict(b)
    for _ in range(SWEEPS):
        largest = 0.0
        for group in groups:
            factors = _fit(symmetry, group, a, moved)
            largest = max(largest, float(factors.log().abs().max()))
            step = Element({group.name: Value(scale=factors)}, (pairs,)).fill(symmetry.identity((pairs,)))
            for name in moved:  # One after the other, so that the old ones are not held meanwhile.
                if any(site.group.name == group.name for site in symmetry.sites[name]):
                    moved |= move_by(symmetry, step, {name: moved[name]})
            total = symmetry.compose(step, total)
        if largest <= SETTLED:
            break
    return total


def _fit(symmetry: Symmetry, group: Group, a: Tensors, b: Tensors) -> Tensor:
    """The factors of one group, `[pair, *bases, family, unit]`."""
    normal: Tensor | None = None
    slope: Tensor | None = None
    for name in a:
        for site in symmetry.sites[name]:
            if site.group.name != group.name or not any(site.placement.scale):
                continue
            x, y = (_squares(unit_values(symmetry, name, site, t[name], 1)) for t in (a, b))
            is_known = (x > 0) & (y > 0)
            weight, one = torch.where(is_known, x, 0.0), torch.ones(())
            gap = (torch.where(is_known, x, one).log() - torch.where(is_known, y, one).log()) / 2
            exponents = torch.tensor(site.placement.scale, dtype=torch.float64)
            square = weight[..., None, None] * exponents.outer(exponents)
            right = (weight * gap).unsqueeze(-1) * exponents
            normal = square if normal is None else normal + square
            slope = right if slope is None else slope + right
    assert normal is not None
    assert slope is not None
    steps: Tensor = torch.linalg.pinv(normal, hermitian=True) @ slope.unsqueeze(-1)
    return steps.squeeze(-1).movedim(-1, -2).exp()


def _squares(values: Tensor) -> Tensor:
    """The sum of the squares of each unit, in float64."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)
    return norms.square().cpu()


def _moves(symmetry: Symmetry, group: Group) -> bool:
    """Whether the scales of a group move running statistics."""
    return any(place.parameter in symmetry.buffers and any(place.scale) for place in group.placements)


def squared_distances(a: Tensors, b: Tensors) -> Tensor:
    """The squared distance of both networks of each pair, float64 `[pairs]`."""
    return torch.stack([dots(a[name] - b[name], a[name] - b[name]) for name in a]).sum(0)
