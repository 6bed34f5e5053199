"""Products of matrices without what one of both sides annihilates, so that both have one rank."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float64
from torch import Tensor

from regauge.core import act as _act
from regauge.core.element import Element, Value
from regauge.core.families import unit_values
from regauge.core.groups import Group
from regauge.core.matrices import balanced_matrices
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry

ZERO = 1e-12
"""Eigenvalues of a Gram matrix below this share of the largest one are zero, in float64."""
SWEEPS = 10
"""Most rounds over all groups: what one group loses may leave another one with less."""


def without_null_spaces(params: Mapping[str, Tensor], symmetry: Symmetry) -> Params:
    """The same function with both sides of each product of matrices projected onto what the other one reads.

    With X the values that a group of invertible matrices multiplies and Y those that the inverse transposes do, only
    `Y' X` counts. `X1 = P X` with the projection P onto the columns of Y, and `Y1 = Q Y` with that onto the columns of
    X1, have the same product and its rank. All pairs of such matrices with one product are one orbit, which the given
    pair comes as close to as one likes; on it there is a point of smallest norm.

    Args:
        params: A network or a population, in float64.
        symmetry: With every size known.
    """
    result = dict(params)
    groups = [symmetry[name] for name in balanced_matrices(symmetry)]
    for _ in range(SWEEPS):
        is_done = True
        for group in groups:
            for is_inverse in (True, False):
                projection, is_whole = _projection(result, symmetry, group, is_inverse=is_inverse)
                if not is_whole:
                    changed = _project(result, symmetry, group, projection, is_inverse=not is_inverse)
                    is_done = is_done and not changed
        if is_done:
            break
    return result


def has_null_spaces(params: Mapping[str, Tensor], symmetry: Symmetry) -> bool:
    """Whether one side of any product of matrices annihilates a part of the other one; see `without_null_spaces`."""
    groups = [symmetry[name] for name in balanced_matrices(symmetry)]
    sides = ((group, is_inverse) for group in groups for is_inverse in (True, False))
    return not all(_projection(params, symmetry, group, is_inverse=is_inverse)[1] for group, is_inverse in sides)


def _projection(
    params: Mapping[str, Tensor], symmetry: Symmetry, group: Group, *, is_inverse: bool
) -> tuple[Float64[Tensor, "*lead n n"], bool]:
    """The projections onto what one side of a group's product has, and whether that is everything."""
    gram: Tensor | None = None
    for name, sites in symmetry.sites.items():
        for site in sites:
            if site.group.name == group.name and site.placement.is_inverse == is_inverse and _counts(symmetry, name):
                lead = params[name].ndim - len(symmetry.shapes[name])
                values = unit_values(symmetry, name, site, params[name], lead)
                gram = values @ values.mT if gram is None else gram + values @ values.mT
    if gram is None:
        return torch.eye(group.size, dtype=torch.float64), True
    eigenvalues, vectors = torch.linalg.eigh(gram)
    there = eigenvalues > ZERO * eigenvalues[..., -1:].clamp_min(torch.finfo(torch.float64).tiny)
    kept = vectors * there.unsqueeze(-2)
    return kept @ kept.mT, bool(there.all())


def _project(
    params: Params, symmetry: Symmetry, group: Group, projection: Float64[Tensor, "*lead n n"], *, is_inverse: bool
) -> bool:
    """Project one side of a group's product, in place; whether that changed anything."""
    is_changed = False
    for name, sites in symmetry.sites.items():
        own = [s for s in sites if s.group.name == group.name and s.placement.is_inverse == is_inverse]
        if not own or not _counts(symmetry, name):
            continue
        plain = [replace(site, placement=replace(site.placement, is_inverse=False)) for site in own]
        lead = params[name].shape[: params[name].ndim - len(symmetry.shapes[name])]
        element = Element({group.name: Value(matrix=projection)}, tuple(lead))
        ndims = {name: len(symmetry.shapes[name])}
        moved = _act.act((group,), {name: plain}, element, {name: params[name]}, ndims)[name]
        size = params[name].norm()
        is_changed = is_changed or bool((moved - params[name]).norm() > 1e-9 * size)
        params[name] = moved
    return is_changed


def _counts(symmetry: Symmetry, name: str) -> bool:
    return name not in symmetry.buffers
