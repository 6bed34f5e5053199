"""The protocol of posteriors, and the simplest posterior: independent normal distributions of all parameters."""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from regauge.alignment.joint import role_symmetry
from regauge.bayes.posteriors.couplings import SquaredDistance, sum_squares, with_zeros
from regauge.connect.paths import WassersteinGeodesic
from regauge.core.chart import scaled_by_gains
from regauge.core.element import Element, materialize
from regauge.core.params import Params, require_same_shapes
from regauge.core.symmetry import Symmetry


class GaussianPosterior(NamedTuple):
    """A diagonal Gaussian: theta = mean + std * noise, with independent standard normal noise.

    A posterior is a pair of dictionaries. Therefore `rg.align` (with `GaussianMatching`) and `rg.line` (with
    `WassersteinGeodesic`) accept posteriors without conversion, and return posteriors.

    Attributes:
        mean: A whole network, including buffers.
        std: Nonnegative standard deviations. Tensors without standard deviations, such as buffers, have no uncertainty.

    References:
        Rossi et al. (2023), sections 2 and 4.1.
    """

    mean: Params
    std: Params

    def draw(self, count: int, generator: torch.Generator) -> Params:
        """Sample standard normal noise `[count, ...]` for every uncertain parameter.

        Noise is sampled in the alphabetical order of names. Therefore a posterior has the same samples after it is
        saved and loaded.

        Raises:
            ValueError: No parameter is uncertain, so there is nothing to sample.
        """
        if not self.std:
            raise ValueError("all parameters are certain, so there is nothing to sample; use the mean as one network")
        return {
            name: torch.randn((count, *std.shape), generator=generator, dtype=std.dtype, device=generator.device).to(
                std.device
            )
            for name, std in sorted(self.std.items())
        }

    def at(self, noise: Params) -> Params:
        """See `Posterior`.

        Raises:
            ValueError: A standard deviation belongs to no mean, or its shape differs from its mean's shape.
        """
        for name, std in self.std.items():
            if name not in self.mean or std.shape != self.mean[name].shape:
                there = tuple(self.mean[name].shape) if name in self.mean else "missing"
                raise ValueError(
                    f"the standard deviations {name!r} have shape {tuple(std.shape)}, but the mean of that name is "
                    f"{there}; give one for each value of a parameter, and none for names that the mean lacks"
                )
        count = next(iter(noise.values())).shape[0]
        return {name: sample(name, mean, self.std, noise, count) for name, mean in self.mean.items()}

    def push(self, symmetry: Symmetry, element: Element) -> "GaussianPosterior":
        """Transform the means like parameters, and multiply the standard deviations by the magnitudes of the factors.

        Raises:
            ValueError: The element rotates parameters, and a rotated diagonal Gaussian is not diagonal. The error is
                also raised if the element adds products of uncertain parameters.
        """
        symmetry, element, linear = bind(symmetry, element, self.mean)
        return GaussianPosterior(symmetry.act(element, self.mean), move_std(symmetry, linear, self.std))

    def push_noise(self, symmetry: Symmetry, element: Element, noise: Params) -> Params:
        """Transform the noise by permutations and signs. Positive scales change the standard deviations, but not the
        noise.
        """
        return move_noise(self.mean, self.std, symmetry, element, noise)

    def moments(self) -> "GaussianPosterior":
        """Return the posterior unchanged, because it already is a diagonal Gaussian."""
        return self

    def couple(
        self, other: "GaussianPosterior", skip: Collection[str] = ()
    ) -> "tuple[GaussianPosterior, GaussianPosterior]":
        """Return both posteriors unchanged, because samples with the same noise are already as close as possible; see
        `Transportable`.
        """
        require_same_shapes(self.mean, other.mean)
        own, others = with_zeros(self.std, other.std), with_zeros(other.std, self.std)
        first = self if own is self.std else self._replace(std=own)
        return first, (other if others is other.std else other._replace(std=others))

    def squared_distance(self, other: "GaussianPosterior", skip: Collection[str] = ()) -> SquaredDistance:
        """Return `|m_a - m_b|^2` and `|s_a - s_b|^2` of the means m and the standard deviations s."""
        return SquaredDistance(sum_squares(self.mean, other.mean, skip), sum_squares(self.std, other.std, skip))

    def between(self, other: "GaussianPosterior", t: float) -> "GaussianPosterior":
        """Interpolate means and standard deviations."""
        return GaussianPosterior(*WassersteinGeodesic().at(self, other, t))


