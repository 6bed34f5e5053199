"""Positive scales fitted to the first network once units are matched, for networks that are nearly copies.

Balancing a network by itself gives a gain with a single value as much weight as all values of a filter. Where that gain
is small next to its noise, so is what balancing knows about the unit's scale. When units are matched the scales can be
fitted to those of the first network instead, each place weighted by its size there. The same holds for signs, which are
chosen once more between the networks as they then are.
"""

from collections.abc import Callable
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
from regauge.core.families import Tensors, compared, unit_values
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
    groups = [group for group in symmetry.groups if group.scales and (buffers == "move" or not _moves(symmetry, group))]
    if not groups:
        return found
    a, b = compared([problem.a, found.params], symmetry)
    before, norm = squared_distances(a, b), torch.stack([dots(t, t) for t in a.values()]).sum(0)
    is_near = (before < NEAR * norm) & (before > EXACT * norm)
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
            touched = {name for name in moved if any(site.group.name == group.name for site in symmetry.sites[name])}
            moved |= move_by(symmetry, step, {name: moved[name] for name in touched})
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
            x, y = (unit_values(symmetry, name, site, t[name], 1).double().square().sum(-1).cpu() for t in (a, b))
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


def _moves(symmetry: Symmetry, group: Group) -> bool:
    """Whether the scales of a group move running statistics."""
    return any(place.parameter in symmetry.buffers and any(place.scale) for place in group.placements)


def squared_distances(a: Tensors, b: Tensors) -> Tensor:
    """The squared distance of both networks of each pair, float64 `[pairs]`."""
    return torch.stack([dots(a[name] - b[name], a[name] - b[name]) for name in a]).sum(0)
