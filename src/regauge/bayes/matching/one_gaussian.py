"""One Gaussian from many: the members of an ensemble, or posteriors, aligned and merged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.alignment import ManyResult, Method
from regauge.alignment import align_many as align_networks
from regauge.bayes.matching.barycenter import barycenter
from regauge.bayes.matching.many import PosteriorsAlignment, align_many
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.particles import ParticlePosterior
from regauge.bayes.posteriors.posterior import Posterior
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


@dataclass(frozen=True)
class OneGaussian:
    """Many networks or posteriors as one Gaussian.

    Attributes:
        posterior: The Gaussian; its mean is the mean of what was aligned.
        alignment: The result of the alignment, with each of them where it was merged.
    """

    posterior: GaussianPosterior
    alignment: ManyResult | PosteriorsAlignment[Posterior]


def one_gaussian(
    members: Sequence[Mapping[str, Tensor]] | Sequence[Posterior],
    symmetry: Symmetry,
    *,
    spread: float = 1.0,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
) -> OneGaussian:
    """Align all members with one another and merge them into one Gaussian.

    Networks become the Gaussian with their mean and, times `spread`, their standard deviations (divided by their
    number). Posteriors become their Wasserstein barycenter, with its standard deviations times `spread`: how far their
    means are apart adds nothing.

    Independent members stay far apart in most directions even when aligned, and a Gaussian as wide as they are can be
    worse than its mean alone: choose `spread` by the likelihood of held-out data. The mean itself loses variance, which
    `repair` gives back: with it the loss of sixteen MLPs' mean on MNIST fell from 0.30 to 0.12 (members 0.09). Running
    statistics of batch normalization are averaged, which is not what the mean network's would be: `reset_batchnorm`
    or `repair` mends them.

    Args:
        members: Two networks or more, or one posterior or more.
        symmetry: The symmetry of all of them.
        spread: Factor of the standard deviations, not negative.
        method: `MergeMany()` unless given for networks, so that each is matched to the mean of the others;
            `GaussianMatching()` for posteriors. A method for pairs aligns all to the first member.
        task: For methods that use data, and for networks the choice between restarts by the loss of the mean.
        generator: Random generator, for methods that use chance.

    Raises:
        TypeError: Networks and posteriors are mixed, or the method does not take what is given.
        ValueError: There is no member, or a single network, or they do not fit one another or the symmetry, or the
            spread is negative or not finite.
    """
    if not 0 <= spread < float("inf"):
        raise ValueError(f"spread is {spread}; it multiplies standard deviations, so it must not be negative")
    networks = [one for one in members if isinstance(one, Mapping)]
    posteriors = [one for one in members if isinstance(one, Posterior)]
    if len(networks) + len(posteriors) < len(members) or (networks and posteriors):
        raise TypeError(
            f"{len(networks)} of {len(members)} members are networks and {len(posteriors)} are posteriors; give only "
            "networks or only posteriors"
        )
    alignment: ManyResult | PosteriorsAlignment[Posterior]
    if posteriors:
        if not (method is None or method.joint_roles):
            raise TypeError(
                f"{type(method).__name__} aligns networks; for posteriors give "
                f"GaussianMatching(method={type(method).__name__}(...))"
            )
        alignment = align_many(posteriors, symmetry, method=method, generator=generator)
        merged = barycenter(alignment.posteriors)
    else:
        alignment = align_networks(networks, symmetry, method=method, task=task, generator=generator)
        stack = {name: torch.stack([one[name] for one in alignment.params]) for name in alignment.params[0]}
        merged = ParticlePosterior(stack, symmetry.buffers).moments()
    std = {name: spread * tensor for name, tensor in merged.std.items()}
    return OneGaussian(GaussianPosterior(merged.mean, std), alignment)
