"""Priors of flows: simple distributions over networks, invariant under permutations of units."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regauge.flow.manifold import Manifold, Points
from regauge.flow.moments import Covariance, Moments


@dataclass(frozen=True)
class MatchedGaussian:
    """Independent normal weights, with means and deviations that are pooled over exchangeable weights.

    The means and deviations are computed from the networks, and are equal for all weights that permutations of units
    exchange. On spheres, normal vectors with mean zero and the networks' root mean squares are normalized (the angular
    central Gaussian).

    Attributes:
        spread: The factor by which standard deviations are multiplied.
    """

    spread: float = 1.0

    def build(self, space: Manifold, moments: Moments) -> "Prior":
        """Return the prior for a space, given the moments of the networks in this space."""
        return Prior(space, moments.mean, self.spread * moments.deviation, moments.root)


@dataclass(frozen=True)
class UniformSphere:
    """The uniform distribution on spheres, and `MatchedGaussian` in Euclidean coordinates.

    Attributes:
        spread: The factor by which standard deviations are multiplied.
    """

    spread: float = 1.0

    def build(self, space: Manifold, moments: Moments) -> "Prior":
        """Return the prior for a space, given the moments of the networks in this space."""
        return Prior(space, moments.mean, self.spread * moments.deviation, torch.ones_like(moments.root))


@dataclass(frozen=True)
class PlainGaussian:
    """Independent normal weights with one common standard deviation, and the uniform distribution on spheres.

    Attributes:
        deviation: The standard deviation of all weights.
        mean: The factor by which the networks' mean is multiplied to give the mean of the prior.

    References:
        Erdogan (2025), section 6.1. The code of the thesis has a standard deviation of 0.1, and the text of the thesis
        has a variance of 0.1.
    """

    deviation: float = 0.1
    mean: float = 0.0

    def build(self, space: Manifold, moments: Moments) -> "Prior":
        """Return the prior for a space, given the moments of the networks in this space."""
        even = torch.ones_like(moments.root)
        return Prior(space, self.mean * moments.mean, self.deviation * even, even)


@dataclass(frozen=True)
class FullGaussian:
    """Normal weights with the mean and full covariance of aligned networks. With this prior, a flow starts near its
    endpoints.

    On spheres, the distribution is that of `MatchedGaussian`.

    Attributes:
        shrink: The weight of the identity in the shrunk covariance. A small number of networks does not determine all
            covariances.

    References:
        Ledoit and Wolf (2004), A well-conditioned estimator for large-dimensional covariance matrices.
    """

    shrink: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.shrink <= 1:
            raise ValueError(f"shrink={self.shrink}, but must be above 0 and at most 1")

    def build(self, space: Manifold, moments: Moments) -> "Prior":
        """Return the prior for a space, given the moments of the networks in this space."""
        return Prior(space, moments.mean, moments.deviation, moments.root, moments.covariance)


PRIORS = {"matched": MatchedGaussian, "uniform": UniformSphere, "plain": PlainGaussian, "full": FullGaussian}
"""Kinds of priors by name."""
PriorSettings = MatchedGaussian | UniformSphere | PlainGaussian | FullGaussian


@dataclass(frozen=True, eq=False)
class Prior:
    """A distribution of points: normal in Euclidean coordinates, and on spheres the directions of independent normal
    vectors.

    Attributes:
        space: The space of the prior.
        mean: The mean of each coordinate, `[values]`. Means on spheres are ignored.
        deviation: The standard deviation of each coordinate, `[values]`. Deviations on spheres are ignored.
        root: The root mean square of each spherical coordinate before normalization. Only the ratios of the root mean
            squares matter.
        covariance: The covariance of the standardized Euclidean coordinates; None for independent coordinates.
    """

    space: Manifold
    mean: Float[Tensor, " values"]
    deviation: Float[Tensor, " values"]
    root: Float[Tensor, " values"]
    covariance: Covariance | None = None

    def shake(self, noise: Float[Tensor, "models values"]) -> Float[Tensor, "models values"]:
        """Return normal noise with the covariance of the standardized Euclidean coordinates, and zeros for coordinates
        on spheres.
        """
        start = self.space.flat_start
        flat = noise[:, start:]
        made = self.deviation[start:].to(flat) * (flat if self.covariance is None else self.covariance.shake(flat))
        return torch.cat([torch.zeros_like(noise[:, :start]), made], dim=1)

    def sample(
        self,
        count: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Points:
        """Sample points. Random numbers are generated on the CPU, so the points are the same for all devices."""
        noise = torch.randn(count, self.space.dim, generator=generator, dtype=torch.float64)
        return self.place(noise).to(device, dtype)

    def place(self, noise: Float[Tensor, "models values"]) -> Points:
        """Return the points that correspond to standard normal noise."""
        start = self.space.flat_start
        straight = self.mean[start:] + self.shake(noise)[:, start:]
        return self.space.project(torch.cat([self.root[:start] * noise[:, :start], straight], dim=1))

    def log_density(self, x: Points) -> Float[Tensor, " models"]:
        """Return the log density in nats, with respect to surface area on spheres and volume in Euclidean coordinates.

        References:
            Tyler (1987), Statistical analysis for the angular central Gaussian distribution on the sphere.
        """
        start = self.space.flat_start
        mean, deviation, root = (one.to(x) for one in (self.mean, self.deviation, self.root))
        z = (x[:, start:] - mean[start:]) / deviation[start:]
        if self.covariance is None:
            found = (-0.5 * z.square() - 0.5 * math.log(2 * math.pi)).sum(1)
        else:
            found = self.covariance.log_density(z)
        found = found - deviation[start:].log().sum()
        for one in self.space.spheres:
            scale = self.space.on(one, root)
            stretched = torch.linalg.vector_norm(self.space.on(one, x) / scale, dim=-1)
            # The angular central Gaussian: `|S|^-1/2 (x^T S^-1 x)^(-dim / 2)` over the area of the sphere,
            # 2 pi^(dim / 2) / Gamma(dim / 2).
            area = math.log(2) + 0.5 * one.dim * math.log(math.pi) - math.lgamma(one.dim / 2)
            found = found - (scale.log().sum() + one.count * area) - one.dim * stretched.log().sum(-1)
        return found
