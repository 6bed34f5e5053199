"""Posteriors of SWAG: moments of the weights along a trajectory of stochastic gradient descent."""

from collections.abc import Mapping

import torch
from torch import Tensor

from regauge.bayes.importers.checks import detach, gaussian, require_alike
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.low_rank import LowRankPosterior
from regauge.core.params import require_finite


def from_swag(
    mean: Mapping[str, Tensor],
    second_moment: Mapping[str, Tensor],
    deviations: Mapping[str, Tensor] | None = None,
) -> LowRankPosterior | GaussianPosterior:
    """The Gaussian of SWAG from its running averages.

    The variance is `second_moment - mean^2`, zero where rounding makes it negative. With deviations half of it is
    diagonal and half low-rank (`LowRankPosterior.from_swag`); without them all of it is diagonal (SWAG-Diagonal).

    Args:
        mean: Averages of the weights over the trajectory, and buffers.
        second_moment: Averages of their squares, of the parameters only.
        deviations: Differences of the last K weights from the averages, `[K, ...]` or flat, `[K, numel]`, as its
            authors keep them.

    Raises:
        ValueError: A tensor belongs to no parameter, has another shape, or is not finite; a variance is clearly
            negative; there is one deviation only.

    References:
        Maddox et al. (2019), A simple baseline for Bayesian uncertainty in deep learning, section 3 and equation 1.
    """
    variance = {}
    for name, square in second_moment.items():
        require_alike(name, square.shape, mean, "second moments of SWAG")
        # The difference of two averages is as exact as they are, not as it is small itself.
        tolerance = 64 * torch.finfo(square.dtype).eps * square.abs()
        found = square.detach().double() - mean[name].detach().double().square()
        if bool((found < -tolerance).any()):
            raise ValueError(
                f"{name!r} has second moments below the squares of its means; give averages of squares, not variances"
            )
        variance[name] = found.clamp(min=0).to(square.dtype)
    if deviations is None:
        return gaussian(mean, {name: tensor.sqrt() for name, tensor in variance.items()}, "SWAG")
    shaped = {}
    for name, tensor in deviations.items():
        if name in mean and tensor.ndim == 2 and tensor.shape[1] == mean[name].numel():
            tensor = tensor.view(-1, *mean[name].shape)
        require_alike(name, tensor.shape[1:], mean, "deviations of SWAG (behind their first axis)")
        shaped[name] = tensor.detach()
    for part, label in ((mean, "means"), (variance, "second moments"), (shaped, "deviations")):
        require_finite(part, f"the {label} of SWAG")
    return LowRankPosterior.from_swag(detach(mean), variance, detach(shaped))
