"""Geodesics of the 2-Wasserstein distance between two posteriors of one kind."""

from dataclasses import dataclass

from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.kronecker import KroneckerPosterior, Term
from regauge.bayes.posteriors.low_rank import LowRankPosterior
from regauge.bayes.posteriors.particles import ParticlePosterior
from regauge.bayes.posteriors.posterior import Posterior
from regauge.bayes.transport import couplings
from regauge.connect.paths import WassersteinGeodesic
from regauge.core.interpolation import interpolate


@dataclass(frozen=True, eq=False)
class Displacement:
    """The distribution of `(1 - t) theta_0 + t theta_1` for two posteriors sampled with the same noise.

    Noise of the first fits every point of the path, and a sample moves along a straight line when t grows.

    Attributes:
        first: The start of the path.
        last: The end of the path, written for the noise of the first.

    References:
        McCann (1997), A convexity principle for interacting gases; Rossi et al. (2023), equation 6.
    """

    first: Posterior
    last: Posterior

    def at(self, t: float) -> Posterior:
        """The posterior a share t of the way; the first and the last themselves at the ends.

        Raises:
            ValueError: t is outside of [0, 1].
        """
        require_share(t)
        first, last = self.first, self.last
        if t in (0, 1):
            return last if t else first
        if isinstance(first, GaussianPosterior) and isinstance(last, GaussianPosterior):
            return GaussianPosterior(*WassersteinGeodesic().at(first, last, t))
        if isinstance(first, KroneckerPosterior) and isinstance(last, KroneckerPosterior):
            terms = {
                name: tuple(
                    Term(weight * rows, columns)
                    for weight, q in ((1 - t, first), (t, last))
                    for rows, columns in q.terms[name]
                )
                for name in first.terms
            }
            return KroneckerPosterior(interpolate(first.mean, last.mean, t), terms, interpolate(first.std, last.std, t))
        if isinstance(first, LowRankPosterior) and isinstance(last, LowRankPosterior):
            return LowRankPosterior(
                interpolate(first.mean, last.mean, t),
                interpolate(first.std, last.std, t),
                interpolate(first.deviations, last.deviations, t),
            )
        if isinstance(first, ParticlePosterior) and isinstance(last, ParticlePosterior):
            return ParticlePosterior(interpolate(first.stack, last.stack, t), first.buffers)
        couplings.refuse(first, last)


def geodesic(a: Posterior, b: Posterior) -> Displacement:
    """The shortest path of distributions from one posterior to another of the same kind.

    | kind | the point at t |
    | --- | --- |
    | diagonal | means and standard deviations are interpolated; the ends are a and b as they are |
    | Kronecker | McCann's map is a product T_G (x) T_A of maps of the factors; samples move along straight lines |
    | low rank | standard deviations and rotated deviations are interpolated |
    | particles | particles are interpolated in pairs, which the best assignment chose |

    A point between Kronecker posteriors has two terms, since its covariance is no Kronecker product. Between low-rank
    Gaussians the path is a geodesic if there is no diagonal part or no deviation, and otherwise the shortest path that
    keeps both parts apart.

    The ends have the distributions of a and b. That of b is written with rotated roots or in another order of
    particles, so that noise drawn once shows the whole path: a loss along it has the same Monte Carlo error
    everywhere. What only one of the two is uncertain of has zero standard deviations in the other.

    Raises:
        ValueError: The posteriors are of different kinds or architectures, Kronecker factors belong to different
            weights, or the numbers of particles differ.

    References:
        McCann (1997); Takatsu (2011), Wasserstein geometry of Gaussian measures; Rossi et al. (2023), section 3,
        equations 6 and 7.
    """
    if isinstance(a, GaussianPosterior) and isinstance(b, GaussianPosterior):
        return Displacement(*couplings.couple_gaussians(a, b))
    if isinstance(a, KroneckerPosterior) and isinstance(b, KroneckerPosterior):
        return Displacement(*couplings.couple_kronecker(a, b))
    if isinstance(a, LowRankPosterior) and isinstance(b, LowRankPosterior):
        return Displacement(*couplings.couple_low_rank(a, b))
    if isinstance(a, ParticlePosterior) and isinstance(b, ParticlePosterior):
        return Displacement(*couplings.couple_particles(a, b))
    couplings.refuse(a, b)


def require_share(t: float) -> None:
    """A share of the way.

    Raises:
        ValueError: It is outside of [0, 1].
    """
    if not 0 <= t <= 1:
        raise ValueError(f"t is {t}; it is a share of the way between two posteriors, from 0 to 1")
