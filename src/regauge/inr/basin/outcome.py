"""What became of a network that was moved into another one's basin."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from regauge.connect.line import Curve, line
from regauge.core.params import Params
from regauge.core.task import Task


@dataclass(frozen=True)
class InBasin:
    """A network on whose line from another one the loss was made small.

    It computes another function than the network that it began as, unlike after an alignment; all that `rendering`
    draws of a network can be drawn of it.

    Attributes:
        params: The network.
        before: The loss from the first network to the second as it was, 25 points unless asked otherwise.
        after: The loss from the first network to `params`.
        moved: Euclidean distance of `params` from the second network.
        distance: From the first network.
        distance_before: Of the second network from the first.
        losses: What every step minimized, `[steps]`.
    """

    params: Params
    before: Curve
    after: Curve
    moved: float
    distance: float
    distance_before: float
    losses: Tensor

    @property
    def approach(self) -> float:
        """The share of the way to the first network that is gone: 1 is a collapse onto it, 0 the old distance."""
        return 1 - self.distance / self.distance_before if self.distance_before else 0.0

    def __str__(self) -> str:
        return (
            f"barrier {self.before.barrier:.4g} -> {self.after.barrier:.4g}, end loss "
            f"{self.before.table[-1]['loss']:.4g} -> {self.after.table[-1]['loss']:.4g}, moved {self.moved:.4g}, "
            f"distance {self.distance_before:.4g} -> {self.distance:.4g}"
        )


def outcome(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    params: Params,
    task: Task,
    losses: Tensor,
    points: int,
) -> InBasin:
    """Measure what training made of the second network."""
    before, after = (line(task.evaluate, params_a, end, points, prepare=task.prepare) for end in (params_b, params))
    return InBasin(
        params,
        before,
        after,
        moved=_distance(params_b, params),
        distance=_distance(params_a, params),
        distance_before=_distance(params_a, params_b),
        losses=losses,
    )


def _distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Euclidean, of everything that is a floating-point number."""
    squares = [(a[n].double() - b[n].double()).square().sum() for n, t in a.items() if t.is_floating_point()]
    return float(sum(float(square) for square in squares) ** 0.5)
