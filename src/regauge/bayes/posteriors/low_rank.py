"""Low-rank Gaussians: a diagonal part and a few directions in which all parameters move together."""

from dataclasses import dataclass, replace

import torch

from regauge.alignment.joint import role_symmetry
from regauge.bayes.posteriors.gaussian import GaussianPosterior, bind, move_noise, move_std, sample
from regauge.core.element import Element
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry

COEFFICIENTS = "(coefficients)"
"""The name under which the noise holds the coefficients of the deviations, `[count, K]`; no parameter is called so."""


@dataclass(frozen=True, eq=False)
class LowRankPosterior:
    """`theta = mean + std * e + sum_k z_k D_k` with independent standard normal e (one each) and z (K for the network).

    The covariance is `diag(std^2) + D^T D`.

    Attributes:
        mean: A whole network, buffers included.
        std: Standard deviations of the diagonal part, not negative; what it lacks has none.
        deviations: D, with a leading axis of K on every tensor; what it lacks does not deviate.

    Raises:
        ValueError: There are no deviations, or their numbers differ.

    References:
        Maddox et al. (2019), A simple baseline for Bayesian uncertainty in deep learning, section 3.2.
    """

    mean: Params
    std: Params
    deviations: Params

    def __post_init__(self) -> None:
        ranks = {tensor.shape[0] if tensor.ndim else 0 for tensor in self.deviations.values()}
        if len(ranks) != 1 or 0 in ranks:
            raise ValueError(
                f"the deviations of the parameters have {sorted(ranks)} rows; give every tensor of them one leading "
                "axis over the same directions, or a `GaussianPosterior` where there are none"
            )

    @property
    def rank(self) -> int:
        """K, the number of deviations."""
        return next(iter(self.deviations.values())).shape[0]

    def draw(self, count: int, generator: torch.Generator) -> Params:
        """Standard normal noise: `[count, ...]` for every standard deviation, `[count, K]` for the deviations."""
        one = next(iter(self.deviations.values()))
        shared = torch.empty(self.rank, dtype=one.dtype, device=one.device)
        return GaussianPosterior({}, {COEFFICIENTS: shared, **self.std}).draw(count, generator)

    def at(self, noise: Params) -> Params:
        """See `Posterior`."""
        coefficients = noise[COEFFICIENTS]
        count = len(coefficients)
        samples = {}
        for name, mean in self.mean.items():
            if name in self.deviations:
                moved = torch.addmm(mean.flatten(), coefficients, self.deviations[name].flatten(1))
                samples[name] = moved = moved.view(count, *mean.shape)
                if name in self.std:
                    moved.addcmul_(self.std[name], noise[name])
            else:
                samples[name] = sample(name, mean, self.std, noise, count)
        return samples

    def push(self, symmetry: Symmetry, element: Element) -> "LowRankPosterior":
        """Means move as parameters, standard deviations by magnitudes, deviations as differences of parameters.

        Raises:
            ValueError: The element rotates what has a diagonal part.
        """
        symmetry, element = bind(symmetry, element, self.mean)
        std = move_std(symmetry, element, self.std)
        # On differences of parameters shifts still flip signs, but add nothing.
        moving = replace(symmetry, groups=tuple(group.without("shift") for group in symmetry.groups))
        deviations = role_symmetry(moving, "parameters", self.deviations).act(element, self.deviations)
        return LowRankPosterior(symmetry.act(element, self.mean), std, deviations)

    def push_noise(self, symmetry: Symmetry, element: Element, noise: Params) -> Params:
        """The noise of the diagonal part moves by permutations and signs; coefficients stay."""
        return move_noise(self.mean, self.std, symmetry, element, noise)

    def moments(self) -> GaussianPosterior:
        """The diagonal Gaussian with these means and standard deviations `sqrt(std^2 + sum_k D_k^2)`."""
        std = dict(self.std)
        for name, tensor in self.deviations.items():
            spread = torch.linalg.vector_norm(tensor, dim=0)
            std[name] = torch.hypot(spread, std[name]) if name in std else spread
        return GaussianPosterior(self.mean, std)
