"""Particles: the samples of a Markov chain or the members of an ensemble, all equally likely."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.bayes.posteriors.couplings import SquaredDistance
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.core.assignment import assign
from regauge.core.element import Element
from regauge.core.interpolation import interpolate
from regauge.core.params import Params, require_same_shapes
from regauge.core.symmetry import Symmetry

CHUNK = 1 << 22
"""The number of entries that are held in float64 at once."""
PARTICLE = "(particle)"
"""The name of the noise entry with indices of the sampled particles, int64 `[count]`. No parameter has this name."""


@dataclass(frozen=True, eq=False)
class ParticlePosterior:
    """A finite set of networks with equal probabilities.

    Attributes:
        stack: Parameters and buffers, with a leading particle axis on every tensor.
        buffers: Names of tensors that are not parameters, as in `symmetry.buffers`. Each particle has separate buffers.
            Buffers have no standard deviation in `moments`, and distances ignore them.

    Raises:
        ValueError: The stack is empty, or its tensors have different numbers of particles.
    """

    stack: Params
    buffers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = {tensor.shape[0] if tensor.ndim else 0 for tensor in self.stack.values()}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(
                f"the tensors of a stack of particles have {sorted(counts)} rows; every tensor, buffers too, needs one "
                "leading axis over the same particles, at least one of them (`torch.stack`)"
            )

    @property
    def count(self) -> int:
        """The number of particles."""
        return next(iter(self.stack.values())).shape[0]

    def draw(self, count: int, generator: torch.Generator) -> Params:
        """Sample indices of particles in random order.

        An index is repeated only after every index has occurred once.
        """
        rounds = -(-count // self.count)
        orders = [torch.randperm(self.count, generator=generator, device=generator.device) for _ in range(rounds)]
        return {PARTICLE: torch.cat([torch.zeros(0, dtype=torch.int64, device=generator.device), *orders])[:count]}

    def at(self, noise: Params) -> Params:
        """See `Posterior`."""
        chosen = noise[PARTICLE]
        return {name: tensor.index_select(0, chosen.to(tensor.device)) for name, tensor in self.stack.items()}

    def push(self, symmetry: Symmetry, element: Element) -> "ParticlePosterior":
        """Transform every particle by an element; a batch of elements has one element for each particle."""
        return ParticlePosterior(symmetry.act(element, self.stack), self.buffers)

    def push_noise(self, symmetry: Symmetry, element: Element, noise: Params) -> Params:
        """Return the noise unchanged. The noise contains particle indices, which transformations do not change."""
        return noise

    def moments(self) -> GaussianPosterior:
        """Return the means and the maximum-likelihood standard deviations over the particles.

        The squared deviations are divided by the number of particles. Buffers are averaged and have no standard
        deviation. Integer tensors are copied from the first particle.

        Raises:
            ValueError: The posterior has only one particle.
        """
        if self.count < 2:
            raise ValueError("one particle has no standard deviations; give at least two")
        floating = {name: tensor for name, tensor in self.stack.items() if tensor.is_floating_point()}
        mean = {name: tensor.mean(0) if name in floating else tensor[0] for name, tensor in self.stack.items()}
        std = {name: t.std(0, correction=0) for name, t in floating.items() if name not in self.buffers}
        return GaussianPosterior(mean, std)

    def couple(
        self, other: "ParticlePosterior", skip: Collection[str] = ()
    ) -> "tuple[ParticlePosterior, ParticlePosterior]":
        """Pair particles such that the sum of squared distances is smallest; see `Transportable`."""
        if self.count != other.count:
            raise ValueError(
                f"{self.count} particles cannot be paired with {other.count}; thin the longer chain until both "
                "have as many"
            )
        require_same_shapes(self.stack, other.stack)
        products = torch.zeros(self.count, self.count, dtype=torch.float64)
        for x, y in self._pieces(other, skip):
            products += ((x - x.mean(0)) @ (y - y.mean(0)).mT).cpu()
        # The sum of |x - y|^2 over pairs depends on the pairing only through the products <x, y>.
        order = torch.from_numpy(assign(products.numpy()))
        paired = {name: tensor.index_select(0, order.to(tensor.device)) for name, tensor in other.stack.items()}
        return self, ParticlePosterior(paired, other.buffers)

    def squared_distance(self, other: "ParticlePosterior", skip: Collection[str] = ()) -> SquaredDistance:
        """Return the mean squared distance between paired particles.

        The term `mean` of the result is the squared distance between the means.
        """
        mean = spread = 0.0
        for x, y in self._pieces(other, skip):
            # Over pairs, mean |d|^2 = |mean d|^2 + mean |d - mean d|^2: the shift of the means, and the remaining
            # differences.
            difference = x - y
            common = difference.mean(0)
            mean += float(common.square().sum())
            spread += float((difference - common).square().sum()) / self.count
        return SquaredDistance(mean, spread)

    def between(self, other: "ParticlePosterior", t: float) -> "ParticlePosterior":
        """Interpolate the parameters and buffers of paired particles."""
        return ParticlePosterior(interpolate(self.stack, other.stack, t), self.buffers)

    def _pieces(self, other: "ParticlePosterior", skip: Collection[str]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the float64 entries `[particles, values]` of both posteriors in chunks of bounded size."""
        for name, stack in self.stack.items():
            if name not in {*self.buffers, *other.buffers, *skip} and stack.is_floating_point():
                step = max(1, CHUNK // self.count)
                pieces = (torch.split(tensor.flatten(1), step, 1) for tensor in (stack, other.stack[name]))
                yield from ((x.double(), y.double()) for x, y in zip(*pieces, strict=True))
