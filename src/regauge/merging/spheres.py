"""Means on spheres: directions and lengths of tensors are averaged, each by itself."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.merging.rule import Rule, Target, weighted_sum

PARALLEL = 1e-6
"""Below this sine of their angle two tensors are parallel, and below this length a mean of directions is none."""
PORTION = 1 << 17
"""Entries of which inner products are computed at once."""
TOLERANCE = 1e-9
"""A mean of directions has been reached when a step is shorter than that, in radians, or than rounding."""


@dataclass(frozen=True)
class Slerp(Rule):
    """Spherical linear interpolation of two networks, or with a base of their task vectors.

    Each tensor moves from the first to the second by the angle between them. With theta the angle, and t the share of
    the second network's weight,

        sin((1 - t) theta) / sin(theta) a + sin(t theta) / sin(theta) b

    Tensors that are parallel, opposite or zero are interpolated linearly. mergekit does so from a cosine of 0.9995 on;
    here the two formulas meet. With a base it is mergekit's `nuslerp`.

    References:
        Shoemake (1985), Animating rotation with quaternion curves, section 3.3.
    """

    base = "optional"
    most = 2

    def splits(self, shape: Sequence[int]) -> bool:
        """The angle is that of whole tensors."""
        return False

    def held(self, count: int) -> int:
        """Both tensors, and their directions."""
        return 6

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """The point on the arc."""
        a, b = tensors
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


@dataclass(frozen=True)
class KarcherMean(Rule):
    """The mean of many networks on a sphere, or with a base of their task vectors.

    The direction of each tensor is the one whose weighted sum of squared angles to the directions of all networks is
    smallest; its length is the weighted mean of their lengths. It begins at the weighted mean of the directions, and
    moves by the mean of the logarithms until that is zero. Tensors that are zero have no direction and count in the
    length alone. Where directions cancel, no mean of them is defined: then it is the weighted mean of the tensors.

    Attributes:
        steps: How many moves are made at most. Without any it is the normalized mean of the directions, which mergekit
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
        """All directions, the mean, and one move."""
        return count + 4

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """The mean direction with the mean length."""
        given = list(tensors)
        lengths = [length(tensor) for tensor in given]
        long = sum(share * one for share, one in zip(factors, lengths, strict=True))
        known = [k for k, one in enumerate(lengths) if one > 0 and factors[k] > 0]
        whole = sum(factors[k] for k in known)
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
            if angle < max(TOLERANCE, 4 * torch.finfo(mean.dtype).eps):
                break
            mean.mul_(math.cos(angle)).add_(move, alpha=math.sin(angle) / angle)
            mean /= length(mean)
        return mean.mul_(long)


def length(tensor: Tensor) -> float:
    """The Euclidean norm of all entries, summed in float64."""
    return math.sqrt(_inner(tensor, tensor))


def _inner(a: Tensor, b: Tensor) -> float:
    """The inner product of all entries in float64, in portions, so that no copies are as large as the tensors."""
    portions = zip(*(torch.split(tensor.flatten(), PORTION) for tensor in (a, b)), strict=True)
    return sum(float(torch.dot(x.double(), y.double())) for x, y in portions)


def _add_log(total: Tensor, start: Tensor, end: Tensor, share: float, work: Tensor) -> None:
    """Add a share of the tangent at one direction that leads to another: its length is the angle, or zero if opposite.

    `work` is written over.
    """
    angle = 2 * math.atan2(length(torch.sub(end, start, out=work)), length(torch.add(end, start, out=work)))
    torch.sub(end, start, alpha=_inner(start, end), out=work)
    reach = length(work)
    if reach > 0:
        total.add_(work, alpha=share * angle / reach)
