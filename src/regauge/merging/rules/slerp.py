"""Spherical linear interpolation (slerp) of two networks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regauge.merging.rule import Rule, Target, weighted_sum
from regauge.merging.rules.spheres import PARALLEL, length


@dataclass(frozen=True)
class Slerp(Rule):
    """Spherical linear interpolation of two networks. If a base is given, interpolation of their task vectors.

    Each tensor is interpolated along an arc from the first network to the second. Let a and b be the two tensors, theta
    the angle between them, and t the second network's share of the weights. The result is

        sin((1 - t) theta) / sin(theta) a + sin(t theta) / sin(theta) b

    Tensors that are parallel, opposite or zero are interpolated linearly. If a base is given, the rule equals
    mergekit's `nuslerp`.

    Attributes:
        axis: None for one angle per tensor. 0 or -1 for one angle per vector along the first or last axis.
        linear_from: A limit on the absolute cosine of the angle. If the absolute cosine of a whole tensor exceeds the
            limit, the tensor is interpolated linearly. In recipes with the method `slerp`, the limit is 0.9995, as in
            mergekit.

    References:
        Shoemake (1985), Animating rotation with quaternion curves, section 3.3.
    """

    axis: Literal[0, -1] | None = None
    linear_from: float = 1.0

    base = "optional"
    most = 2

    def __post_init__(self) -> None:
        if self.axis not in (None, 0, -1):
            raise ValueError(
                f"axis is {self.axis}; it is 0 or -1 where vectors along the first or last axis have angles of their "
                "own, and None for whole tensors; choose one"
            )
        if not 0 < self.linear_from <= 1:
            raise ValueError(f"linear_from is {self.linear_from}; it is a cosine, above 0 and at most 1")

    def splits(self, shape: Sequence[int]) -> bool:
        """Return whether each vector along the last axis has its own angle."""
        return self.axis == -1 and len(shape) > 1

    def held(self, count: int) -> int:
        """Return the number of tensors held at once: both tensors, both directions, and their sum and difference."""
        return 6

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the interpolated tensor, a point on the arc."""
        a, b = tensors
        if self.axis is not None and a.ndim > 1:
            return self._combine_vectors(a, b, factors)
        long, short = length(a), length(b)
        if long == 0 or short == 0:
            return weighted_sum(iter((a, b)), factors)
        # The arc cosine of nearly equal directions has no correct digits, but this formula is exact.
        apart, together = length(a / long - b / short), length(a / long + b / short)
        angle = 2 * math.atan2(apart, together)
        if math.sin(angle) < PARALLEL or abs(math.cos(angle)) > self.linear_from:
            return weighted_sum(iter((a, b)), factors)
        arcs = [math.sin(share * angle) / math.sin(angle) for share in factors]
        return weighted_sum(iter((a, b)), arcs)

    def _combine_vectors(self, a: Tensor, b: Tensor, factors: Sequence[float]) -> Tensor:
        """Return the interpolated vectors, one for each pair of vectors along the axis."""

        def norm(tensor: Tensor) -> Tensor:
            found: Tensor = torch.linalg.vector_norm(tensor, dim=self.axis, keepdim=True, dtype=torch.float64)
            return found

        long, short = norm(a), norm(b)
        units = [x / one.masked_fill(one == 0, 1.0).to(x) for x, one in ((a, long), (b, short))]
        angle = 2 * torch.atan2(norm(units[0] - units[1]), norm(units[0] + units[1]))
        del units
        is_linear = (angle.sin() < PARALLEL) | (long == 0) | (short == 0)
        sine = angle.sin().masked_fill_(is_linear, 1.0)
        arcs = [torch.where(is_linear, share, (share * angle).sin() / sine).to(a) for share in factors]
        return a.mul_(arcs[0]).add_(b.mul_(arcs[1]))
