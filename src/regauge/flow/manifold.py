"""The geometry of a product of unit spheres and a Euclidean space: geodesics, projections and distances."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regauge.core import sphere
from regauge.core.params import Params

Points = Float[Tensor, "models values"]


@dataclass(frozen=True)
class Sphere:
    """Consecutive unit spheres in the coordinates from `start` to `start + count * dim`."""

    start: int
    count: int
    dim: int

    @property
    def end(self) -> int:
        """The index after the last coordinate."""
        return self.start + self.count * self.dim


class Manifold:
    """A space of points that represent networks. The first coordinates lie on unit spheres, and all further coordinates
    are Euclidean.

    Attributes:
        spheres: The coordinates that lie on spheres.
    """

    spheres: tuple[Sphere, ...]

    @property
    def tensors(self) -> Int[Tensor, " values"]:
        """An integer for each coordinate, equal for all coordinates of one tensor."""
        raise NotImplementedError

    def enter(self, population: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Points:
        """Return the points of networks."""
        raise NotImplementedError

    def leave(self, x: Points) -> Params:
        """Return the networks that points represent, with all their tensors."""
        raise NotImplementedError

    @property
    def dim(self) -> int:
        """The number of coordinates."""
        raise NotImplementedError

    @property
    def dimension(self) -> int:
        """The dimension of the space. A sphere's dimension is one less than its number of coordinates."""
        return self.dim - sum(one.count for one in self.spheres)

    @property
    def flat_start(self) -> int:
        """The index of the first Euclidean coordinate."""
        return self.spheres[-1].end if self.spheres else 0

    def on(self, one: Sphere, x: Float[Tensor, "*lead values"]) -> Float[Tensor, "*lead count dim"]:
        """Return the coordinates of points on some spheres."""
        return x[..., one.start : one.end].reshape(*x.shape[:-1], one.count, one.dim)

    def map(
        self, x: Float[Tensor, "*lead values"], *others: Tensor, euclidean: Any, spherical: Any
    ) -> Float[Tensor, "*lead values"]:
        """Apply functions of points and vectors to each factor of the space."""
        pieces = [spherical(*(self.on(one, y) for y in (x, *others))).flatten(-2) for one in self.spheres]
        start = self.flat_start
        return torch.cat([*pieces, euclidean(*(y[..., start:] for y in (x, *others)))], dim=-1)

    def project(self, x: Float[Tensor, "*lead values"]) -> Float[Tensor, "*lead values"]:
        """Return the nearest points of the space."""
        return self.map(x, euclidean=lambda y: y, spherical=sphere.normalize)

    def tangent(self, x: Points, v: Points) -> Points:
        """Return the components of vectors that are tangent at points."""
        return self.map(x, v, euclidean=lambda _, w: w, spherical=sphere.tangent)

    def exp(self, x: Points, v: Points) -> Points:
        """Return the endpoints, after unit time, of the geodesics that start at points with tangent velocities."""

        def go(y: Tensor, w: Tensor) -> Tensor:
            return sphere.normalize(sphere.exp(y, w))

        return self.map(x, v, euclidean=torch.add, spherical=go)

    def log(self, x: Points, y: Points) -> Points:
        """Return the velocities at x of the shortest geodesics that reach y after unit time."""
        return self.map(x, y, euclidean=lambda a, b: b - a, spherical=sphere.log)

    def path(self, x0: Points, x1: Points, t: Float[Tensor, " models"]) -> tuple[Points, Points]:
        """Return the points at fraction t of geodesics, and the velocities at these points."""
        at, rates, start = [], [], self.flat_start
        share = t.reshape(-1, 1, 1)
        for one in self.spheres:
            a, b = self.on(one, x0), self.on(one, x1)
            # sin(s w) / sin(w) as a ratio of s sinc(s w) and sinc(w): it stays finite, with its gradient, at w = 0.
            angle = sphere.distance(a, b).unsqueeze(-1)
            whole = torch.sinc(angle / math.pi)
            left, right = ((part * torch.sinc(part * angle / math.pi)) / whole for part in (1 - share, share))
            at.append((left * a + right * b).flatten(1))
            rates.append(((torch.cos(share * angle) * b - torch.cos((1 - share) * angle) * a) / whole).flatten(1))
        a, b = x0[:, start:], x1[:, start:]
        at.append(a + t.unsqueeze(1) * (b - a))
        rates.append(b - a)
        return torch.cat(at, dim=1), torch.cat(rates, dim=1)

    def distance(self, x: Float[Tensor, "*#lead values"], y: Float[Tensor, "*#lead values"]) -> Float[Tensor, "*lead"]:
        """Return the lengths of shortest geodesics: the square root of the sum of squared distances over all spheres
        and the Euclidean part.
        """
        squares = (x[..., self.flat_start :] - y[..., self.flat_start :]).square().sum(-1)
        for one in self.spheres:
            squares = squares + sphere.distance(self.on(one, x), self.on(one, y)).square().sum(-1)
        return squares.sqrt()
