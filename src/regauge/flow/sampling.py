"""Integration of a flow's velocity from start points to networks and back, with optional noise and guidance."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from regauge.core.params import Params
from regauge.flow.manifold import Manifold, Points
from regauge.flow.priors import Prior

Field = Callable[[Points, Float[Tensor, " models"]], Points]
"""A function from points and times to velocities."""
Solver = Literal["euler", "heun", "runge_kutta"]
LATE = 0.8
"""The time after which the thesis' sampler adds noise."""


def integrate(
    space: Manifold,
    field: Field,
    x: Points,
    *,
    steps: int,
    solver: Solver = "heun",
    end: float = 1.0,
) -> Points:
    """Integrate a velocity from time 0 to the time `end` in equal steps.

    Args:
        space: The space of the points.
        field: The velocity, a tangent vector at each point.
        x: The start points.
        steps: The number of steps.
        solver: "euler" follows geodesics. If the velocity at the start leads along a geodesic, a single step reaches
            the endpoint of the geodesic. Other solvers are "heun" (order 2, two evaluations per step) and "runge_kutta"
            (order 4, four evaluations per step).
        end: The time at which the integration ends.

    Raises:
        ValueError: There is no solver with the given name, or the number of steps is not positive.
    """
    if steps < 1 or solver not in ("euler", "heun", "runge_kutta"):
        raise ValueError(
            f"steps={steps} and solver={solver!r}: take a step at least, by 'euler', 'heun' or 'runge_kutta'"
        )
    h = end / steps
    for k in range(steps):
        t = k * h
        first = _at(space, field, x, t)
        if solver == "euler":
            x = space.exp(x, h * first)
        elif solver == "heun":
            x = space.project(x + h / 2 * (first + _at(space, field, x + h * first, t + h)))
        else:
            second = _at(space, field, x + h / 2 * first, t + h / 2)
            third = _at(space, field, x + h / 2 * second, t + h / 2)
            fourth = _at(space, field, x + h * third, t + h)
            x = space.project(x + h / 6 * (first + 2 * second + 2 * third + fourth))
    return x


def _at(space: Manifold, field: Field, x: Tensor, t: float) -> Tensor:
    """Return the velocity at the nearest point of the space. The result is a smooth function of x, as solvers of higher
    order require.
    """
    near = space.project(x)
    return field(near, near.new_full((len(near),), t))


def diffuse(
    space: Manifold,
    field: Field,
    x: Points,
    *,
    steps: int,
    noise: float,
    start: Prior,
    generator: torch.Generator,
) -> Points:
    """Integrate a velocity with noise that preserves the distribution at every time, by the Euler-Maruyama method.

    The start points `x0 ~ N(m, s^2)` must be independent of the endpoints. At a point x and a time t, the velocity v
    then determines the expected start point `x - t v`. The velocity therefore determines the gradient of the log
    density, `-(x - t v - m) / ((1 - t) s^2)`. The noise has variance `2 noise (1 - t) s^2` per unit of time. A drift
    compensates for the noise. The drift is half of the noise variance times the gradient. Spherical coordinates get no
    noise, because the velocity does not determine their gradient.

    Args:
        space: The space of the points.
        field: The velocity.
        x: The start points.
        steps: The number of steps.
        noise: The strength of the noise. If the strength is 0, the method is Euler's method.
        start: The distribution of the start points.
        generator: The random generator of the noise.

    References:
        Albergo et al. (2023), Stochastic interpolants, theorem 2.8.
    """
    mean, flat, h = start.mean.to(x), space.flat_start, 1 / steps
    for k in range(steps):
        t = k * h
        v = field(x, x.new_full((len(x),), t))
        # Half the variance, noise (1 - t) s^2, times the score: (1 - t) and s^2 cancel.
        pull = -noise * (x - t * v - mean)
        pull[:, :flat] = 0
        drawn = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        x = space.exp(x, h * (v + pull)) + (2 * noise * (1 - t) * h) ** 0.5 * start.shake(drawn)
    return x


def follow_thesis(predict_end: Field, x0: Points, *, steps: int, noise: float, generator: torch.Generator) -> Points:
    """Integrate `end - start` instead of the flow's velocity `(end - x) / (1 - t)`, with noise after the time `LATE`.

    `follow_thesis` does not solve the differential equation of the flow. The result is the average over time of the
    predicted endpoints, plus noise whose variance grows with the number of steps. Points do not stay on the spheres.

    Args:
        predict_end: A function from points and times to endpoints.
        x0: The start points.
        steps: The number of steps of Euler's method.
        noise: The standard deviation of the noise in each late step.
        generator: The random generator of the noise.

    References:
        Erdogan (2025), section 3.2.2, for the velocity, and the section on stochastic sampling for the noise.
    """
    x = x0
    for k in range(steps):
        t = k / steps
        if t > LATE and noise:
            x = x + noise * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        x = x + (predict_end(x, x.new_full((len(x),), t)) - x0) / steps
    return x


@dataclass(frozen=True)
class Guidance:
    """A loss that guides a flow towards networks for which the loss is small.

    The gradient is computed at the predicted endpoint of the path and projected to tangent vectors. The learning rates
    of the gradient steps sum to `strength` over the whole path.

    Attributes:
        loss: A function from networks with a leading model axis to the loss of each network, `[models]`.
        strength: The sum of all learning rates.
        start: The time at which guidance begins.
    """

    loss: Callable[[Mapping[str, Tensor]], Float[Tensor, " models"]]
    strength: float
    start: float = 0.0

    def __post_init__(self) -> None:
        if not self.strength > 0 or not 0 <= self.start < 1:
            raise ValueError(f"strength={self.strength} must be positive, and start={self.start} a time before 1")

    def pull(self, space: Manifold, ends: Points) -> Points:
        """Return the negative gradient of the loss at points, projected to tangent vectors."""
        at = ends.detach().requires_grad_()
        with torch.enable_grad():
            params: Params = space.leave(space.project(at))
            (gradient,) = torch.autograd.grad(self.loss(params).sum(), at)
        return space.tangent(ends, -gradient)

    def field(self, space: Manifold, velocity: Field, predict_end: Field) -> Field:
        """Return a velocity that includes guidance."""

        def guided(x: Tensor, t: Tensor) -> Tensor:
            v = velocity(x, t)
            if float(t[0]) < self.start:
                return v
            pull = self.pull(space, predict_end(x, t))
            return v + self.strength / (1 - self.start) * space.tangent(x, pull)

        return guided
