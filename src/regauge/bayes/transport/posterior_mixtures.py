"""Mixtures of two posteriors. A path of mixtures never has a barrier, even if the networks on the path are bad."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.bayes.posteriors.gaussian import GaussianPosterior, Posterior
from regauge.bayes.transport.wasserstein import require_share
from regauge.core.element import Element
from regauge.core.params import Params, below, require_same_shapes
from regauge.core.symmetry import Symmetry

POSITION = "(position)"
"""The name of the noise entry with a number in (0, 1) for every sample, evenly spaced. No parameter has this name."""


@dataclass(frozen=True, eq=False)
class MixturePosterior:
    """The mixture `(1 - share) first + share last`: each network is a sample of one posterior or of the other.

    The noise contains the noise of both posteriors and a position for each sample. The positions are `(k + 1/2) /
    count` in random order. Samples whose positions are below the share come from `last`. The numbers of samples
    therefore match the shares as closely as possible, and all shares can use the same noise.

    Attributes:
        first: A posterior.
        last: Another posterior with the same architecture.
        share: The probability of `last`.

    Raises:
        ValueError: The share is outside of [0, 1].
    """

    first: Posterior
    last: Posterior
    share: float

    def __post_init__(self) -> None:
        require_share(self.share)

    def draw(self, count: int, generator: torch.Generator) -> Params:
        """Sample the noise of both posteriors, and the positions."""
        order = torch.randperm(count, generator=generator, device=generator.device)
        positions = (order.to(torch.float64) + 0.5) / count
        return _join(self.first.draw(count, generator), self.last.draw(count, generator), positions)

    def at(self, noise: Params) -> Params:
        """See `Posterior`.

        Raises:
            ValueError: The two posteriors have different architectures.
        """
        is_last = noise[POSITION] < self.share
        parts = []
        for k, (posterior, is_chosen) in enumerate(((self.first, ~is_last), (self.last, is_last))):
            chosen = is_chosen.nonzero().flatten()
            if len(chosen) == len(is_chosen):
                return posterior.at(below(f"{k}/", noise))
            if len(chosen):
                own = {n: t.index_select(0, chosen.to(t.device)) for n, t in below(f"{k}/", noise).items()}
                parts.append((chosen, posterior.at(own)))
        require_same_shapes(*({name: tensor[0] for name, tensor in networks.items()} for _, networks in parts))
        samples = {name: tensor.new_empty(len(is_last), *tensor.shape[1:]) for name, tensor in parts[0][1].items()}
        for chosen, networks in parts:
            for name, tensor in networks.items():
                samples[name].index_copy_(0, chosen.to(tensor.device), tensor)
        return samples

    def push(self, symmetry: Symmetry, element: Element) -> "MixturePosterior":
        """Transform the two posteriors of the mixture by the element."""
        return MixturePosterior(self.first.push(symmetry, element), self.last.push(symmetry, element), self.share)

    def push_noise(self, symmetry: Symmetry, element: Element, noise: Params) -> Params:
        """Return the transformed noise of both posteriors. Positions do not change."""
        first = self.first.push_noise(symmetry, element, below("0/", noise))
        last = self.last.push_noise(symmetry, element, below("1/", noise))
        return _join(first, last, noise[POSITION])

    def moments(self) -> GaussianPosterior:
        """Return the Gaussian with the means and standard deviations of the mixture.

        The mean of the mixture is a weighted mean over its two posteriors. The variance is the weighted mean of the
        variances plus `share (1 - share) (m_first - m_last)^2`. Buffers are copied from the more probable posterior.
        """
        (mean_a, std_a), (mean_b, std_b) = self.first.moments(), self.last.moments()
        mean = dict(mean_b if self.share > 0.5 else mean_a)
        std = {}
        for name in dict.fromkeys([*std_a, *std_b]):
            a, b, t = mean_a[name], mean_b[name], self.share
            mean[name] = torch.lerp(a, b, t)
            between = (t * (1 - t)) ** 0.5 * (a - b).abs()
            within = [w**0.5 * std[name] for w, std in ((1 - t, std_a), (t, std_b)) if name in std]
            std[name] = torch.linalg.vector_norm(torch.stack([between, *within]), dim=0)
        return GaussianPosterior(mean, std)


@dataclass(frozen=True, eq=False)
class MixturePath:
    """A path of mixtures from one posterior to another. Samples are mixed, but not transformed."""

    first: Posterior
    last: Posterior

    def at(self, t: float) -> MixturePosterior:
        """Return the mixture with the share t of the last posterior. At t = 0 and t = 1, the mixture equals one
        posterior.

        Raises:
            ValueError: t is outside of [0, 1].
        """
        return MixturePosterior(self.first, self.last, t)


def mixture(a: Posterior, b: Posterior) -> MixturePath:
    """Return the path of mixtures `(1 - t) a + t b` between posteriors of any kinds.

    By Jensen's inequality, the log predictive likelihood of a mixture is never below the weighted average of the log
    predictive likelihoods of both posteriors. Therefore a path of mixtures never has a barrier, even if the networks
    between the two posteriors are bad. Use the path of mixtures only as a control.

    References:
        Rossi et al. (2023), section 3, figure 3.
    """
    return MixturePath(a, b)


def _join(first: Params, last: Params, positions: Tensor) -> Params:
    both = {f"{k}/{name}": tensor for k, noise in enumerate((first, last)) for name, tensor in noise.items()}
    return {**both, POSITION: positions}
