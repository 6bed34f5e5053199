"""Lines between pairs of networks of two populations: between weights, decoded weights and latent vectors."""

from collections.abc import Callable

import torch
from torch import Tensor

from regauge import learn
from regauge.connect import Curve
from regauge.core.interpolation import interpolate
from regauge.core.params import Params
from regauge.core.task import Task


def straight_lines(first: Params, second: Params, task: Task, points: int) -> tuple[Curve, ...]:
    """Return the lines from network k of one population to network k of a second population, for all k, evaluated
    together.
    """
    return _curves(lambda t: interpolate(first, second, t), task, points)


def decoded_lines(
    label: str, auto: learn.Autoencoder, first: Params, second: Params, task: Task, points: int
) -> dict[str, tuple[Curve, ...]]:
    """Return lines between decoded weights and between latent vectors. If there is only one first network, all lines
    start at this network.
    """
    others = auto.encode(second)
    own = auto.encode(first).expand_as(others)
    twins, other_twins = auto.decode(own), auto.decode(others)
    return {
        f"decoded, {label}": straight_lines(twins, other_twins, task, points),
        f"latent, {label}": _curves(lambda t: auto.decode(torch.lerp(own, others, t)), task, points),
    }


def _curves(at: Callable[[float], Params], task: Task, points: int) -> tuple[Curve, ...]:
    """Return one curve for each network of a population, whose weights `at(t)` depend on the position t on the line."""
    ts = [k / (points - 1) for k in range(points)]
    found = [task.evaluate_each(at(t)) for t in ts]

    def row(k: int, t: float, metrics: dict[str, Tensor]) -> dict[str, float]:
        return {"t": t, **{name: float(values[k]) for name, values in metrics.items()}}

    count = len(found[0]["loss"])
    return tuple(Curve(tuple(row(k, t, one) for t, one in zip(ts, found, strict=True))) for k in range(count))
