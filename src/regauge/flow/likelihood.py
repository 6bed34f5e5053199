"""The log density of networks under a flow, computed by integrating the velocity back to the prior."""

import torch
from jaxtyping import Float
from torch import Tensor

from regauge.flow.manifold import Manifold, Points
from regauge.flow.sampling import Field


def integrate_density(
    space: Manifold, field: Field, x: Points, *, steps: int, probes: Float[Tensor, "probes values"] | None
) -> tuple[Points, Float[Tensor, " models"]]:
    """Return the start points of the paths that lead to given points, and the change of log density along the paths.

    The Runge-Kutta method of order four integrates points and density together, in the points' precision. On spheres,
    the velocity is evaluated at the nearest point of the sphere, where the velocity is tangent. Therefore the
    divergence of the velocity in the surrounding space equals the divergence on the sphere.

    Args:
        space: The space of the points.
        field: The velocity.
        x: Points at time 1.
        steps: The number of steps.
        probes: Random sign vectors that estimate divergences (Hutchinson). All points and times use the same vectors.
            If `probes` is None, divergences are exact, and each coordinate costs one backward pass.

    References:
        Grathwohl et al. (2019), FFJORD, equations 4 and 8; Mathieu and Nickel (2020), Riemannian continuous normalizing
        flows, proposition 2.
    """
    # d/dt log p(x(t)) = -div v along the flow, so the density at the end is that at the start plus an integral from 1
    # to 0. For random signs e, E[e^T J e] = tr J: one product with the Jacobian for each probe, not for each value.
    signs = None if probes is None else [one.to(x).expand_as(x) for one in probes]
    density, h = x.new_zeros(len(x)), -1 / steps

    def at(y: Tensor, t: float) -> tuple[Tensor, Tensor]:
        return _with_divergence(space, field, y, t, signs)

    for k in range(steps):
        t = 1 + k * h
        (v1, d1) = at(x, t)
        (v2, d2) = at(x + h / 2 * v1, t + h / 2)
        (v3, d3) = at(x + h / 2 * v2, t + h / 2)
        (v4, d4) = at(x + h * v3, t + h)
        x = space.project(x + h / 6 * (v1 + 2 * v2 + 2 * v3 + v4))
        density = density + h / 6 * (d1 + 2 * d2 + 2 * d3 + d4)
    return x, density


def _with_divergence(
    space: Manifold, field: Field, x: Points, t: float, signs: list[Tensor] | None
) -> tuple[Points, Float[Tensor, " models"]]:
    """Return a velocity and its divergence."""
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        near = space.project(at)
        v = field(near, near.new_full((len(near),), t))
        if signs is not None:
            parts = [(torch.autograd.grad(v, at, one, retain_graph=True)[0] * one).sum(1) for one in signs]
            return v.detach(), torch.stack(parts).mean(0)
        found = x.new_zeros(len(x))
        for k in range(x.shape[1]):
            (row,) = torch.autograd.grad(v[:, k].sum(), at, retain_graph=True)
            found = found + row[:, k]
        return v.detach(), found
