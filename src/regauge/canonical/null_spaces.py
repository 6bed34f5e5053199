"""Factorization of matrix products by rank: parts of one factor that the other factor annihilates are removed."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float64
from torch import Tensor

from regauge.core import act as _act
from regauge.core.element import Element, Value
from regauge.core.families import balanced_matrices, unit_values
from regauge.core.groups import Group
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry

ZERO = 1e-12
"""The share of the largest singular value below which singular values count as zero, in float64."""
COARSE = 1e-6
"""The share of the largest singular value below which singular values count as zero, in lower precision."""
SWEEPS = 10
"""The largest number of rounds over all groups. If one group loses dimensions, another group may lose dimensions too.
"""


def without_null_spaces(params: Mapping[str, Tensor], symmetry: Symmetry) -> Params:
    """Project each factor of a matrix product onto the space that the other factor reads. The function stays the same.

    Let a group of invertible matrices multiply the entries X, and let their inverse transposes multiply the entries Y.
    The function of the network depends only on the product `Y' X`. Let P be the projection onto the columns of Y, and
    let `X1 = P X`. Let Q be the projection onto the columns of X1, and let `Y1 = Q Y`. X1 and Y1 have the same product
    as X and Y, and their rank is the rank of the product. All pairs of factors that have the rank of their product, and
    the same product, form one orbit, which contains a network of smallest norm. The orbit of the given pair X and Y
    comes arbitrarily close to the orbit of the result, although no element maps the given pair to the result. In a
    chain of groups, the result is Kalman's minimal realization: the part that the inputs reach and the outputs read.

    Args:
        params: A network or a population.
        symmetry: The symmetry. All sizes of its groups must be known.

    Returns:
        The given tensors if every product has full rank. If a product has lower rank, projected tensors are new tensors
        in float64.

    References:
        Kalman (1963), Mathematical description of linear dynamical systems, theorem 5, for the part that inputs reach
        and outputs read.
    """
    groups = [symmetry[name] for name in balanced_matrices(symmetry)]
    names = sorted({name for names in balanced_matrices(symmetry).values() for name in names})
    result = {name: params[name].detach().to("cpu", torch.float64) for name in names}
    zero = ZERO if all(params[name].dtype == torch.float64 for name in names) else COARSE
    changed = set[str]()
    for _ in range(SWEEPS):
        is_done = True
        for group in (*groups, *reversed(groups)):
            for is_inverse in (True, False):
                projection, is_whole = _projection(result, symmetry, group, zero, is_inverse=is_inverse)
                if not is_whole:
                    own = _project(result, symmetry, group, projection, is_inverse=not is_inverse)
                    changed |= own
                    is_done = is_done and not own
        if is_done:
            break
    return {name: result[name] if name in changed else tensor for name, tensor in params.items()}


def has_null_spaces(params: Mapping[str, Tensor], symmetry: Symmetry) -> bool:
    """Return whether, in any matrix product, one factor annihilates part of the other factor."""
    groups = [symmetry[name] for name in balanced_matrices(symmetry)]
    sides = ((group, is_inverse) for group in groups for is_inverse in (True, False))
    return not all(
        _projection(params, symmetry, group, COARSE, is_inverse=is_inverse)[1] for group, is_inverse in sides
    )


def _projection(
    params: Mapping[str, Tensor], symmetry: Symmetry, group: Group, zero: float, *, is_inverse: bool
) -> tuple[Float64[Tensor, "*lead n n"], bool]:
    """Return the projection onto the span of one factor of a product, and whether the span is the whole space."""
    root: Tensor | None = None
    for name, sites in symmetry.sites.items():
        for site in sites:
            if site.group.name == group.name and site.placement.is_inverse == is_inverse and _counts(symmetry, name):
                lead = params[name].ndim - len(symmetry.shapes[name])
                values = unit_values(symmetry, name, site, params[name], lead).mT
                root = torch.linalg.qr(values if root is None else torch.cat([root, values], -2), mode="r").R
    if root is None:
        return torch.eye(group.size, dtype=torch.float64), True
    _, singular, rows = torch.linalg.svd(root, full_matrices=False)
    there = singular > zero * singular[..., :1].clamp_min(torch.finfo(torch.float64).tiny)
    kept = rows * there.unsqueeze(-1)
    return kept.mT @ kept, there.shape[-1] == group.size and bool(there.all())


def _project(
    params: Params, symmetry: Symmetry, group: Group, projection: Float64[Tensor, "*lead n n"], *, is_inverse: bool
) -> set[str]:
    """Project one factor of a matrix product in place. Return the names of the tensors that changed."""
    changed = set[str]()
    for name, sites in symmetry.sites.items():
        own = [s for s in sites if s.group.name == group.name and s.placement.is_inverse == is_inverse]
        if not own or not _counts(symmetry, name):
            continue
        plain = [replace(site, placement=replace(site.placement, is_inverse=False)) for site in own]
        lead = params[name].shape[: params[name].ndim - len(symmetry.shapes[name])]
        element = Element({group.name: Value(matrix=projection)}, tuple(lead))
        ndims = {name: len(symmetry.shapes[name])}
        moved = _act.act((group,), {name: plain}, element, {name: params[name]}, ndims)[name]
        if bool((moved - params[name]).norm() > 1e-9 * params[name].norm()):
            changed.add(name)
        params[name] = moved
    return changed


def _counts(symmetry: Symmetry, name: str) -> bool:
    return name not in symmetry.buffers
