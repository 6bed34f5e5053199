"""Points at which fields are evaluated: mostly near the surface, some further off, a few anywhere."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Queries:
    """Numbers of points by their distance from the surface, 500,000 in all in paper 003.

    Those of a kind lie around the points of the surface, all of which serve equally often, with normal noise.

    Attributes:
        near: Points with noise of standard deviation `near_sigma`.
        middle: Points with noise of standard deviation `middle_sigma`.
        far: Points with noise of standard deviation `far_sigma`.
        uniform: Points anywhere in the cube [-1, 1]^3.
        near_sigma: Standard deviation for `near`; the unit is the radius of the shape's ball.
        middle_sigma: Standard deviation for `middle`.
        far_sigma: Standard deviation for `far`.

    Raises:
        ValueError: There is no point, or a count or standard deviation is negative.

    References:
        Paper 003, section 3.2; the standard deviations are those of De Luigi et al. (2023), in their program.
    """

    near: int = 250_000
    middle: int = 200_000
    far: int = 25_000
    uniform: int = 25_000
    near_sigma: float = 0.003
    middle_sigma: float = 0.01
    far_sigma: float = 0.1

    def __post_init__(self) -> None:
        counts = (self.near, self.middle, self.far, self.uniform)
        if min(counts) < 0 or not self.total or min(self.near_sigma, self.middle_sigma, self.far_sigma) < 0:
            raise ValueError(f"{self} cannot be drawn: give counts that are not negative, and at least one point")

    @property
    def total(self) -> int:
        """Number of points."""
        return self.near + self.middle + self.far + self.uniform


EVALUATION = Queries(5_000, 4_000, 500, 500)
"""The 10,000 points, in the same proportions, that a loss is measured on."""


def draw_queries(surface: Tensor, queries: Queries, *, generator: torch.Generator) -> Tensor:
    """Points for a surface that is given by points of it.

    Args:
        surface: `[points, 3]`.
        queries: Numbers of points and their distances from the surface.
        generator: Random generator.

    Returns:
        `[queries.total, 3]`, near ones first, uniform ones last, clipped to the cube; in the dtype of the surface.

    Raises:
        ValueError: The surface has no points.
    """
    if surface.ndim != 2 or not len(surface):
        raise ValueError(f"a surface is given by at least one point [points, 3], not by {list(surface.shape)}")
    parts = []
    for count, sigma in (
        (queries.near, queries.near_sigma),
        (queries.middle, queries.middle_sigma),
        (queries.far, queries.far_sigma),
    ):
        order = torch.randperm(len(surface), generator=generator)
        around = surface[order[torch.arange(count) % len(surface)]]
        noise = torch.randn(around.shape, generator=generator, dtype=surface.dtype)
        parts.append((around + sigma * noise).clamp_(-1, 1))
    parts.append(torch.rand(queries.uniform, surface.shape[1], generator=generator, dtype=surface.dtype) * 2 - 1)
    return torch.cat(parts)
