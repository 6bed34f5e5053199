"""Dense point clouds from unsigned distances, by projecting random points to the surface. Comparison of clouds."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor, nn

from regauge.core.arguments import check_arguments
from regauge.core.given import given_or_seed
from regauge.inr.fields.signal_samples import DistanceLabels, labels_of
from regauge.inr.rendering.field_values import evaluate, module_of, require_one
from regauge.inr.representation import Inr

ROUND = 2**14
"""The number of random points in one round."""
PATIENCE = 4
"""The number of rounds after which the search ends if none of their 65,536 random points is close to a surface."""


@dataclass(frozen=True)
class Projection:
    """Settings of the projection of points to the surface.

    Points are uniformly random in [-1, 1]^3. Points with a distance of at most `near` are updated `steps` times by `x
    <- x - u(x) grad u(x) / |grad u(x)|`. A point is kept if its distance before the last update was at most `close`.

    Attributes:
        count: The requested number of points.
        steps: The number of updates of each point. The thesis uses 1 in validation and 5 for pictures.
        near: The largest initial distance of a point.
        close: The largest distance before the last update.
        tries: The largest number of random points per requested point.
        seconds: The largest wall time. A round that has begun is finished. If the time limit is not reached, results do
            not depend on the machine.

    References:
        Chibane et al. (2020), Neural unsigned distance fields; De Luigi et al. (2023).
    """

    count: int = 2048
    steps: int = 5
    near: float = 0.05
    close: float = 0.02
    tries: int = 256
    seconds: float = 60.0

    def __post_init__(self) -> None:
        if min(self.count, self.steps, self.tries) < 1 or not self.seconds > 0:
            raise ValueError(f"{self} finds no points: count, steps, tries and seconds must be positive")
        if not 0 < self.close <= self.near:
            raise ValueError(f"close={self.close} and near={self.near}, but 0 < close <= near is needed")


@dataclass(frozen=True)
class PointCloud:
    """The points that `extract_points` found on a surface."""

    points: Tensor  # `[points, 3]`, in the dtype of the network
    wanted: int  # number of requested points
    draws: int  # random points that were tried

    @property
    def is_complete(self) -> bool:
        """Whether the requested number of points was found."""
        return len(self.points) == self.wanted

    def __str__(self) -> str:
        if self.is_complete:
            return f"{self.wanted:,} points from {self.draws:,} random ones"
        return (
            f"only {len(self.points):,} of {self.wanted:,} points: {self.draws:,} random ones were tried, and no "
            "others came close to a surface; the network may be damaged"
        )


@check_arguments
def extract_points(
    inr: Inr,
    params: Mapping[str, Tensor],
    projection: Projection | None = None,
    *,
    generator: torch.Generator | None = None,
) -> PointCloud:
    """Return points on the surface where an unsigned distance is zero.

    If a network has no surface, the function ends after a bounded time with fewer points than requested, or without
    points. If points are missing, the text of the result reports how many points were found.

    Args:
        inr: An INR whose signal is "unsigned".
        projection: The settings of the projection; `Projection()` by default.

    Raises:
        ValueError: The INR has another signal, or `near` is not below the distance at which labels are clipped. The
            error is also raised if the parameters are not the parameters of a single INR.

    References:
        Chibane et al. (2020), Neural unsigned distance fields.
    """
    generator = given_or_seed(generator)
    if inr.signal != "unsigned":
        raise ValueError(f"an INR of {inr.signal!r} has no unsigned distances; extract a mesh or draw an image")
    projection = projection or Projection()
    labels = labels_of(inr)
    if projection.near >= labels.limit:
        raise ValueError(
            f"points up to near={projection.near} are wanted, but distances are clipped at {labels.limit}, where they "
            "have no direction; choose a smaller one"
        )
    module = module_of(inr)
    require_one(module, params)
    own = {name: tensor.detach() for name, tensor in params.items()}
    like = next(iter(own.values()))
    found = [like.new_empty(0, inr.in_features)]
    missing, draws, end = projection.count, 0, time.monotonic() + projection.seconds
    for done in range(1, math.ceil(projection.count * projection.tries / ROUND) + 1):
        uniform = torch.rand(ROUND, inr.in_features, dtype=torch.float64, generator=generator, device=generator.device)
        draws += ROUND
        points = (2 * uniform - 1).to(like)
        distances = labels.from_logits(evaluate(module, own, points).squeeze(-1))
        # In the last round, only some of the starting points are needed.
        points = points[distances <= projection.near]
        for portion in torch.split(points, max(256, missing)):
            if missing <= 0:
                break
            found.append(_walk(module, own, portion, labels, projection)[:missing])
            missing -= len(found[-1])
        is_hopeless = done >= PATIENCE and missing == projection.count
        if missing <= 0 or is_hopeless or time.monotonic() > end:
            break
    return PointCloud(torch.cat(found), projection.count, draws)


def _walk(
    module: nn.Module, params: Mapping[str, Tensor], points: Tensor, labels: DistanceLabels, projection: Projection
) -> Tensor:
    """Project points to the surface; keep points that were close to the surface before the last update."""
    distances = points.new_full((len(points),), math.inf)
    for _ in range(projection.steps):
        start = points.detach().requires_grad_()
        logits = torch.func.functional_call(module, dict(params), (start,)).squeeze(-1)
        # The logit decreases as the distance grows. Its gradient has the right direction even where the distance is
        # constant.
        (uphill,) = torch.autograd.grad(logits.sum(), start)
        distances = labels.from_logits(logits.detach())
        points = points + distances.unsqueeze(-1) * torch.nn.functional.normalize(uphill, dim=-1)
    return points[(distances <= projection.close) & points.isfinite().all(-1)]


THRESHOLD = 0.01
"""The largest distance at which the F-score counts a point as correct."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of two point clouds, P (the reconstruction) and Q (the reference)."""

    chamfer: float  # `mean over P of min |p - q|^2 + mean over Q of min |q - p|^2`: squared distances, means, their sum
    precision: float  # share of P within the threshold of Q
    recall: float  # share of Q within the threshold of P

    @property
    def f_score(self) -> float:
        """The harmonic mean of precision and recall."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


def compare_points(points: Tensor, reference: Tensor, *, threshold: float = THRESHOLD) -> Agreement:
    """Return the Chamfer distance and F-score of a point cloud and a reference, with exact nearest neighbors.

    Without points, the Chamfer distance is infinite and the F-score is zero.

    Args:
        points: The point cloud, `[points, 3]`.
        reference: The reference, `[others, 3]`.
        threshold: The largest distance at which the F-score counts a point as correct.

    Raises:
        ValueError: The reference is empty, or a coordinate is not finite.

    References:
        Fan et al. (2017), A point set generation network; Tatarchenko et al. (2019), What do single-view 3D
        reconstruction networks learn.
    """
    p, q = (np.asarray(cloud.detach().cpu().double()) for cloud in (points, reference))
    if not len(q):
        raise ValueError("the reference has no points, so nothing can be compared with it; give one at least")
    if not (np.isfinite(p).all() and np.isfinite(q).all()):
        raise ValueError("a coordinate is NaN or infinite; drop such points before comparing")
    if not len(p):
        return Agreement(math.inf, 0.0, 0.0)
    there, back = (np.asarray(cKDTree(b).query(a)[0]) for a, b in ((p, q), (q, p)))
    chamfer = float((there**2).mean() + (back**2).mean())
    return Agreement(chamfer, float((there <= threshold).mean()), float((back <= threshold).mean()))
