"""Evaluation of a path between two networks, and the loss barrier on this path."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from regauge.alignment.align_networks import align
from regauge.connect.comparable import excess_of, require_comparable
from regauge.connect.paths import Gaussian, Path, Straight, WassersteinGeodesic, walk
from regauge.core.arguments import check_arguments
from regauge.core.given import as_params
from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Judge, Task, evaluate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Curve:
    """A loss and other metrics along a path from one network (t = 0) to another (t = 1).

    The excess at t is `loss(t) - ((1 - t) loss(0) + t loss(1))`. The excess is zero at both endpoints.

    Attributes:
        table: One row for each point, with "t" and all metrics at this point.
        stored: The metrics of both given networks before `prepare` was applied, if `prepare` changed every network on
            the path.
        unaligned: The curve before the second network was aligned. None if `line` did not align the second network.

    References:
        Frankle et al. (2020); Ainsworth et al. (2023), definition 2.1; Navon et al. (2024), section 6.
    """

    table: tuple[dict[str, float], ...]
    stored: tuple[dict[str, float], ...] = field(default=(), kw_only=True)
    unaligned: "Curve | None" = field(default=None, kw_only=True)

    @property
    def rows(self) -> tuple[dict[str, float], ...]:
        """The rows of `table`. If there are two curves, further columns contain the metrics before alignment."""
        if self.unaligned is None:
            return self.table
        return tuple(
            row | {f"{name} as trained": value for name, value in before.items() if name != "t"}
            for row, before in zip(self.table, self.unaligned.table, strict=True)
        )

    def plot(self, *, title: str = "loss", ends: tuple[str, str] = ("A", "B")) -> "Figure":
        """Plot the loss along the path with its barrier, and below it the accuracy if the judge measured it.

        If `line` aligned the second network, one plot shows both curves: before and after alignment.

        Args:
            title: The heading of the loss, for example its name and unit.
            ends: The names of the two networks.
        """
        from regauge.report.line_figures import path_figure

        tables = {"as trained": self.unaligned.table, "aligned": self.table} if self.unaligned else {"": self.table}
        return path_figure(tables, title, ends)

    @property
    def excess(self) -> tuple[float, ...]:
        """The loss minus the interpolated loss of the endpoints, at every point."""
        return excess_of(self.table)

    @property
    def barrier(self) -> float:
        """The largest excess over the whole path, including the endpoints. Therefore the barrier is never negative."""
        return max(self.excess)

    @property
    def raw_barrier(self) -> float:
        """The largest excess over the inner points of the path.

        The barrier is negative if the loss is below the interpolated loss at all inner points.
        """
        return max(self.excess[1:-1])

    @property
    def auc(self) -> float:
        """The area under the excess by the trapezoidal rule, which equals the mean excess.

        The area is negative if the mean excess is negative.
        """
        ts, heights = [row["t"] for row in self.table], self.excess
        return sum((ts[k + 1] - ts[k]) * (heights[k] + heights[k + 1]) / 2 for k in range(len(ts) - 1))

    @property
    def facts(self) -> dict[str, Any]:
        """The measurements on the path as plain numbers for JSON."""
        return {
            "barrier": self.barrier,
            "raw_barrier": self.raw_barrier,
            "auc": self.auc,
            "unaligned_barrier": self.unaligned and self.unaligned.barrier,
            "stored": self.stored,
        }

    def __repr__(self) -> str:
        return f"Curve({len(self.table)} points: {self})"

    def __str__(self) -> str:
        ends = f"{self.table[0]['loss']:.4g} and {self.table[-1]['loss']:.4g}"
        text = f"barrier {self.barrier:.4g} (raw {self.raw_barrier:.4g}), AUC {self.auc:.4g}, end losses {ends}"
        if self.unaligned is not None:
            text += f"; before B was aligned to A: barrier {self.unaligned.barrier:.4g}"
        own = " and ".join(f"{metrics['loss']:.4g}" for metrics in self.stored)
        if own in ("", ends):
            return text
        return f"{text}; as stored, not prepared as all networks on the path are, the ends have losses {own}"


@overload
def line(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    judge: Judge,
    points: int = 25,
    *,
    symmetry: Symmetry | None = None,
    path: Path | None = None,
    prepare: Callable[[Params], Params] | None = None,
    progress: Progress = no_progress,
) -> Curve: ...


@overload
def line(
    params_a: Gaussian,
    params_b: Gaussian,
    judge: Callable[[tuple[Params, Params]], Mapping[str, float]],
    points: int = 25,
    *,
    path: WassersteinGeodesic,
    prepare: Callable[[tuple[Params, Params]], tuple[Params, Params]] | None = None,
    progress: Progress = no_progress,
) -> Curve: ...


@check_arguments
def line(
    params_a: Any,
    params_b: Any,
    judge: Task | Callable[[Any], Mapping[str, float]],
    points: int = 25,
    *,
    symmetry: Symmetry | None = None,
    path: Any = None,
    prepare: Callable[[Any], Any] | None = None,
    progress: Progress = no_progress,
) -> Curve:
    """Evaluate networks along a path from the first network to the second. Default: a linear path.

    Args:
        params_a: The network at t = 0. For `WassersteinGeodesic`, a pair of dictionaries: means and standard
            deviations. For `WassersteinGeodesic`, `judge` and `prepare` are functions of pairs of dictionaries.
        params_b: The network at t = 1. Align this network first, or pass `symmetry`, because the barrier between
            unaligned networks has little meaning.
        judge: A task, or a function that maps parameters to metrics. The metrics must include "loss".
        points: The number of equally spaced points t, including both endpoints.
        symmetry: If given, the weights of the second network are first aligned to the first network, with the default
            method of `rg.align`. If a symmetry is given, the result also contains the curve before alignment in
            `unaligned`, and `plot` shows both curves. A symmetry can be given only for linear paths.
        path: The path: `Straight()` (default), `Geodesic`, `WassersteinGeodesic`, `Bezier`, `PolygonalChain` or
            `Repaired`.
        prepare: A function that is applied to every network on the path, including the endpoints. Default: the
            `prepare` function of the task. If a model has batch normalization, its statistics must be recomputed:
            `lambda p: reset_batchnorm(p, module, batches)`. If `prepare` changes the loss of an endpoint, the curve
            also reports the loss as stored.
        progress: A function that shows how many networks were evaluated.

    Raises:
        TypeError: A network is not a dictionary of tensors.
        ValueError: The networks have different parameters or structure, or contain NaN or Inf. There are fewer than
            three points, the path does not fit the networks, or a symmetry is given although the path is not linear.
            The judge returns no loss, or a loss is NaN.
    """
    if points < 3:
        raise ValueError(f"a line needs both ends and at least one point between them, but points={points}")
    path = Straight() if path is None else path
    if symmetry is not None:
        if not isinstance(path, Straight) or isinstance(params_a, tuple):
            raise ValueError(
                "symmetry= aligns the ends of a straight line between two networks; for another path align them first "
                "with rg.align"
            )
        ways: Any = {"points": points, "prepare": prepare, "progress": progress}
        before = line(params_a, params_b, judge, **ways)
        aligned = align(params_a, params_b, symmetry, progress=progress).params
        return replace(line(params_a, aligned, judge, **ways), unaligned=before)
    if prepare is None and isinstance(judge, Task):
        prepare = judge.prepare
    is_pair = isinstance(params_a, tuple)
    if is_pair and not isinstance(path, WassersteinGeodesic):
        raise ValueError(
            f"the ends are tuples, but {type(path).__name__} connects single dictionaries of parameters; for Gaussians "
            "(means and standard deviations) give path=WassersteinGeodesic()"
        )
    if not is_pair:
        params_a, params_b = as_params(params_a, "the first network"), as_params(params_b, "the second network")
    if is_pair:
        path.at(params_a, params_b, 0.0)  # raises an error for other arguments
    for ends in zip(params_a, params_b, strict=True) if is_pair else ((params_a, params_b),):
        require_comparable(ends, judge)
    table, stored, at = [], [], walk(path, params_a, params_b)
    advance = progress("evaluating", points)
    for k in range(points):
        t = k / (points - 1)
        params = at(t)
        if prepare is not None:
            if k in (0, points - 1):
                stored.append(_measure(params, judge))
            params = prepare(params)
        metrics = _measure(params, judge)
        if math.isnan(metrics["loss"]) or (k in (0, points - 1) and math.isinf(metrics["loss"])):
            raise ValueError(
                f"the loss at t={t:.3g} is {metrics['loss']}, so the barrier is undefined: "
                + (
                    "this end is not a working network on these data"
                    if k in (0, points - 1)
                    else "the network there overflows; evaluate in float32, or recompute its statistics with `prepare`"
                )
            )
        table.append({"t": t, **metrics})
        advance()
    return Curve(tuple(table), stored=tuple(stored))


def _measure(params: Any, judge: Task | Callable[[Any], Mapping[str, float]]) -> dict[str, float]:
    metrics = evaluate(params, judge)
    if "loss" not in metrics:
        raise ValueError(f"the judge returned {sorted(metrics)}, but a barrier needs the metric 'loss'")
    return metrics
