"""Alignment of networks that are represented as points.

After the alignment, each coordinate belongs to corresponding units in all networks.
"""

import torch
from torch import Tensor

from regauge.alignment import WeightMatching, align_pairs
from regauge.canonical import canonicalize
from regauge.core import sphere
from regauge.core.element import PARTS
from regauge.flow.manifold import Points
from regauge.flow.space import Space

ALIGNED_AT_ONCE = 512
"""The number of networks that are aligned at a time."""


@torch.no_grad()
def sort_points(space: Space, points: Points) -> Points:
    """Return the points of sorted networks, which are equal for all networks of an orbit.

    Sums of weights determine the signs, the matrices and the order of units.

    In a space with `scales="keep"`, scales and invertible matrices are not changed.
    """
    scales = space.representation.scales
    kept = {"scale"} if scales != "keep" else {"scale", "linear"}
    parts = tuple(part for part in PARTS if part not in kept)
    is_balanced = scales == "balance" and any(group.matrix == "linear" for group in space.symmetry.groups)
    made = torch.empty_like(points)
    for start in range(0, len(points), ALIGNED_AT_ONCE):
        part = slice(start, start + ALIGNED_AT_ONCE)
        found = canonicalize(space.arrange(points[part]), space.symmetry, parts=parts)
        made[part] = space.collect(space.balance(found) if is_balanced else found).to(points)
    return made


@torch.no_grad()
def align_points(space: Space, reference: Tensor, points: Points) -> Points:
    """Transform points by the symmetry, and bring them as close to a reference as weight matching can.

    Weight matching ends in a local optimum, which may depend on its initialization. Therefore points are sorted first,
    which maps all networks of an orbit to the same point.

    Args:
        space: The space of the points.
        reference: One point, `[values]`, or one reference for each point, `[models, values]`.
        points: The points to transform, `[models, values]`.
    """
    return move_near(space, reference, sort_points(space, points))


@torch.no_grad()
def move_near(space: Space, reference: Tensor, points: Points) -> Points:
    """Transform points towards a reference by weight matching, without first sorting the units."""
    made = torch.empty_like(points)
    for start in range(0, len(points), ALIGNED_AT_ONCE):
        part = slice(start, start + ALIGNED_AT_ONCE)
        if reference.ndim == 1:
            anchor = {name: tensor[0] for name, tensor in space.arrange(reference.unsqueeze(0)).items()}
        else:
            anchor = space.arrange(reference[part])
        moved = align_pairs(anchor, space.arrange(points[part]), space.symmetry, method=WeightMatching(scales="keep"))
        made[part] = space.collect(moved.params).to(points)
    return made


def find_reference(space: Space, points: Points, *, rounds: int = 5, most: int = 512) -> Tensor:
    """Return the mean of points up to permutations of units, `[values]`.

    A subset of the networks is aligned to the first network. Next, the subset is repeatedly aligned to its mean, and
    the mean is recomputed after each alignment.
    """
    some = points[:most]
    reference = some[0]
    for _ in range(rounds):
        aligned = align_points(space, reference, some).double()
        reference = space.map(aligned.mean(0), reference.double(), euclidean=_first, spherical=_direction).to(points)
    return reference


def _first(mean: Tensor, _: Tensor) -> Tensor:
    return mean


def _direction(mean: Tensor, before: Tensor) -> Tensor:
    """Return the directions of means. If opposite points cancel, return the previous directions."""
    return torch.where(torch.linalg.vector_norm(mean, dim=-1, keepdim=True) > 0, sphere.normalize(mean), before)
