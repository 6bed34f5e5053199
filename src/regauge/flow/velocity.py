"""The velocity of a flow: the closed form for normal distributions, plus the output of a net."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regauge.flow.flow_config import Predicts
from regauge.flow.manifold import Manifold, Points
from regauge.flow.moments import Moments
from regauge.flow.nets import OverNetworks, TimeConditioning
from regauge.flow.priors import Prior
from regauge.flow.space import Space

LATEST = 0.99
"""Up to this time, the distance to a predicted endpoint is divided by the remaining time. After this time, the distance
is divided by 0.01."""


@dataclass(frozen=True, eq=False)
class StraightLines:
    """Straight paths between two independent normal distributions of every coordinate.

    Between `x0 ~ N(m0, s0^2)` and `x1 ~ N(m1, s1^2)`, the point `x = (1 - t) x0 + t x1` is normal. Given x, the
    velocity and the endpoint are also normal. The means of velocity and endpoint are linear in x, and their standard
    deviations do not depend on x.
    """

    start: tuple[Tensor, Tensor]
    end: tuple[Tensor, Tensor]

    def at(self, t: Float[Tensor, "models 1"]) -> tuple[Tensor, Tensor]:
        """Return the mean and standard deviation of the points at a time."""
        (m0, s0), (m1, s1) = self.start, self.end
        return (1 - t) * m0 + t * m1, ((1 - t) * s0).hypot(t * s1)

    def velocity(self, x: Tensor, t: Float[Tensor, "models 1"]) -> tuple[Tensor, Tensor]:
        """Return the mean and standard deviation of the velocities of the paths through x."""
        (m0, s0), (m1, s1) = self.start, self.end
        mean, spread = self.at(t)
        # v = x1 - x0: slope = Cov(v, x) / Var(x), and Var(v) - slope^2 Var(x) = s0^2 s1^2 / Var(x).
        slope = (t * s1.square() - (1 - t) * s0.square()) / spread.square()
        return m1 - m0 + slope * (x - mean), s0 * s1 / spread

    def goal(self, x: Tensor, t: Float[Tensor, "models 1"]) -> tuple[Tensor, Tensor]:
        """Return the mean and standard deviation of the endpoints of the paths through x."""
        (_, s0), (m1, s1) = self.start, self.end
        mean, spread = self.at(t)
        # Cov(x1, x) = t s1^2, and s1^2 - t^2 s1^4 / Var(x) = (1 - t)^2 s0^2 s1^2 / Var(x).
        return m1 + t * s1.square() / spread.square() * (x - mean), (1 - t) * s0 * s1 / spread


class Velocity(nn.Module):
    """The velocity of a flow, a function of points and times. The velocity at a point is tangent to the space.

    Args:
        space: The space of the points.
        prior: The prior of the start points.
        moments: The moments of the endpoints.
        net: The net that is trained. The net reads standardized points, and its output is multiplied by the standard
            deviation of the predicted quantity.
        clock: The module that encodes times and classes for the net.
        predicts: "velocity" or "end". If the net predicts the endpoint, the velocity is the remaining path divided by
            the remaining time.
        has_gaussian: Whether the output of the net is added to the closed form for normal distributions.

    Attributes:
        share: The factor of the net's output. With a share of zero, the flow is the closed form for normal
            distributions.
    """

    tables: Tensor
    share: Tensor

    def __init__(
        self,
        space: Manifold,
        prior: Prior,
        moments: Moments,
        net: nn.Module,
        clock: TimeConditioning,
        *,
        predicts: Predicts,
        has_gaussian: bool,
    ) -> None:
        super().__init__()
        self.space, self.net, self.clock = space, net, clock
        self.predicts, self.has_gaussian = predicts, has_gaussian
        tables = (prior.mean, prior.deviation, moments.mean, moments.deviation, moments.root)
        self.register_buffer("tables", torch.stack(tables).float())
        self.register_buffer("share", torch.ones(()))

    def forward(self, x: Points, t: Float[Tensor, " models"], labels: Int[Tensor, " models"] | None = None) -> Points:
        if self.predicts == "end":
            left = (1 - t).clamp_min(1 - LATEST).unsqueeze(1)
            return self.space.log(x, self.predict_end(x, t, labels)) / left
        mean, spread = self._expect(x, t, is_end=False)
        return self.space.tangent(x, mean + spread * self._read(x, t, labels))

    def resize(self, space: Space, places: Int[Tensor, " values"]) -> None:
        """Adapt the velocity to the space of networks with other sizes. Each new coordinate gets the statistics of one
        coordinate of the current space.
        """
        assert isinstance(self.net, OverNetworks)
        self.net.resize(space)
        self.space, self.tables = space, self.tables[:, places]

    def predict_end(
        self, x: Points, t: Float[Tensor, " models"], labels: Int[Tensor, " models"] | None = None
    ) -> Points:
        """Return the expected endpoint of the flow from points at a time."""
        if self.predicts == "velocity":
            return self.space.exp(x, (1 - t).unsqueeze(1) * self(x, t, labels))
        mean, spread = self._expect(x, t, is_end=True)
        return self.space.project(mean + spread * self._read(x, t, labels))

    def unit(self, t: Float[Tensor, " models"]) -> Float[Tensor, "models values"]:
        """Return the standard deviation of velocities around their closed-form mean, by which errors are divided."""
        line, start = self._line(), self.space.flat_start
        straight = line.velocity(line.at(t.unsqueeze(1))[0], t.unsqueeze(1))[1]
        root = self.tables[4, :start].expand(len(t), -1)
        return torch.cat([math.pi / 2 * root, straight], dim=1)

    def _line(self) -> StraightLines:
        m0, s0, m1, s1 = self.tables[:4, self.space.flat_start :]
        return StraightLines((m0, s0), (m1, s1))

    def _expect(self, x: Points, t: Tensor, *, is_end: bool) -> tuple[Tensor, Tensor]:
        """Return the closed-form prediction to which the net's output is added, and the standard deviation by which the
        output is multiplied.
        """
        line, start, time = self._line(), self.space.flat_start, t.unsqueeze(1)
        root = self.tables[4, :start].expand(len(x), -1)
        (_, _), (m1, s1) = line.start, line.end
        if not self.has_gaussian:
            straight = (m1 if is_end else torch.zeros_like(m1), s1)
        elif is_end:
            straight = line.goal(x[:, start:], time)
        else:
            straight = line.velocity(x[:, start:], time)
        on_spheres = (x[:, :start], root) if is_end else (torch.zeros_like(root), math.pi / 2 * root)
        mean, spread = (torch.cat([a, b.expand(len(x), -1)], dim=1) for a, b in zip(on_spheres, straight, strict=True))
        return mean, spread

    def standard(self, x: Points, t: Float[Tensor, " models"]) -> Points:
        """Return points standardized by the expected mean and standard deviation at their times."""
        start = self.space.flat_start
        mean, spread = self._line().at(t.unsqueeze(1))
        return torch.cat([x[:, :start] / self.tables[4, :start], (x[:, start:] - mean) / spread], dim=1)

    def _read(self, x: Points, t: Tensor, labels: Tensor | None) -> Tensor:
        """Return the net's output at points."""
        made: Tensor = self.share * self.net(self.standard(x, t), self.clock(t, labels))
        return made
