"""One posterior brought close to another, as distributions."""

from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch

from regauge.alignment import GaussianMatching, Method, Result
from regauge.alignment import align as align_stacks
from regauge.bayes.matching.barycenter import common_moments
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.posterior import Posterior
from regauge.bayes.transport.wasserstein import SquaredDistance, distance
from regauge.core.element import Element
from regauge.core.symmetry import Symmetry

AnyPosterior = TypeVar("AnyPosterior", bound=Posterior)


@dataclass(frozen=True)
class PosteriorAlignment(Generic[AnyPosterior]):
    """The outcome of aligning one posterior to another.

    Attributes:
        element: The element that moves the second posterior.
        posterior: The second posterior, moved; it has the same predictive distribution.
        before: `W2^2` between the moments of both posteriors, as they were given; buffers do not count.
        after: The same after the second one has moved.
        matching: The result of the alignment of the moments.
    """

    element: Element
    posterior: AnyPosterior
    before: SquaredDistance
    after: SquaredDistance
    matching: Result[GaussianPosterior]

    @property
    def report(self) -> str:
        """Distances before and after, and the report of the alignment."""
        return f"{describe_fall(self.before, self.after)}; {self.matching.report}"

    def __str__(self) -> str:
        return self.report


def align(
    q_a: Posterior,
    q_b: AnyPosterior,
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    generator: torch.Generator | None = None,
) -> PosteriorAlignment[AnyPosterior]:
    """Move the second posterior along its orbit, as close to the first as the method gets.

    What is matched are the moments, so the posteriors may be of different kinds: of Kronecker factors the diagonal of
    their product, of low-rank Gaussians the standard deviations of both parts together, of particles means and
    standard deviations. What moves is the whole posterior, by one element: the samples of one chain lie in one
    copy of a mode, and matching them one by one would find the identity at a higher price.

    Between full covariances the cost is a quadratic assignment for each layer, of which this is the diagonal part.
    `regauge.bayes.transport.distance` measures the whole.

    Args:
        q_a: The posterior that stays.
        q_b: The posterior that moves, unchanged itself.
        symmetry: The symmetry of both posteriors.
        method: The method that compares pairs of means and standard deviations; `GaussianMatching()` unless given.
        generator: Random generator, for methods that use chance.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        ValueError: The posteriors are of different architectures, do not fit the symmetry or hold NaN or Inf.

    References:
        Rossi et al. (2023), equations 17 to 19 and algorithm 1.
    """
    method = GaussianMatching() if method is None else method
    a, b = common_moments([q_a, q_b])
    found = align_stacks(a, b, symmetry, method=method, generator=generator)
    return PosteriorAlignment(
        element=found.element,
        posterior=cast(AnyPosterior, found.params) if b is q_b else q_b.push(symmetry, found.element),
        before=distance(a, b, skip=symmetry.buffers),
        after=distance(a, found.params, skip=symmetry.buffers),
        matching=found,
    )


def describe_fall(before: SquaredDistance, after: SquaredDistance) -> str:
    """In words what became of the distance between moments."""
    return (
        f"W2^2 of moments {before.total:.6g} -> {after.total:.6g} (means {before.mean:.6g} -> {after.mean:.6g}, "
        f"spread {before.spread:.6g} -> {after.spread:.6g})"
    )
