"""The unit sphere: distances, the exponential and logarithm maps, geodesics and means, exact in float32.

Points and tangent vectors lie along the last axis; leading axes are batch axes. Angles are in radians. No function in
this module computes an arc cosine, which would need clamping. Therefore even tiny angles are correct, and all gradients
are finite, also at equal points.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Points = Float[Tensor, "*#lead dim"]
"""Points or tangent vectors. The leading axes of points and vectors broadcast."""

MAX_STEPS = 100
"""The largest number of iterations for computing a mean on the sphere."""


def normalize(x: Float[Tensor, "*lead dim"]) -> Float[Tensor, "*lead dim"]:
    """Return the nearest point on the sphere. For the zero vector, which has no nearest point, the result is NaN."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norms


def tangent(x: Points, v: Points) -> Points:
    """Return the part of v that is tangent to the sphere at x: `v - <x, v> x`."""
    return v - (x * v).sum(-1, keepdim=True) * x


def distance(x: Points, y: Points) -> Float[Tensor, "*lead"]:
    """Return the angle between points, in [0, pi]: `2 atan2(|x - y|, |x + y|)`.

    References:
        Kahan (2006), How futile are mindless assessments of roundoff, section 12.
    """
    apart, together = torch.linalg.vector_norm(x - y, dim=-1), torch.linalg.vector_norm(x + y, dim=-1)
    return 2 * torch.atan2(apart, together)


def exp(x: Points, v: Points) -> Points:
    """Return the point that a geodesic reaches after unit time if it starts at x with the tangent velocity v.

    `exp(x, v) = cos |v| x + sin |v| v / |v|`.
    """
    angle = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return torch.cos(angle) * x + torch.sinc(angle / math.pi) * v


def log(x: Points, y: Points) -> Points:
    """Return the velocity at x of the shortest geodesic that reaches y after unit time: `exp(x, log(x, y)) == y`.

    The length of the returned velocity is `distance(x, y)`. Antipodal points have no unique shortest geodesic, and the
    result for them is meaningless; see `is_antipodal`.
    """
    angle = distance(x, y).unsqueeze(-1)
    # The tangent part of y - x is that of y, without the cancellation of nearly equal points; its length is sin(angle).
    return tangent(x, y - x) / torch.sinc(angle / math.pi)


def geodesic(x: Points, y: Points, t: Tensor | float) -> Points:
    """Return the point at fraction t of the shortest geodesic: exactly x at t = 0, and exactly y at t = 1.

    Args:
        x: The start points.
        y: The end points. No end point may be antipodal to its start point; see `log`.
        t: A number, or one number for each leading index.
    """
    share = torch.as_tensor(t, dtype=x.dtype, device=x.device).unsqueeze(-1)
    angle = distance(x, y).unsqueeze(-1) / math.pi
    left, right = (part * torch.sinc(part * angle) / torch.sinc(angle) for part in (1 - share, share))
    return left * x + right * y


def mean(
    points: Float[Tensor, "*lead points dim"],
    weights: Float[Tensor, "... points"] | None = None,
    *,
    tolerance: float | None = None,
) -> Float[Tensor, "*lead dim"]:
    """Return the Karcher mean: the point with the smallest weighted sum of squared distances to the given points.

    The mean is unique if all points lie within an open half sphere. At the mean, `sum_k w_k log(mean, point_k) = 0`.

    Args:
        points: The points, along the axis before the last.
        weights: Nonnegative weights, either one set for all means or one set for each mean. Default: all points have
            equal weights.
        tolerance: The iteration ends when no mean moves by more than this angle. Default: four times the machine
            precision of the dtype.

    Raises:
        ValueError: Weights are negative or sum to zero, or the weighted points cancel and no mean is defined.

    References:
        Karcher (1977), Riemannian center of mass and mollifier smoothing, definition 1.3.
    """
    share = torch.ones(points.shape[-2], dtype=points.dtype, device=points.device) if weights is None else weights
    share = share.to(points)
    total = share.sum(-1, keepdim=True)
    if bool((share < 0).any()) or bool((total <= 0).any()):
        raise ValueError("the weights of a mean must not be negative, and at least one must be positive")
    share = (share / total).unsqueeze(-1)
    center = (share * points).sum(-2)
    precision = torch.finfo(points.dtype).eps
    if bool((torch.linalg.vector_norm(center, dim=-1) <= 16 * precision).any()):
        raise ValueError("the weighted points cancel and have no single mean; move them closer together")
    center = normalize(center)
    if points.shape[-2] == 1:
        return center
    for _ in range(MAX_STEPS):
        step = (share * log(center.unsqueeze(-2), points)).sum(-2)
        center = normalize(exp(center, step))
        if float(torch.linalg.vector_norm(step, dim=-1).max()) <= (4 * precision if tolerance is None else tolerance):
            break
    return center


def is_antipodal(x: Points, y: Points) -> Bool[Tensor, "*lead"]:
    """Return whether points are antipodal up to rounding. Antipodal points have no unique shortest geodesic."""
    together: Tensor = torch.linalg.vector_norm(x + y, dim=-1)
    return together <= 16 * torch.finfo(x.dtype).eps
