"""Networks described by few coordinates: principal components of a population, plus random residuals."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse.linalg import svds
from torch import Tensor

from regauge.core.params import Params
from regauge.flow.manifold import Manifold, Points, Sphere
from regauge.flow.moments import Moments, count_share, size_by_tensor
from regauge.flow.space import Space

MOST_COVARIANCES = 5000
"""The largest number of classes of coordinates whose covariances are stored."""


@dataclass(frozen=True, eq=False)
class Components(Manifold):
    """A space of networks whose coordinates are the first principal components of a population, with variance one.

    The components are computed from aligned networks. Each weight is divided by the standard deviation of its whole
    tensor, and tensors are weighted. If each weight were divided by its own standard deviation, weights that training
    hardly changed would have as much influence as important weights. The residual is the part of a network outside of
    the components. The residual consists mostly of initial weights that training did not change. Flows do not model the
    residual. Instead, the residual is sampled from a normal distribution, in which entries of one tensor are correlated
    if they belong to the same units. The correlations are equal for all units that permutations exchange.

    Attributes:
        networks: The Euclidean space of all parameters of networks.
        mean: The mean of each parameter, `[values]`.
        unit: The number by which each parameter is divided: the standard deviation of its tensor, with the weight of
            the tensor.
        axes: Orthonormal directions of parameters divided by `unit`, `[components, values]`.
        sizes: Standard deviations along the axes, `[components]`.
        roots: Square roots of the covariance matrices of residuals, `[classes, classes]`, by tensor index.
        rest: The residuals of the networks that `leave` returns, `[models, values]`; None for zero.
    """

    networks: Space
    mean: Float[Tensor, " values"]
    unit: Float[Tensor, " values"]
    axes: Float[Tensor, "components values"]
    sizes: Float[Tensor, " components"]
    roots: tuple[Float[Tensor, "classes classes"], ...]
    rest: Float[Tensor, "models values"] | None = None
    spheres: tuple[Sphere, ...] = ()

    @classmethod
    def of(cls, space: Space, points: Points, count: int, balance: float) -> "Components":
        """Return the components of aligned networks.

        Args:
            space: A Euclidean space.
            points: The points of the networks.
            count: The number of components.
            balance: An exponent that determines the weights of tensors. After parameters are divided by their units, a
                tensor of n entries has the variance n to the power of `balance`.

        Raises:
            ValueError: There are fewer networks or parameters than components.
        """
        if count >= min(points.shape):
            raise ValueError(
                f"{len(points)} networks of {points.shape[1]} values have fewer principal components than {count}; "
                "choose a smaller number of components"
            )
        moments = Moments.of([points], space, is_pooled=False)
        unit = size_by_tensor(moments.deviation, space) / count_share(space, balance).sqrt()
        standard = ((points.double() - moments.mean) / unit).float()
        begin = np.random.default_rng(0).standard_normal(min(points.shape)).astype(np.float32)
        _, *found = svds(standard.numpy(), k=count, v0=begin)
        sizes, axes = (torch.from_numpy(one[::-1].copy()) for one in found)
        left = (standard - (standard @ axes.T) @ axes) * unit.float()
        return cls(
            space,
            moments.mean,
            unit,
            axes,
            sizes / max(1, len(points) - 1) ** 0.5,
            tuple(_root(left[:, index]) for index in find_classes(space)),
        )

    @property
    def dim(self) -> int:
        """The number of components."""
        return len(self.axes)

    @property
    def tensors(self) -> Tensor:
        """The tensor index of each coordinate. All components count as one tensor with index 0."""
        return torch.zeros(len(self.axes), dtype=torch.int64)

    @cached_property
    def classes(self) -> list[Tensor]:
        """The classes of coordinates; see `find_classes`."""
        return find_classes(self.networks)

    def enter(self, population: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Points:
        """Return the components of networks, `[models, components]`, without the residuals."""
        return self.reduce(self.networks.enter(population, torch.float64)).to(dtype)

    def reduce(self, x: Points) -> Points:
        """Return the components of points in the space of all parameters."""
        standard = (x.double() - self.mean.to(x.device)) / self.unit.to(x.device)
        return (standard @ self.axes.to(standard).T / self.sizes.to(standard)).to(x.dtype)

    def expand(self, x: Points) -> Points:
        """Return points in the space of all parameters, with the given components and the residuals `rest`."""
        standard = (x * self.sizes.to(x)) @ self.axes.to(x)
        made = self.mean.to(x) + self.unit.to(x) * standard
        return made if self.rest is None else made + self.rest.to(x)

    def leave(self, x: Points) -> Params:
        """Return the networks with the given components and the residuals `rest`."""
        return self.networks.leave(self.expand(x))

    def with_rest(self, count: int, generator: torch.Generator) -> "Components":
        """Return a copy with random residuals for `count` networks."""
        rest = torch.zeros(count, self.networks.dim)
        for index, root in zip(self.classes, self.roots, strict=True):
            noise = torch.randn(count, *index.shape, generator=generator)
            rest[:, index] = torch.einsum("qc,ncm->nqm", root, noise) if len(root) else 0.0
        standard = rest / self.unit.float()
        standard = standard - (standard @ self.axes.T) @ self.axes
        return replace(self, rest=standard * self.unit.float())


def find_classes(space: Space) -> list[Tensor]:
    """Return the coordinates of each tensor, `[classes, members]`; permutations exchange the members of a class.

    Coordinates at the same position in two classes belong to the same units. If the classes of a tensor differ in size,
    or are more than `MOST_COVARIANCES`, each coordinate forms a separate class. If the tensor has more than
    `MOST_COVARIANCES` coordinates, all of them form one class instead.
    """
    found = []
    for number in range(int(space.tensors.max()) + 1):
        places = (space.tensors == number).nonzero()[:, 0]
        places = places[torch.argsort(space.order[places])]
        _, numbers, counts = torch.unique(space.exchanged[places], return_inverse=True, return_counts=True)
        if len(counts.unique()) == 1 and len(counts) <= MOST_COVARIANCES:
            found.append(places[torch.argsort(numbers, stable=True)].reshape(len(counts), -1))
        else:
            found.append(places.unsqueeze(0) if len(places) > MOST_COVARIANCES else places.unsqueeze(1))
    return found


def _root(left: Float[Tensor, "models classes members"]) -> Float[Tensor, "classes classes"]:
    """Return the symmetric square root of the covariance between classes, estimated over networks and members."""
    # Members of a class are exchangeable, so only the pooled covariances of classes can be estimated.
    values = left.double().permute(1, 0, 2).flatten(1)
    sizes, axes = torch.linalg.eigh(values @ values.T / values.shape[1])
    root: Tensor = (axes * sizes.clamp_min(0).sqrt()) @ axes.T
    return root.float()
