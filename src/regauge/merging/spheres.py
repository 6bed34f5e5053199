"""Means on spheres: directions and lengths of tensors are averaged, each by itself."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regauge.merging.rule import Rule, Target, weighted_sum

PARALLEL = 1e-6
"""Below this sine of their angle two tensors are parallel, and below this length a mean of directions is none."""
SPHERE_ENTRIES_AT_ONCE = 1 << 17
"""Entries of which inner products are computed at once."""
SPHERE_TOLERANCE = 1e-9
"""A mean of directions has been reached when a step is shorter than that, in radians, or than rounding."""


@dataclass(frozen=True)
class Slerp(Rule):
    """Spherical linear interpolation of two networks, or with a base of their task vectors.

    Each tensor moves from the first to the second by the angle between them. With theta the angle, and t the share of
    the second network's weight,

        sin((1 - t) theta) / sin(theta) a + sin(t theta) / sin(theta) b

    Tensors that are parallel, opposite or zero are interpolated linearly. mergekit does so from a cosine of 0.9995 on;
    here the two formulas meet. With a base it is mergekit's `nuslerp`.

    Attributes:
        axis: None if a tensor has one angle; with 0 or -1 every vector along its first or last axis has its own.

    References:
        Shoemake (1985), Animating rotation with quaternion curves, section 3.3.
    """

    axis: Literal[0, -1] | None = None

    base = "optional"
    most = 2

    def __post_init__(self) -> None:
        if self.axis not in (None, 0, -1):
            raise ValueError(
                f"axis is {self.axis}; it is 0 or -1 where vectors along the first or last axis have angles of their "
                "own, and None for whole tensors"
            )

    def splits(self, shape: Sequence[int]) -> bool:
        """The angle is that of whole tensors, or of vectors."""
        return self.axis == -1 and len(shape) > 1

    def held(self, count: int) -> int:
        """Tensors held at once: both tensors, their directions, and the sum and difference of these."""
        return 6

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """The point on the arc."""
        a, b = tensors
        if self.axis is not None and a.ndim > 1:
            return self._combine_vectors(a, b, factors)
        long, short = length(a), length(b)
        if long == 0 or short == 0:
            return weighted_sum(iter((a, b)), factors)
        # The arc cosine of nearly equal directions has no correct digits; this has all of them.
        apart, together = length(a / long - b / short), length(a / long + b / short)
        angle = 2 * math.atan2(apart, together)
        if math.sin(angle) < PARALLEL:
            return weighted_sum(iter((a, b)), factors)
        arcs = [math.sin(share * angle) / math.sin(angle) for share in factors]
        return weighted_sum(iter((a, b)), arcs)

    def _combine_vectors(self, a: Tensor, b: Tensor, factors: Sequence[float]) -> Tensor:
        """The points on the arcs of all vectors along the axis."""

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


@dataclass(frozen=True)
class KarcherMean(Rule):
    """The mean of many networks on a sphere, or with a base of their task vectors.

    The direction of each tensor is the one whose weighted sum of squared angles to the directions of all networks is
    smallest; its length is the weighted mean of their lengths. It begins at the weighted mean of the directions, and
    moves by the mean of the logarithms until that is zero. Tensors that are zero have no direction and count in the
    length alone. Where directions cancel, no mean of them is defined: then it is the weighted mean of the tensors.

    Attributes:
        steps: The largest number of moves. Without any it is the normalized mean of the directions, which mergekit
            calls `multislerp`.

    References:
        Karcher (1977), Riemannian center of mass and mollifier smoothing; Buss and Fillmore (2001), Spherical averages,
        algorithm A1.
    """

    steps: int = 100

    base = "optional"

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps is {self.steps}; it is how many moves are made at most, and cannot be negative")

    def splits(self, shape: Sequence[int]) -> bool:
        """Directions are those of whole tensors."""
        return False

    def held(self, count: int) -> int:
        """Tensors held at once: all directions, the mean, and one move."""
        return count + 4

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """The mean direction with the mean length."""
        given = list(tensors)
        lengths = [length(tensor) for tensor in given]
        long = sum(share * one for share, one in zip(factors, lengths, strict=True))
        known = [k for k, one in enumerate(lengths) if one > 0 and factors[k] != 0]
        whole = sum(abs(factors[k]) for k in known)  # shares sum to one, but multislerp takes weights of any sign
        if not known:
            return torch.zeros_like(given[0])
        shares = [factors[k] / whole for k in known]
        mean = weighted_sum((given[k] / lengths[k] for k in known), shares)
        if length(mean) < PARALLEL:
            return weighted_sum(iter(given), factors)
        mean /= length(mean)
        directions = [given[k].div_(lengths[k]) for k in known]
        move, tangent = torch.empty_like(mean), torch.empty_like(mean)
        for _ in range(self.steps):
            move.zero_()
            for one, share in zip(directions, shares, strict=True):
                _add_log(move, mean, one, share, tangent)
            angle = length(move)
            if angle < max(SPHERE_TOLERANCE, 4 * torch.finfo(mean.dtype).eps):
                break
            mean.mul_(math.cos(angle)).add_(move, alpha=math.sin(angle) / angle)
            mean /= length(mean)
        return mean.mul_(long)


def length(tensor: Tensor) -> float:
    """The Euclidean norm of all entries, summed in float64."""
    return math.sqrt(_inner(tensor, tensor))


def _inner(a: Tensor, b: Tensor) -> float:
    """The inner product of all entries in float64, in portions, so that no copies are as large as the tensors."""
    portions = zip(*(torch.split(tensor.flatten(), SPHERE_ENTRIES_AT_ONCE) for tensor in (a, b)), strict=True)
    return sum(float(torch.dot(x.double(), y.double())) for x, y in portions)


def _add_log(total: Tensor, start: Tensor, end: Tensor, share: float, work: Tensor) -> None:
    """Add a share of the tangent at one direction that leads to another: its length is the angle, or zero if opposite.

    `work` is written over.
    """
    angle = 2 * math.atan2(length(torch.sub(end, start, out=work)), length(torch.add(end, start, out=work)))
    # y - <x, y> x points along the arc, but its length is sin(angle): only its direction is used.
    torch.sub(end, start, alpha=_inner(start, end), out=work)
    reach = length(work)
    if reach > 0:
        total.add_(work, alpha=share * angle / reach)
