"""The Karcher mean of many networks: a mean of directions, multiplied by the mean of the lengths."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.merging.rule import Rule, Target, weighted_sum
from regauge.merging.rules.spheres import PARALLEL, inner_product, length


@dataclass(frozen=True)
class KarcherMean(Rule):
    """The mean of many networks on a sphere; if a base is given, the mean of their task vectors.

    The direction of each tensor minimizes the weighted sum of squared angles to the directions of all networks. The
    length is the weighted mean of the networks' lengths. The iteration starts at the weighted mean of the directions.
    Each step moves along the mean of the tangents that lead to the directions, until this mean is zero. A zero tensor
    has no direction and contributes only to the mean length. If the directions cancel, the result is the weighted mean
    of the tensors.

    Attributes:
        steps: The largest number of steps. With zero steps, the direction is the normalized mean of the directions, as
            in mergekit's `multislerp`.
        tolerance: An angle in radians. The iteration ends when a step is shorter than the tolerance or than rounding
            errors. Directions whose angle to the mean is smaller than the tolerance are ignored in a step.

    References:
        Karcher (1977), Riemannian center of mass and mollifier smoothing; Buss and Fillmore (2001), Spherical averages,
        algorithm A1.
    """

    steps: int = 100
    tolerance: float = 1e-9

    base = "optional"

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps is {self.steps}; it is how many moves are made at most, and cannot be negative")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance is {self.tolerance}; it is an angle in radians, and cannot be negative")

    def splits(self, shape: Sequence[int]) -> bool:
        """Return False, because directions are computed over whole tensors."""
        return False

    def held(self, count: int) -> int:
        """Return the number of tensors held at once: all directions, the mean, and one step."""
        return count + 4

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the mean direction, scaled to the mean length."""
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
                _add_log(move, mean, one, share, tangent, self.tolerance)
            angle = length(move)
            if angle < max(self.tolerance, 4 * torch.finfo(mean.dtype).eps):
                break
            mean.mul_(math.cos(angle)).add_(move, alpha=math.sin(angle) / angle)
            mean /= length(mean)
        return mean.mul_(long)


def _add_log(total: Tensor, start: Tensor, end: Tensor, share: float, work: Tensor, least: float) -> None:
    """Add a share of the tangent from one direction to another, unless their angle is smaller than `least`.

    The length of the tangent is the angle, or zero if the directions are opposite.

    `work` is overwritten.
    """
    angle = 2 * math.atan2(length(torch.sub(end, start, out=work)), length(torch.add(end, start, out=work)))
    # y - <x, y> x points along the arc, but its length is sin(angle): only its direction is used.
    torch.sub(end, start, alpha=inner_product(start, end), out=work)
    reach = length(work)
    if reach > 0 and angle >= least:
        total.add_(work, alpha=share * angle / reach)
