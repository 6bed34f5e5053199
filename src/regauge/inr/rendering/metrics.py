"""Agreement of reconstructions with their references."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.spatial import cKDTree
from torch import Tensor

THRESHOLD = 0.01
"""Distance up to which the F-score counts a point as right."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of two point clouds: P (reconstructed) and Q (the reference)."""

    chamfer: float  # `mean over P of min |p - q|^2 + mean over Q of min |q - p|^2`: squared distances, means, their sum
    precision: float  # share of P within the threshold of Q
    recall: float  # share of Q within the threshold of P

    @property
    def f_score(self) -> float:
        """The harmonic mean of precision and recall."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


def compare_points(points: Tensor, reference: Tensor, *, threshold: float = THRESHOLD) -> Agreement:
    """Chamfer distance and F-score of a point cloud against a reference, with exact nearest neighbors.

    Without points the Chamfer distance is infinite, and the F-score zero.

    Args:
        points: `[points, 3]`.
        reference: `[others, 3]`.
        threshold: Largest distance at which the F-score counts a point as right.

    Raises:
        ValueError: The reference is empty, or a coordinate is not finite.

    References:
        Fan et al. (2017), A point set generation network; Tatarchenko et al. (2019), What do single-view 3D
        reconstruction networks learn.
    """
    p, q = (np.asarray(cloud.detach().cpu().double()) for cloud in (points, reference))
    if not len(q):
        raise ValueError("the reference has no points, so nothing can be compared with it")
    if not (np.isfinite(p).all() and np.isfinite(q).all()):
        raise ValueError("a coordinate is NaN or infinite; drop such points before comparing")
    if not len(p):
        return Agreement(math.inf, 0.0, 0.0)
    there, back = (np.asarray(cKDTree(b).query(a)[0]) for a, b in ((p, q), (q, p)))
    chamfer = float((there**2).mean() + (back**2).mean())
    return Agreement(chamfer, float((there <= threshold).mean()), float((back <= threshold).mean()))


def psnr(image: Tensor, reference: Tensor) -> float:
    """Peak signal-to-noise ratio in decibels, of values in [0, 1]: `-10 log10` of the mean squared error.

    Raises:
        ValueError: The images differ in shape.
    """
    if image.shape != reference.shape:
        raise ValueError(f"images of shapes {tuple(image.shape)} and {tuple(reference.shape)} cannot be compared")
    error = (image.detach().double() - reference.detach().double()).square().mean().item()
    return math.inf if error == 0 else -10 * math.log10(error)
