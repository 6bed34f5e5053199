"""The squared 2-Wasserstein distance between two posteriors of the same kind, and geodesics of this distance."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

from regauge.bayes.posteriors.couplings import SquaredDistance
from regauge.bayes.posteriors.gaussian import Posterior, Transportable


def distance(a: Posterior, b: Posterior, *, skip: Collection[str] = ()) -> SquaredDistance:
    """Return the exact `W2^2` between two posteriors of the same kind.

    | kind | spread |
    | --- | --- |
    | diagonal | `|s_a - s_b|^2`: standard deviations, not variances |
    | Kronecker | for each weight `tr G_a tr A_a + tr G_b tr A_b - 2 |B_b^T B_a|_* |C_b^T C_a|_*` |
    | low rank | from the coupled roots if one component is zero, otherwise from full covariances |
    | particles | the mean squared distance of paired particles in the best pairing, after their means are subtracted |

    Here `|X|_*` is the sum of the singular values, and B and C are roots of the factors G and A.

    For full covariances, the spread is `tr(S_a + S_b - 2 (S_a^(1/2) S_b S_a^(1/2))^(1/2))`. Rossi et al. (2023) print
    `|S_a - S_b|_F^2` for covariances that commute (equation 16, second line), which is wrong. The correct spread is
    `|S_a^(1/2) - S_b^(1/2)|_F^2`. Equation 17 of the paper, which uses standard deviations, is correct.

    Args:
        a: Any posterior.
        b: Another posterior of the same kind and architecture.
        skip: Names of tensors that the distance ignores, usually `symmetry.buffers`. Integer tensors are always
            ignored.

    Raises:
        ValueError: The posteriors have different kinds or architectures. The error is also raised if the exact distance
            is too expensive: low-rank Gaussians with a diagonal component and more than 2,000 uncertain parameters.

    References:
        Takatsu (2011), Wasserstein geometry of Gaussian measures; Rossi et al. (2023), equations 9, 16 and 17.
    """
    first, last = couple(a, b, skip)
    return first.squared_distance(last, skip)


def couple(a: Posterior, b: Posterior, skip: Collection[str] = ()) -> tuple[Transportable, Transportable]:
    """Return the best coupling of two posteriors of the same kind; see `Transportable.couple`."""
    if type(a) is not type(b) or not isinstance(a, Transportable):
        raise ValueError(
            f"transport is defined between two posteriors of one kind, not from a {type(a).__name__} to a "
            f"{type(b).__name__}; give two of one kind (Gaussian, Kronecker, low-rank or particles), or the "
            "`moments()` of both"
        )
    return a.couple(cast(Any, b), skip)


@dataclass(frozen=True, eq=False)
class Displacement:
    """The distributions of `(1 - t) theta_0 + t theta_1` for two coupled posteriors that share their noise.

    Noise of the first posterior can be used at every point of the path. For fixed noise, a sample follows a straight
    path as t grows. The last posterior has the same distribution and the same class as before the coupling, but uses
    the shared noise.

    References:
        McCann (1997), A convexity principle for interacting gases; Rossi et al. (2023), equation 6.
    """

    first: Transportable
    last: Transportable

    def at(self, t: float) -> Posterior:
        """Return the posterior at the position t. At the endpoints, return the first or the last posterior itself.

        Raises:
            ValueError: t is outside of [0, 1].
        """
        require_share(t)
        if t in (0, 1):
            return self.last if t else self.first
        return self.first.between(self.last, t)


def geodesic(a: Posterior, b: Posterior) -> Displacement:
    """Return the shortest path of distributions between two posteriors of the same kind.

    | kind | the point at t |
    | --- | --- |
    | diagonal | means and standard deviations are interpolated; the endpoints are a and b themselves |
    | Kronecker | McCann's map is a product T_G (x) T_A of maps of the factors; samples move along straight lines |
    | low rank | standard deviations and rotated deviations are interpolated |
    | particles | particles are interpolated in pairs, which the best assignment determines |

    A point between Kronecker posteriors has two terms, because its covariance is not a Kronecker product. Between
    low-rank Gaussians, the path is a geodesic if there is no diagonal component or no deviation. If there are a
    diagonal component and deviations, the path is the shortest among the paths that do not mix them.

    The endpoints have the distributions of a and b. The endpoint at b is expressed with rotated roots or with permuted
    particles. Therefore noise that is sampled once can be used at all points of the path. If a parameter is uncertain
    in only one posterior, its standard deviation in the second posterior counts as zero.

    Raises:
        ValueError: The posteriors have different kinds or architectures. Kronecker factors belong to different weights.
            The error is also raised if the numbers of particles differ.

    References:
        McCann (1997); Takatsu (2011), Wasserstein geometry of Gaussian measures; Rossi et al. (2023), section 3,
        equations 6 and 7.
    """
    return Displacement(*couple(a, b))


def require_share(t: float) -> None:
    """Raise a ValueError unless t lies in [0, 1]."""
    if not 0 <= t <= 1:
        raise ValueError(f"t is {t}, but must be from 0 (the first posterior) to 1 (the second posterior)")
