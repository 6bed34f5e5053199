"""Statistics of the activations of two networks, in one pass over the data."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from regauge.core.products import matmul

CONSTANT = 1e-6
"""A unit whose standard deviation is below this share of its mean counts as constant."""


@dataclass
class CrossMoments:
    """Running means, variances and cross products of the units of two networks.

    Batches are merged by the pairwise update of Chan et al.: products of centered values in the precision of the
    values, sums over batches in float64. The result does not depend on how the data are cut into batches, up to
    rounding; nothing of a batch is kept.

    Attributes:
        count: Number of samples so far.
        means: Mean of every unit in both networks, `[2, units]`.
        squares: Sums of squared deviations from these, `[2, units]`.
        products: Sums of products of the deviations, `[units of the first network, units of the second]`.

    References:
        Chan, Golub and LeVeque (1983), Algorithms for computing the sample variance, equations 1.5 and 3.1.
    """

    count: int = 0
    means: Tensor = field(default_factory=lambda: torch.zeros(2, 0, dtype=torch.float64))
    squares: Tensor = field(default_factory=lambda: torch.zeros(2, 0, dtype=torch.float64))
    products: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))

    def update(self, a: Tensor, b: Tensor) -> None:
        """Take in one batch, `[units, samples]` of both networks for the same inputs."""
        samples = a.shape[1]
        if not samples:
            return
        means = torch.stack([t.mean(1, dtype=torch.float64) for t in (a, b)])
        x, y = (t - mean.to(t.dtype).unsqueeze(1) for t, mean in zip((a, b), means, strict=True))
        squares = torch.stack([torch.linalg.vecdot(t, t).double() for t in (x, y)])
        products = matmul(x, y.mT).double()
        if not self.count:
            self.count, self.means, self.squares, self.products = samples, means, squares, products
            return
        total = self.count + samples
        weight, change = self.count * samples / total, means - self.means
        self.products += products
        self.products.addr_(change[0], change[1], alpha=weight)
        self.squares += squares + weight * change.square()
        self.means += change * (samples / total)
        self.count = total

    def covariance(self) -> tuple[Tensor, Tensor]:
        """Covariances of all pairs, and variances, as `correlation` returns them."""
        return self.products / self.count, (self.squares / self.count).cpu()

    def correlation(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Correlations of all pairs, zero where a unit never varies.

        Args:
            classes: Number of a class for each unit, which shares the mean variance of its units. With one class
                for each unit these are Pearson's correlations; units that a rotation mixes belong together.

        Returns:
            The inner products of normalized units, `[units of the first network, units of the second]`, and the squared
            norms of these units, `[2, units]` on the CPU.
        """
        sums = torch.zeros_like(self.squares).index_add(1, classes, self.squares)
        deviations = (sums / torch.bincount(classes, minlength=len(classes)).clamp(min=1)).sqrt()[:, classes]
        # The variance of a constant unit is not zero but what rounding leaves of its mean.
        is_live = deviations > CONSTANT * self.count**0.5 * self.means.abs()
        factors = torch.where(is_live, 1 / deviations, 0.0)
        return factors[0].unsqueeze(1) * self.products * factors[1], (factors.square() * self.squares).cpu()
