"""Distances between networks up to symmetry, for which each pair is aligned before it is measured.

Networks that were aligned to one mean can still have different orders of units, even a noisy copy and its source. In
this common gauge, small distances are two or three times too large, but large distances are almost right. Distances in
the common gauge are therefore only used to select the pairs that are aligned.
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
    """Return the distance of each point to the nearest of other networks, `[models]`, and the index of that network.

    Args:
        space: The space of the points.
        points: The points, aligned to the same mean as the other networks.
        others: Other networks, such as training networks.
        is_same: Whether both arguments are the same networks; then a network is not compared with itself.
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
    """Return the distance of each pair after the first point is aligned to the second, or before, if that is less."""
    return torch.minimum(space.distance(first, second), space.distance(move_near(space, second, first), second))


def spread(space: Space, points: Points) -> float:
    """Return the mean distance of two networks, over all pairs or over some evenly spread pairs."""
    count = len(points)
    shifts = range(1, count // 2 + 1)[: -(-PAIRS // count)]
    pairs = torch.tensor([(k, (k + shift) % count) for shift in shifts for k in range(count)])
    return float(measure(space, points[pairs[:, 0]], points[pairs[:, 1]]).mean())


def count_near(distances: Tensor, held_out: Tensor, share: float) -> float:
    """Return the share of networks whose nearest distance is less than that of nearly all held-out networks.

    Args:
        distances: The distance of each network to the nearest other one.
        held_out: The distances of held-out networks to training networks.
        share: A second bound, as a share of the median distance of held-out networks. If all held-out networks have
            about the same distance, a slightly smaller distance is no sign of a copy.
    """
    bound = torch.minimum(share * held_out.median(), held_out.double().quantile(TAIL).to(held_out))
    return float((distances < bound).double().mean())


def find_chance(near: int, count: int, held_out: int, of: int) -> float:
    """Return the probability of at least `near` near networks if generated networks were as new as held-out ones.

    Under this assumption, all orders of the distances of both kinds are equally likely.

    Args:
        near: The number of generated networks below a bound.
        count: The number of generated networks.
        held_out: The number of held-out networks below the bound.
        of: The number of held-out networks.
    """
    return float(hypergeom.cdf(held_out, count + of, of, near + held_out))
