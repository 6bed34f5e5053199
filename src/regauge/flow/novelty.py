"""Distances between networks up to symmetry: pairs are aligned one by one before they are measured.

Networks that were aligned to one middle can still lie in different orders, even a copy with noise and its source. In
that common gauge small distances come out two or three times too large, and large ones hardly; so they only say which
pairs are worth a look.
"""

import torch
from scipy.stats import hypergeom
from torch import Tensor

from regauge.flow.alignment import move_near
from regauge.flow.manifold import Points
from regauge.flow.space import Space

AT_ONCE, FEW = 64, 8
"""Points that are compared at a time, and how many of the nearest others in the common gauge are aligned to each."""
PAIRS = 512
"""About how many pairs a mean distance is taken of, where there are more."""
NEAR, NEARER, TAIL = 0.8, 0.5, 0.05
"""Shares of the median distance of held-out networks, and the share of these that may count as near."""


def nearest(space: Space, points: Points, others: Points, *, is_same: bool = False) -> tuple[Tensor, Tensor]:
    """Return the distance to the nearest of other networks of each point, `[models]`, and the number of that network.

    Args:
        space: The space of the points.
        points: Aligned to the middle that the others were aligned to.
        others: Other networks, such as training networks.
        is_same: Whether these are the same networks, of which none is the nearest to itself.
    """
    distances, numbers = [], []
    count = min(FEW, len(others) - is_same)
    for start in range(0, len(points), AT_ONCE):
        some = points[start : start + AT_ONCE]
        rough = torch.cdist(some.double(), others.double())
        if is_same:
            rows = torch.arange(len(some))
            rough[rows, start + rows] = torch.inf
        near = rough.topk(count, largest=False).indices
        found = measure(space, some.repeat_interleave(count, 0), others[near.flatten()]).reshape(-1, count)
        least, place = found.min(1)
        distances.append(least)
        numbers.append(near.gather(1, place.unsqueeze(1))[:, 0])
    return torch.cat(distances), torch.cat(numbers)


def measure(space: Space, first: Points, second: Points) -> Tensor:
    """The distance of each pair after the first is aligned to the second, or as they are where that is less."""
    return torch.minimum(space.distance(first, second), space.distance(move_near(space, second, first), second))


def spread(space: Space, points: Points) -> float:
    """Return the mean distance of two networks, over all pairs or some that are evenly spread."""
    count = len(points)
    shifts = range(1, count // 2 + 1)[: -(-PAIRS // count)]
    pairs = torch.tensor([(k, (k + shift) % count) for shift in shifts for k in range(count)])
    return float(measure(space, points[pairs[:, 0]], points[pairs[:, 1]]).mean())


def count_near(distances: Tensor, held_out: Tensor, share: float) -> float:
    """Return the share of networks that are nearer to others than nearly all held-out networks are.

    Args:
        distances: The distance of each network to the nearest other one.
        held_out: The distances of held-out networks to training networks.
        share: The share of the median of these that a distance must be below, too: where held-out networks are all at
            about one distance, a little less is no sign of a copy.
    """
    bound = torch.minimum(share * held_out.median(), held_out.double().quantile(TAIL).to(held_out))
    return float((distances < bound).double().mean())


def find_chance(near: int, count: int, held_out: int, of: int) -> float:
    """Return the probability of so many near networks, or more, if generated networks were as new as held-out ones.

    All orders of the distances of both kinds are then equally likely.

    Args:
        near: Generated networks below a bound.
        count: Generated networks.
        held_out: Held-out networks below it.
        of: Held-out networks.
    """
    return float(hypergeom.cdf(held_out, count + of, of, near + held_out))
