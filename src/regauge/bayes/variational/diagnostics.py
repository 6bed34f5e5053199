"""Diagnostics of over-pruning: in a mean-field posterior, the distribution of units that are not needed equals the
prior.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.core.act import Site
from regauge.core.arguments import check_arguments
from regauge.core.groups import Group
from regauge.core.symmetry import Symmetry

SIGNAL = 2.0
"""A weight counts as used if its mean exceeds this number of standard deviations."""


@dataclass(frozen=True)
class Diagnostics:
    """Measures that show which part of a network a variational posterior uses.

    In an over-pruned posterior, few units are active, and the posterior of all inactive units equals the prior.
    Barriers between over-pruned posteriors imply little about networks that use all of their units.

    Attributes:
        kl: The Kullback-Leibler divergence from the prior, in nats.
        kl_per_example: The divergence per training example, which can be compared with the loss per example.
        std_ratio: The median, over all uncertain parameters, of their standard deviation divided by the standard
            deviation of the prior.
        std_ratios: For each parameter, the median of its standard deviation divided by the standard deviation of the
            prior.
        active: The number of active units in each group. A unit is active if the mean of one of its outgoing weights
            exceeds two standard deviations.
        sizes: The total number of units in each group of `active`.
        uncounted: Groups whose units were not counted, with the reason.
    """

    kl: float
    kl_per_example: float
    std_ratio: float
    std_ratios: Mapping[str, float]
    active: Mapping[str, int]
    sizes: Mapping[str, int]
    uncounted: Mapping[str, str]

    @property
    def active_share(self) -> float:
        """The share of active units among the counted units; NaN if no units were counted."""
        return sum(self.active.values()) / sum(self.sizes.values()) if self.sizes else math.nan

    def __str__(self) -> str:
        lines = [
            f"KL from the prior: {self.kl:.4g} nats, {self.kl_per_example:.3g} per example",
            f"median std / prior std: {self.std_ratio:.3f}",
        ]
        width = max(map(len, [*self.std_ratios, *self.active, *self.uncounted]))
        lines.extend(f"  {name.ljust(width)}  {ratio:.3f}" for name, ratio in self.std_ratios.items())
        if self.sizes:
            lines.append(f"active units: {sum(self.active.values())} of {sum(self.sizes.values())}")
            lines.extend(f"  {name.ljust(width)}  {count} of {self.sizes[name]}" for name, count in self.active.items())
        if self.uncounted:
            lines.append("units not counted:")
            lines.extend(f"  {name.ljust(width)}  {reason}" for name, reason in self.uncounted.items())
        return "\n".join(lines)


@check_arguments
def compare_with_prior(
    posterior: GaussianPosterior, prior_std: float, examples: int, symmetry: Symmetry | None = None
) -> Diagnostics:
    """Measure the divergence of a posterior from its prior N(0, prior_std^2), and count the units that it uses.

    The divergence is `sum(log(prior_std / std) + (std^2 + mean^2) / (2 prior_std^2) - 1/2)` over all uncertain
    parameters.

    The symmetry determines which weights read a unit. A weight reads a unit if scaling the unit by a positive factor
    divides the weight by a power of this factor. In some groups, units cannot be scaled (odd or smooth activations,
    residual streams). If the units of a group cannot be scaled, a weight reads a unit if the second axis of the weight
    contains the unit. The second axis is the input axis of torch's linear and convolutional layers. Biases are never
    among the weights that read a unit.

    Args:
        posterior: A diagonal Gaussian.
        prior_std: The standard deviation of the prior.
        examples: The number of training examples.
        symmetry: The symmetry of the network. Without a symmetry, no units are counted.

    Raises:
        ValueError: The standard deviation of the prior or the number of examples is not positive, or no parameter is
            uncertain. The error is also raised if a standard deviation is zero, which makes the divergence infinite.
        KeyError: The posterior and the symmetry belong to different networks.

    References:
        Trippe and Turner (2018), Overpruning in variational Bayesian neural networks; Rossi et al. (2023), section 2.
    """
    if not (prior_std > 0 and examples > 0):
        raise ValueError(f"prior_std is {prior_std} and examples {examples}; both must be positive")
    if not posterior.std:
        raise ValueError("the posterior has no standard deviations; only uncertain parameters can be diagnosed")
    kl, ratios = 0.0, {}
    for name, std in posterior.std.items():
        if not bool((std > 0).all()):
            raise ValueError(
                f"{name!r} has standard deviations that are not positive, so its divergence from the prior is "
                "infinite; leave certain parameters out of `std`"
            )
        ratio = std.double() / prior_std
        scaled = posterior.mean[name].double() / prior_std
        kl += float((ratio.square() + scaled.square() - 1).sum() / 2 - ratio.log().sum())
        ratios[name] = ratio
    every = torch.cat([ratio.flatten() for ratio in ratios.values()])
    active: dict[str, int] = {}
    sizes: dict[str, int] = {}
    uncounted: dict[str, str] = {}
    if symmetry is not None:
        symmetry = symmetry.bind(posterior.mean)
        for group in symmetry.groups:
            if group.matrix != "none":
                uncounted[group.name] = "it is rotated, so single units have no meaning"
            elif group.within:
                uncounted[group.name] = "it is repeated within other groups"
            elif sites := _readers(group, symmetry, posterior):
                active[group.name], sizes[group.name] = _count_active(group, sites, posterior), group.size
            else:
                uncounted[group.name] = "no uncertain weight reads its units"
    medians = {name: float(ratio.median()) for name, ratio in ratios.items()}
    return Diagnostics(kl, kl / examples, float(every.median()), medians, active, sizes, uncounted)


def _readers(group: Group, symmetry: Symmetry, posterior: GaussianPosterior) -> list[Site]:
    """Return the axes of uncertain weights that read the units of a group, each with the group's action on the axis."""
    sites = [
        site
        for name, local in symmetry.sites.items()
        if name in posterior.std and posterior.std[name].ndim > 1
        for site in local
        if site.group.name == group.name
    ]
    scaled = [site for site in sites if any(exponent < 0 for exponent in site.placement.scale)]
    return scaled or [site for site in sites if site.placement.axis == 1]


def _count_active(group: Group, sites: list[Site], posterior: GaussianPosterior) -> int:
    active = torch.zeros(group.size, dtype=torch.bool)
    for site in sites:
        name, axis = site.placement.parameter, site.placement.axis
        signal: Tensor = posterior.mean[name].abs() > SIGNAL * posterior.std[name]
        used = signal.movedim(axis, 0).flatten(1).any(1).cpu()
        active[site.units[used[site.positions]]] = True
    return int(active.sum())