def bind(symmetry: Symmetry, element: Element, params: Params) -> tuple[Symmetry, Element, Element]:
    """Bind a symmetry and an element to the sizes of `params`.

    The returned symmetry and element also act on dictionaries with only some of the names in `params`.

    The second returned element contains no translations, so it can transform deviations from the mean. The element must
    add the same translation to all samples. The element must not contain rotations that depend on gains with
    uncertainty, because rotations that depend on uncertain gains would differ between samples.
    """
    bound = symmetry.bind(params)
    families = (bound.translation(name) for name in element.translation)
    uneven = next((one for one in families if one.coefficients or {*one.parameters} & {*scaled_by_gains(bound)}), None)
    if uneven is not None:
        raise ValueError(
            f"the element adds values along {uneven.name!r} that depend on uncertain parameters, so the result is not "
            f"a Gaussian of this kind; leave translations out (`element.translated({{}})`), or push samples "
            "(`ParticlePosterior`)"
        )
    if element.rotation:
        raise ValueError(
            f"the element rotates {next(iter(element.rotation))!r} behind uncertain gains, so the result is not a "
            f"Gaussian of this kind; leave rotations out (`element.rotated({{}})`), or push samples "
            "(`ParticlePosterior`)"
        )
    found = materialize(element, bound.groups)
    return bound, found, found.translated({})


def move_std(symmetry: Symmetry, element: Element, std: Params) -> Params:
    """Multiply standard deviations by the magnitudes of the factors. Raise a ValueError if the element would rotate
    them.
    """
    for group in symmetry.groups:
        is_touching = group.matrix != "none" and any(place.parameter in std for place in group.placements)
        matrix = element[group.name].matrix if is_touching else None
        if matrix is not None and not torch.equal(matrix, torch.eye(matrix.shape[-1]).to(matrix).expand_as(matrix)):
            raise ValueError(
                f"the element rotates group {group.name!r}, and a rotated diagonal Gaussian is not diagonal; draw the "
                'element without the part "linear", or push samples (`ParticlePosterior`)'
            )
    return role_symmetry(symmetry, "magnitudes", std).act(element, std)


def move_noise(mean: Params, std: Params, symmetry: Symmetry, element: Element, noise: Params) -> Params:
    """Permute the noise `[count, ...]` of standard deviations and flip signs, without scaling; keep all other noise."""
    symmetry, _, element = bind(symmetry, element, mean)
    flips = replace(symmetry.on_sums, groups=tuple(group.without("scale", "shift") for group in symmetry.groups))
    diagonal = {name: tensor for name, tensor in noise.items() if name in std}
    return {**noise, **role_symmetry(flips, "parameters", diagonal).act(element, diagonal)}


def sample(name: str, mean: Tensor, std: Params, noise: Params, count: int) -> Tensor:
    """Return samples `[count, ...]` of a parameter, or copies of the mean if the parameter has no uncertainty."""
    return torch.addcmul(mean, std[name], noise[name]) if name in std else mean.expand(count, *mean.shape)


Noise = Params
"""The random numbers of some samples, with a leading sample axis on every tensor. `draw` returns the noise, and `at`
uses the noise.

The noise is a separate argument, so several posteriors can be compared with the same random numbers."""


@runtime_checkable
class Posterior(Protocol):
    """A distribution over the parameters of a network. Buffers have no uncertainty."""

    def draw(self, count: int, generator: torch.Generator) -> Noise:
        """Sample the noise of `count` samples."""

    def at(self, noise: Noise) -> Params:
        """Return the samples for a given noise: parameters and buffers with a leading sample axis on every tensor."""

    def push(self, symmetry: Symmetry, element: Element) -> Self:
        """Return the distribution of `act(element, theta)`, where theta is distributed like the posterior.

        The predictive distribution does not change.

        Raises:
            ValueError: The transformed distribution does not belong to the same family of distributions as the
                posterior. For example, a rotated diagonal Gaussian is not diagonal.
        """

    def push_noise(self, symmetry: Symmetry, element: Element, noise: Noise) -> Noise:
        """Return the noise for which the samples of the transformed posterior are the transformed samples.

        `push(g).at(push_noise(g, noise)) == act(g, at(noise))`.
        """

    def moments(self) -> GaussianPosterior:
        """Return the diagonal Gaussian with the same means and standard deviations."""


@runtime_checkable
class Transportable(Posterior, Protocol):
    """A posterior with couplings, distances and geodesics to other posteriors of its kind."""

    def couple(self, other: Self, skip: Collection[str] = ()) -> tuple[Self, Self]:
        """Rewrite the two posteriors such that samples with the same noise are as close as possible.

        If a parameter is uncertain in only one posterior, its standard deviations in the other posterior are set to
        zero. Parameters in `skip` are ignored.

        Raises:
            ValueError: The posteriors have different architectures, or posteriors of their class have no couplings.
        """

    def squared_distance(self, other: Self, skip: Collection[str] = ()) -> SquaredDistance:
        """Return `W2^2` between two posteriors that `couple` returned."""

    def between(self, other: Self, t: float) -> Posterior:
        """Return the distribution of `(1 - t) theta_0 + t theta_1` with shared noise, after `couple`."""
