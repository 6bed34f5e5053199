"""Controls made from training networks without a flow: copies, noisy copies, averages, normal distributions."""

import torch
from torch import Tensor

from regauge.core import sphere
from regauge.flow.manifold import Points
from regauge.flow.novelty import nearest
from regauge.flow.space import Space

BISECTIONS = 12
"""Steps of the search for the size of noise."""


def make_controls(
    space: Space, train: Points, distance: float, count: int, generator: torch.Generator
) -> dict[str, Points]:
    """Return the points of all controls, made from aligned training networks, by name.

    Args:
        space: The space of the points.
        train: Aligned training networks.
        distance: The median distance of held-out networks to the nearest training network, which determines the noise.
        count: The number of networks of each control.
        generator: The random generator.
    """

    def some(size: int) -> Tensor:
        return train[torch.randint(len(train), (count, size), generator=generator)]

    copies = some(1)[:, 0]
    noise = torch.randn(count, space.dim, generator=generator).to(train)
    centered = train - train.mean(0)
    weights = torch.randn(count, len(train), generator=generator).to(train) / max(1, len(train) - 1) ** 0.5
    drawn = torch.randn(count, space.dim, generator=generator).to(train)
    return {
        "copies": copies,
        "copies with noise": _add_noise(space, train, copies, noise, distance),
        "means of 2": _mean(space, some(2)),
        "means of 16": _mean(space, some(16)),
        "normal, each value by itself": space.project(train.mean(0) + drawn * train.std(0)),
        "normal, all covariances": space.project(train.mean(0) + weights @ centered),
    }


def _add_noise(space: Space, train: Points, copies: Points, noise: Points, distance: float) -> Points:
    """Return noisy copies that are as far from training networks as held-out networks are."""
    scaled = noise * train.std(0)
    low, high = 0.0, 4.0
    few = slice(0, 32)
    for _ in range(BISECTIONS):
        size = (low + high) / 2
        found = float(nearest(space, space.project(copies[few] + size * scaled[few]), train)[0].median())
        low, high = (size, high) if found < distance else (low, size)
    return space.project(copies + low * scaled)


def _mean(space: Space, groups: Tensor) -> Points:
    """Return the mean of each group of points, `[count, group, values]`, projected to the spheres."""
    return space.map(groups.mean(1), euclidean=lambda x: x, spherical=sphere.normalize)
