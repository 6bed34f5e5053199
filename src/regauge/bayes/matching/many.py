"""Many posteriors in one universe, where all of them are close to one another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, cast

import torch

from regauge.alignment import GaussianMatching, Method, Result
from regauge.alignment import align_many as align_stacks
from regauge.bayes.matching.align_posteriors import AnyPosterior, describe_fall
from regauge.bayes.matching.barycenter import barycenter, common_moments
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.transport.wasserstein import SquaredDistance, distance
from regauge.core.element import Element
from regauge.core.symmetry import Symmetry


@dataclass(frozen=True)
class PosteriorsAlignment(Generic[AnyPosterior]):
    """The outcome of aligning many posteriors.

    Attributes:
        elements: One for each; the first is the identity.
        posteriors: All of them in the universe, the first one as it was; each has its predictive distribution.
        before: Mean over posteriors of `W2^2` from the barycenter, all by their moments; buffers do not count.
        after: The same after all of them have moved.
        matching: The result of the alignment of the moments.
    """

    elements: tuple[Element, ...]
    posteriors: tuple[AnyPosterior, ...]
    before: SquaredDistance
    after: SquaredDistance
    matching: Result[tuple[GaussianPosterior, ...]]

    @property
    def report(self) -> str:
        """Distances before and after, and the report of the alignment."""
        return f"from the barycenter, {describe_fall(self.before, self.after)}; {self.matching.report}"

    def __str__(self) -> str:
        return self.report


def align_many(
    posteriors: Sequence[AnyPosterior],
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    generator: torch.Generator | None = None,
) -> PosteriorsAlignment[AnyPosterior]:
    """Move posteriors along their orbits until none of them can come closer to the barycenter of the others.

    As in `align` moments are matched and whole posteriors move. The sum over pairs of `W2^2` between K diagonal
    Gaussians is K times the sum of their distances from the barycenter, and a step of one posterior lowers both.

    Args:
        posteriors: One or more, of any kinds; the first one stays where it is.
        symmetry: The symmetry of all of them.
        method: Compares pairs of means and standard deviations; `GaussianMatching()` unless given, whose
            method for many is `MergeMany`. `GaussianMatching(method=WeightMatching())` aligns all to the first
            posterior.
        generator: Random generator, for methods that use chance.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        ValueError: There is no posterior, or they do not fit one another or the symmetry, or hold NaN or Inf.

    References:
        Rossi et al. (2023), equation 17, for two posteriors; Ainsworth et al. (2023), appendix A.10, for many
        networks.
    """
    method = GaussianMatching() if method is None else method
    moments = common_moments(posteriors)
    found = align_stacks(moments, symmetry, method=method, generator=generator)
    rows = list(zip(posteriors, moments, found.params, found.elements, strict=True))
    pushed = [
        cast(AnyPosterior, there) if own is q else q.push(symmetry, element) for q, own, there, element in rows[1:]
    ]
    return PosteriorsAlignment(
        elements=found.elements,
        posteriors=(posteriors[0], *pushed),
        before=_around_barycenter(moments, symmetry),
        after=_around_barycenter(found.params, symmetry),
        matching=found,
    )


def _around_barycenter(moments: Sequence[GaussianPosterior], symmetry: Symmetry) -> SquaredDistance:
    center = barycenter(moments)
    each = [distance(center, one, skip=symmetry.buffers) for one in moments]
    return SquaredDistance(*(sum(part) / len(each) for part in zip(*each, strict=True)))
