"""Recovery of a network's copies by alignment."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.alignment import Method, align_pairs
from regauge.connect.line import Curve
from regauge.core.interpolation import interpolate
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.inr.orbits.orbit import Orbit

RECOVERED = 1e-4
"""A copy is recovered if no parameter is further from where it belongs than this share of its tensor's largest one."""


@dataclass(frozen=True)
class Recovery:
    """The outcome of aligning the copies of a network with it.

    Attributes:
        params: The aligned copies, `[count, ...]`.
        errors: How far the worst parameter of each is from where it belongs, as a share of its tensor's largest,
            float64 `[count]`. Where it belongs is the original with the copy's own noise, so that a copy with noise can
            be recovered exactly too.
        distances: Euclidean distance of each from the original, its noise included, float64 `[count]`.
        curves: The loss on the line from the original to each; none without a task.
        seconds: CPU time of the alignment of all.
    """

    params: Params
    errors: Tensor
    distances: Tensor
    curves: tuple[Curve, ...]
    seconds: float

    @property
    def is_recovered(self) -> Tensor:
        """Whether each copy is where it belongs, up to rounding, bool `[count]`."""
        return self.errors <= RECOVERED

    @property
    def share(self) -> float:
        """The share of them."""
        return float(self.is_recovered.double().mean())

    @property
    def max_error(self) -> float:
        """The worst error of all copies."""
        return float(self.errors.max())

    def __str__(self) -> str:
        text = (
            f"{int(self.is_recovered.sum())} of {len(self.errors)} copies recovered, largest error {self.max_error:.2g}"
        )
        if self.curves:
            text += f", largest barrier {max(curve.barrier for curve in self.curves):.3g}"
        return text


def recovery(
    params: Mapping[str, Tensor],
    copies: Orbit,
    symmetry: Symmetry,
    *,
    method: Method | None,
    within: Symmetry | None = None,
    task: Task | None = None,
    points: int = 25,
    generator: torch.Generator | None = None,
) -> Recovery:
    """Align every copy with the original, and compare it with where it belongs.

    With factors (ReLU) and noise the errors are as large as the noise even where every unit is found: matching gives a
    copy the original's factors and does not estimate its own.

    Args:
        params: The original.
        copies: Copies of the original.
        symmetry: The symmetry that the copies were drawn from.
        method: The method of alignment; None leaves the copies as they are.
        within: The symmetry that the method may use: the whole one unless given.
        task: Model, data and loss of the curves, and for methods that use one.
        points: Points of each curve.
        generator: Random generator, for methods that use chance.

    Raises:
        ValueError: The copies do not fit the original or the symmetry, or there are fewer than three points.
    """
    if points < 3:
        raise ValueError(f"a line needs both ends and at least one point between them, but points={points}")
    began = time.process_time()
    moved = copies.params
    if method is not None:
        moved = align_pairs(
            params, copies.params, within or symmetry, method=method, task=task, generator=generator
        ).params
    seconds = time.process_time() - began
    expected = copies.undo(symmetry)
    errors = torch.zeros(len(copies), dtype=torch.float64)
    squares = torch.zeros(len(copies), dtype=torch.float64)
    for name, tensor in moved.items():
        found, right = tensor.double().flatten(1), expected[name].double().flatten(1)
        largest = right.abs().amax(1).clamp(min=torch.finfo(tensor.dtype).tiny)
        errors = torch.maximum(errors, (found - right).abs().amax(1) / largest)
        squares += (found - params[name].double().flatten()).square().sum(1)
    curves = () if task is None else lines(params, moved, task, points)
    return Recovery(moved, errors, squares.sqrt(), curves, seconds)


def lines(params: Mapping[str, Tensor], copies: Mapping[str, Tensor], task: Task, points: int) -> tuple[Curve, ...]:
    """The lines from one network to every network of a population, all evaluated together."""
    count = len(next(iter(copies.values())))
    starts = {name: tensor.expand(count, *tensor.shape) for name, tensor in params.items()}
    ts = [k / (points - 1) for k in range(points)]
    losses = torch.stack([task.evaluate_each(interpolate(starts, copies, t))["loss"] for t in ts])
    return tuple(
        Curve(tuple({"t": t, "loss": float(loss)} for t, loss in zip(ts, losses[:, k], strict=True)))
        for k in range(count)
    )
