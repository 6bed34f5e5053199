"""Distances between networks up to symmetry. Each pair is aligned before its distance is measured.

After all networks are aligned to one mean, corresponding units of two networks can still have different positions, even
in a network and its noisy copy. Without alignment of each pair, small distances are two or three times too large, but
large distances are almost right. Therefore distances without pairwise alignment only select the pairs that are aligned.
"""

import torch
from scipy.stats import hypergeom
from torch import Tensor

from regauge.flow.alignment import move_near
from regauge.flow.manifold import Points
from regauge.flow.space import Space

AT_ONCE, FEW = 64, 8
"""The number of points that are compared at a time, and the number of nearest networks to which each network is
aligned. The nearest networks are found after alignment to one mean."""
PAIRS = 512
"""The approximate number of pairs over which a mean distance is computed, if there are more pairs."""
NEAR, NEARER, TAIL = 0.8, 0.5, 0.05
"""Two shares of the held-out median distance, and the share of held-out networks that may count as near."""


def nearest(space: Space, points: Points, others: Points, *, is_same: bool = False) -> tuple[Tensor, Tensor]:
    """Return the distance of each point to the nearest other network, `[models]`, and the index of that network.

    Args:
        space: The space of the points.
        points: The points, aligned to the same mean as the other networks.
        others: Other networks, such as training networks.
        is_same: Whether `points` and `others` contain the same networks, so that no network may be compared with
            itself.
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
    """Return the distance of each pair of points: the minimum of the distances before and after pairwise alignment."""
    return torch.minimum(space.distance(first, second), space.distance(move_near(space, second, first), second))


def spread(space: Space, points: Points) -> float:
    """Return the mean distance of two networks, over all pairs or over an evenly spaced subset of pairs."""
    count = len(points)
    shifts = range(1, count // 2 + 1)[: -(-PAIRS // count)]
    pairs = torch.tensor([(k, (k + shift) % count) for shift in shifts for k in range(count)])
    return float(measure(space, points[pairs[:, 0]], points[pairs[:, 1]]).mean())


def count_near(distances: Tensor, held_out: Tensor, share: float) -> float:
    """Return the share of networks that are nearer to another network than nearly all held-out networks are.

    Args:
        distances: The distance of each network to the nearest other network.
        held_out: The distances of held-out networks to training networks.
        share: A second bound, as a share of the median distance of held-out networks. The second bound matters if the
            distances of all held-out networks are about equal, because a slightly smaller distance then does not
            indicate a copy.
    """
    bound = torch.minimum(share * held_out.median(), held_out.double().quantile(TAIL).to(held_out))
    return float((distances < bound).double().mean())


def find_chance(near: int, count: int, held_out: int, of: int) -> float:
    """Return the probability that at least `near` networks are near under the null hypothesis that generated networks
    are as new as held-out networks.

    Under the null hypothesis, all rankings of the distances of generated and held-out networks are equally likely.

    Args:
        near: The number of generated networks below a bound.
        count: The number of generated networks.
        held_out: The number of held-out networks below the bound.
        of: The number of held-out networks.
    """
    return float(hypergeom.cdf(held_out, count + of, of, near + held_out))
