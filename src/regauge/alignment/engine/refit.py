"""Scales and matrices fitted to the first network once units are matched, for networks that are nearly copies.

Balancing a network by itself gives a gain with a single value as much weight as all values of a filter. Where that gain
is small next to its noise, so is what balancing knows about the unit's scale; the same holds for the small singular
values of a product of matrices. When units are matched, scales and matrices can be fitted to those of the first network
instead, and signs are chosen once more between the networks as they then are.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from regauge.alignment.engine.climbs import climb
from regauge.alignment.engine.continuous_fit import fit_continuous, fitted_groups, squared_distances
from regauge.alignment.engine.frames import Frame, notes_on
from regauge.alignment.engine.paired_networks import act_on, at, dots
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.balance import Buffers, count_frozen_gains
from regauge.core.element import Element
from regauge.core.families import Tensors, compared
from regauge.core.symmetry import Symmetry

NEAR = 0.05
"""Squared distance of nearly equal networks, as a share of the squared norm."""
EXACT = 1e-13
"""Below this share nothing is left to fit."""


def refit_near_copies(problem: Problem, found: Results, frame: Frame) -> Results:
    """Fit second networks that are nearly their first ones, where that brings them closer."""
    if frame.sides is None or not frame.a:
        return found
    element, is_closer = refit(problem.symmetry, frame.buffers, problem.a, found.params)
    if not bool(is_closer.any()):
        return found
    element = problem.symmetry.compose(element, found.element)
    notes = notes_on({name: flags & ~is_closer for name, flags in frame.rigid.items()})
    other = replace(found, element=element, params=problem.move(element))
    return replace(found.but(is_closer, other), notes=notes)


def refit(symmetry: Symmetry, buffers: Buffers, params_a: Tensors, params_b: Tensors) -> tuple[Element, Tensor]:
    """Elements that bring second networks closer which nearly equal their first ones, and a mask of these pairs.

    Networks are `[pair, ...]`. The element is the identity for all other pairs.
    """
    symmetry = count_frozen_gains(symmetry, buffers)
    a, b = compared([params_a, params_b], symmetry)
    pairs = len(next(iter(params_b.values())))
    blank, is_closer = symmetry.identity((pairs,)), torch.zeros(pairs, dtype=torch.bool)
    groups = fitted_groups(symmetry, buffers)
    if not a or not groups:
        return blank, is_closer
    before, norm = squared_distances(a, b), torch.stack([dots(t, t) for t in a.values()]).sum(0)
    rows = is_near_copy(before, norm).nonzero().flatten()
    if not len(rows):
        return blank, is_closer
    a, b = ({name: at(t, rows) for name, t in tensors.items()} for tensors in (a, b))
    total, now, given = symmetry.identity((len(rows),)), before[rows], b
    steps: list[Callable[[Tensors], tuple[Element, Tensor]]] = [
        lambda b: fit_continuous(symmetry, groups, a, b),
        lambda b: _match(symmetry, a, b),
        lambda b: fit_continuous(symmetry, groups, a, b),
    ]
    for step in steps:
        element, after = step(b)
        better = after < now
        total = symmetry.compose(element, total).where(better, total)
        b = _move(symmetry, total, given)
        now = torch.where(better, after, now)
    is_closer[rows] = now < before[rows]
    return blank.zip(total, lambda here, there: here.index_copy(0, rows, there.to(here.dtype))), is_closer


def is_near_copy(square: Tensor, norm: Tensor) -> Tensor:
    """Whether a squared distance is that of a nearly equal network, by the squared norm, where anything is left."""
    return (square < NEAR * norm) & (square > EXACT * norm)


def _match(symmetry: Symmetry, a: Tensors, b: Tensors) -> tuple[Element, Tensor]:
    """Orders, signs and rotations, chosen once more, and the squared distances that they leave."""
    element = climb(symmetry, a, b).element
    return element, squared_distances(a, _move(symmetry, element, b))


def _move(symmetry: Symmetry, element: Element, tensors: Tensors) -> dict[str, Tensor]:
    return act_on(symmetry.groups, {name: symmetry.sites[name] for name in tensors}, element, tensors)
