"""The Wasserstein barycenter of posteriors by their moments, in closed form."""

from collections.abc import Sequence

from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.posterior import Posterior
from regauge.bayes.transport.couplings import with_zeros
from regauge.core.interpolation import mean, shares_of
from regauge.core.params import require_same_shapes


def barycenter(posteriors: Sequence[Posterior], weights: Sequence[float] | None = None) -> GaussianPosterior:
    """The diagonal Gaussian with the smallest weighted sum of squared Wasserstein distances to the moments.

    Its mean is the weighted mean of the means, its standard deviation that of the standard deviations: not of the
    variances, and with nothing added for how far the means are apart. Align the posteriors first (`align_many`): the
    barycenter of posteriors in different copies of a mode lies in none.

    Args:
        posteriors: One or more, of one architecture; of those that are no diagonal Gaussians the moments.
        weights: One for each, not negative, made to sum to one; equal unless given. Buffers are averaged alike.

    Raises:
        ValueError: There is none, they are of different architectures, or the weights do not fit.

    References:
        Agueh and Carlier (2011), Barycenters in the Wasserstein space, section 6.
    """
    if not posteriors:
        raise ValueError("there is no posterior; give at least one")
    shares, moments = shares_of(weights, len(posteriors)), common_moments(posteriors)
    for one in moments[1:]:
        require_same_shapes(moments[0].mean, one.mean)
    return GaussianPosterior(mean([one.mean for one in moments], shares), mean([one.std for one in moments], shares))


def common_moments(posteriors: Sequence[Posterior]) -> list[GaussianPosterior]:
    """Their moments; what only some are uncertain of has standard deviation zero in the others."""
    moments = [posterior.moments() for posterior in posteriors]
    uncertain = {name: std for one in moments for name, std in one.std.items()}
    stds = [with_zeros(one.std, uncertain) for one in moments]
    return [one if std is one.std else one._replace(std=std) for one, std in zip(moments, stds, strict=True)]
