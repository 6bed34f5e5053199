"""The protocol of posteriors: moments, samples, and the action of the symmetry."""

from typing import Protocol, Self, runtime_checkable

import torch

from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.core.element import Element
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry

Noise = Params
"""The randomness of some samples, one leading sample axis on every tensor: what `draw` makes and `at` reads.

Kept apart from the samples so that several posteriors can be compared under the same randomness."""


@runtime_checkable
class Posterior(Protocol):
    """A distribution over the parameters of a network; buffers are certain."""

    def draw(self, count: int, generator: torch.Generator) -> Noise:
        """Draw the randomness of `count` samples."""

    def at(self, noise: Noise) -> Params:
        """The samples with this randomness: parameters and buffers, one leading sample axis on every tensor."""

    def push(self, symmetry: Symmetry, element: Element) -> Self:
        """The distribution of `act(element, theta)`, theta being distributed as this; it has the same predictive law.

        Raises:
            ValueError: The element moves parameters in a way that leaves this family of distributions.
        """

    def push_noise(self, symmetry: Symmetry, element: Element, noise: Noise) -> Noise:
        """The randomness with which the pushed posterior has the moved samples.

        `push(g).at(push_noise(g, noise)) == act(g, at(noise))`.
        """

    def moments(self) -> GaussianPosterior:
        """The diagonal Gaussian with the same means and standard deviations."""
