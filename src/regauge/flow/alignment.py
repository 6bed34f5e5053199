"""Points aligned to one another, so that coordinates mean the same unit everywhere."""

import torch
from torch import Tensor

from regauge.alignment import WeightMatching, align_pairs
from regauge.core import sphere
from regauge.flow.manifold import Points
from regauge.flow.space import Space

AT_ONCE = 512
"""Networks that are aligned at a time."""


@torch.no_grad()
def align_points(space: Space, reference: Tensor, points: Points) -> Points:
    """Points moved along their orbits, as near to a reference as weight matching brings them.

    Args:
        space: Of the points.
        reference: One point, `[values]`, or one for each, `[models, values]`.
        points: What is moved, `[models, values]`.
    """
    made = torch.empty_like(points)
    for start in range(0, len(points), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        if reference.ndim == 1:
            anchor = {name: tensor[0] for name, tensor in space.arrange(reference.unsqueeze(0)).items()}
        else:
            anchor = space.arrange(reference[part])
        moved = align_pairs(anchor, space.arrange(points[part]), space.symmetry, method=WeightMatching(scales="keep"))
        made[part] = space.collect(moved.params).to(points)
    return made


def find_reference(space: Space, points: Points, *, rounds: int = 2, most: int = 512) -> Tensor:
    """A point in the middle of others when orders of units do not count, `[values]`.

    Some networks are aligned to the first one, then to their mean, and so on.
    """
    some = points[:most]
    reference = some[0]
    for _ in range(rounds):
        aligned = align_points(space, reference, some).double()
        reference = space.map(aligned.mean(0), euclidean=lambda x: x, spherical=sphere.normalize).to(points)
    return reference
