"""Paths between two networks: small objects that return the network at a point t between 0 and 1."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, Self, runtime_checkable

from torch import Tensor, nn

from regauge.canonical import Manifold
from regauge.connect.repair import Repairer
from regauge.core.interpolation import combine as combine  # Public here, next to the paths.
from regauge.core.interpolation import interpolate as interpolate
from regauge.core.params import Params, equal_names

Gaussian = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
"""The means and the standard deviations of independent normal distributions."""


class Path(Protocol):
    """A path from one network (t = 0) to another (t = 1). At t = 0 and t = 1, `at` returns the two networks
    themselves.
    """

    def at(self, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], t: float) -> Params:
        """Return the network at t, where t = 0 is the first endpoint and t = 1 the second."""
        ...


@runtime_checkable
class PreparedPath(Path, Protocol):
    """A path for which `walk` computes data, such as statistics, once from the two endpoints."""

    def walk(self, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor]) -> Callable[[float], Params]:
        """Return a function that maps t to the network at t.

        The endpoints must not change while the returned function is in use.
        """
        ...


def walk(path: Path, params_a: Any, params_b: Any) -> Callable[[float], Any]:
    """Return a function that maps t to the network at t, for any path; see `PreparedPath`."""
    return path.walk(params_a, params_b) if isinstance(path, PreparedPath) else partial(path.at, params_a, params_b)


@dataclass(frozen=True)
class Straight:
    """The linear path `(1 - t) a + t b`. Entries that are equal in both endpoints stay equal bit by bit."""

    def at(self, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], t: float) -> Params:
        return interpolate(params_a, params_b, t) | {n: params_a[n] for n in equal_names((params_a, params_b))}


@dataclass(frozen=True)
class Geodesic:
    """The shortest path between canonical networks: great circles on the spheres of units, and linear paths elsewhere.

    Attributes:
        manifold: The manifold of the canonical networks, which `canonical_manifold` returns.

    References:
        Erdogan (2025), section 6.2.
    """

    manifold: Manifold

    def at(self, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], t: float) -> Params:
        """See `Path`.

        Raises:
            ValueError: The networks are not canonical, or two units are antipodal.
        """
        inner = self.manifold.geodesic(params_a, params_b, t)
        return dict(params_a) if t == 0 else dict(params_b) if t == 1 else inner


@dataclass(frozen=True)
class WassersteinGeodesic:
    """The 2-Wasserstein geodesic between Gaussian posteriors that have diagonal covariances.

    The path is `N((1 - t) m0 + t m1, ((1 - t) s0 + t s1)^2)`. The Wasserstein geodesic interpolates means and *standard
    deviations*, not variances. Endpoints and points are pairs (means, standard deviations) of dictionaries. Buffers
    belong to the means, and the standard deviations may lack them.

    References:
        Takatsu (2011), Wasserstein geometry of Gaussian measures; Rossi et al. (2023), section 3.
    """

    def at(self, gaussian_a: Gaussian, gaussian_b: Gaussian, t: float) -> tuple[Params, Params]:
        """Return the Gaussian at t, where t = 0 is the first endpoint and t = 1 the second.

        Raises:
            ValueError: A standard deviation is negative, or an endpoint is not a pair.
        """
        for label, gaussian in (("first", gaussian_a), ("second", gaussian_b)):
            if not isinstance(gaussian, tuple) or len(gaussian) != 2:
                raise ValueError(
                    f"the {label} end is a {type(gaussian).__name__}, but a Gaussian is a tuple of two dictionaries: "
                    "means and standard deviations; give such a tuple"
                )
            for name, std in gaussian[1].items():
                if bool((std < 0).any()):
                    raise ValueError(
                        f"{name!r} of the {label} Gaussian has negative standard deviations; give their absolute "
                        "values, not logarithms or other transforms of them"
                    )
        (mean_a, std_a), (mean_b, std_b) = gaussian_a, gaussian_b
        return interpolate(mean_a, mean_b, t), interpolate(std_a, std_b, t)


@dataclass(frozen=True, eq=False)
class Repaired:
    """A path whose inner networks are repaired to the statistics of the endpoints, with weights `(1 - t, t)`.

    Attributes:
        module: The module that is called with the parameters.
        batches: The batches; see `repair`.
        path: The path whose inner networks are repaired.

    References:
        Jordan et al. (2023), REPAIR.
    """

    module: nn.Module
    batches: Iterable[Any]
    path: Path = field(default_factory=Straight)

    def at(self, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], t: float) -> Params:
        """See `Path`.

        Raises:
            TraceError: The module cannot be traced.
            ValueError: The arguments are invalid for `repair`, which lists the cases.
        """
        return self.walk(params_a, params_b)(t)

    def walk(self, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor]) -> Callable[[float], Params]:
        """See `PreparedPath`. The statistics of the endpoints are measured once."""
        inner, repairer = walk(self.path, params_a, params_b), Repairer(self.module, (params_a, params_b), self.batches)

        def at(t: float) -> Params:
            params = inner(t)
            return params if t in (0, 1) else repairer.repair(params, (1 - t, t)).params

        return at


@dataclass(frozen=True, eq=False)
class ControlledPath(ABC):
    """A path with inner control points. `train_path` optimizes the control points while the endpoints stay fixed.

    Attributes:
        inner: The control points between the endpoints, in order.

    References:
        Garipov et al. (2018), Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs, section 3.
    """

    inner: tuple[Params, ...]

    def __post_init__(self) -> None:
        if not self.inner:
            raise ValueError(f"a {type(self).__name__} without inner points is a straight line; give at least one")

    @classmethod
    def between(cls, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], *, bends: int = 1) -> Self:
        """Return the linear path with `bends` equally spaced control points.

        The result is an initialization for training.
        """
        return cls(tuple(interpolate(params_a, params_b, k / (bends + 1)) for k in range(1, bends + 1)))

    @abstractmethod
    def weights(self, t: float) -> tuple[float, ...]:
        """Return the weight that each point, including the endpoints, has in the network at t.

        The weights sum to one.
        """

    def at(self, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], t: float) -> Params:
        if t == 1:
            return dict(params_b)
        return combine((params_a, *self.inner, params_b), self.weights(t))


@dataclass(frozen=True, eq=False)
class Bezier(ControlledPath):
    """A Bezier curve. With one control point c, the curve is the quadratic `(1 - t)^2 a + 2 t (1 - t) c + t^2 b`.

    References:
        Garipov et al. (2018), equation 3.
    """

    def weights(self, t: float) -> tuple[float, ...]:
        """Return the Bernstein polynomials at t."""
        degree = len(self.inner) + 1
        return tuple(math.comb(degree, k) * t**k * (1 - t) ** (degree - k) for k in range(degree + 1))


@dataclass(frozen=True, eq=False)
class PolygonalChain(ControlledPath):
    """Linear segments through the control points. Each segment covers an equal interval of t.

    References:
        Garipov et al. (2018), equation 2.
    """

    def weights(self, t: float) -> tuple[float, ...]:
        """Return weights of which at most two are nonzero: the weights of the endpoints of one segment."""
        position = t * (len(self.inner) + 1)
        return tuple(max(0.0, 1 - abs(position - k)) for k in range(len(self.inner) + 2))
