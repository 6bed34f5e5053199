"""The loss over a plane through three networks."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regauge.connect.comparable import require_comparable
from regauge.core.arguments import check_arguments
from regauge.core.given import as_params
from regauge.core.interpolation import combine
from regauge.core.params import Params, equal_names, label
from regauge.core.progress import Advance, Progress, no_progress
from regauge.core.task import Judge, Task, evaluate

TOGETHER, VALUES = 16, 2**25
"""The largest number of networks that are evaluated in one call, and the largest number of their entries.

The activations of all networks of one call are in memory at the same time.
"""


@dataclass(frozen=True)
class Plane:
    """Metrics over the plane through three networks, in isotropic coordinates.

    The first network is the origin, the second lies on the positive x axis, and the third has y > 0. Distances in the
    plane equal Euclidean distances of the parameters.

    Attributes:
        points: The coordinates of the three networks, float64 `[3, 2]`.
        xs: The x coordinates of the grid's columns, float64 `[columns]`.
        ys: The y coordinates of the grid's rows, float64 `[rows]`.
        values: Each metric on the grid, float64 `[rows, columns]`.
        at_points: Each metric at the three networks, float64 `[3]`.

    References:
        Garipov et al. (2018), appendix A.1, for the coordinates.
    """

    points: Tensor
    xs: Tensor = field(repr=False)
    ys: Tensor = field(repr=False)
    values: dict[str, Tensor] = field(repr=False)
    at_points: dict[str, Tensor]
    _networks: tuple[Params, Params, Params] = field(repr=False)
    _buffers: frozenset[str] = field(repr=False)

    def at(self, x: float, y: float) -> Params:
        """Return the network at a point of the plane, which is an affine combination of the three networks.

        Buffers are combined with the barycentric weights of the parameters. Combined buffers are clamped to the range
        of the three networks, because an extrapolated variance could be negative. Entries that are equal in all three
        networks stay equal bit by bit.
        """
        networks = self._networks
        params = combine(networks, barycentric(self.points, torch.tensor([x, y], dtype=torch.float64)).tolist())
        for name in self._buffers & params.keys():
            if params[name].is_floating_point():
                three = torch.stack([p[name].to(params[name].device) for p in networks])
                params[name] = params[name].clamp(three.amin(0), three.amax(0))
        return params | {name: networks[0][name] for name in equal_names(networks)}

    @property
    def basis(self) -> tuple[Params, Params]:
        """The directions of the x and y axes: orthonormal vectors over the parameters, without buffers."""
        (a, b, c), points = self._networks, self.points.tolist()
        x_axis, y_axis = {}, {}
        for name in _parameter_names(a, self._buffers):
            u, v = (p[name].double() - a[name].double() for p in (b, c))
            x_axis[name] = u / points[1][0]
            y_axis[name] = (v - points[2][0] * x_axis[name]) / points[2][1]
        return x_axis, y_axis


@check_arguments
def plane(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    params_c: Mapping[str, Tensor],
    judge: Judge,
    *,
    resolution: int = 21,
    margin: float = 0.2,
    buffers: Collection[str] | None = None,
    progress: Progress = no_progress,
) -> Plane:
    """Evaluate networks on a grid in the plane through three networks.

    If a task is given, `torch.func.vmap` evaluates many networks at a time. With a task, the control flow of the module
    must not depend on tensor entries. If a function such as `task.evaluate` is given, the networks are evaluated one by
    one. The `prepare` function of a task is applied to every network separately, including the three given networks.

    Args:
        params_a: The network at the origin.
        params_b: The network on the positive x axis.
        params_c: A third network, which must not lie on the line through the other two networks. Align the second and
            third network to the first beforehand. Networks that are not aligned can look far apart although they
            compute the same function.
        resolution: The number of points along the longer side of the grid. The shorter side has roughly the same
            spacing.
        margin: The margin of the grid around the three networks, as a share of the longer side of their bounding box.
        buffers: The names of tensors that distances ignore. Default: the buffers of the task's module, or none.
        progress: A function that shows how many networks were evaluated.

    Raises:
        TypeError: A network is not a dictionary of tensors.
        ValueError: The networks have different parameters or structure, contain NaN or Inf, or lie on one line, or the
            grid is too small.
    """
    if resolution < 2 or not 0 <= margin < math.inf:
        raise ValueError(f"resolution={resolution}, margin={margin}: at least 2 points and a finite margin are needed")
    first, second, third = (as_params(one, label(k)) for k, one in enumerate((params_a, params_b, params_c)))
    networks = (first, second, third)
    require_comparable(networks, judge)
    if buffers is None:
        buffers = [name for name, _ in judge.module.named_buffers()] if isinstance(judge, Task) else []
    points = _coordinates(networks, frozenset(buffers))
    low, high = points.amin(0), points.amax(0)
    longer = float((high - low).max())
    low, high = low - margin * longer, high + margin * longer
    sides = ((high - low) / (high - low).max() * (resolution - 1)).round().long().clamp(min=1) + 1
    xs, ys = (torch.linspace(float(low[k]), float(high[k]), int(sides[k]), dtype=torch.float64) for k in range(2))
    found = Plane(points, xs, ys, {}, {}, networks, frozenset(buffers))
    advance = progress(f"evaluating {len(ys)} x {len(xs)} networks", len(ys) * len(xs))
    where = torch.stack([xs.repeat(len(ys)), ys.repeat_interleave(len(xs))], dim=1)
    prepare = judge.prepare_average if isinstance(judge, Task) else dict
    if isinstance(judge, Task) and judge.prepare is None:
        values = _evaluate_together(judge, found, where, advance)
    else:
        rows = []
        for x, y in where.tolist():
            rows.append(evaluate(prepare(found.at(x, y)), judge))
            advance()
        values = _columns(rows)
    shaped = {name: tensor.reshape(len(ys), len(xs)) for name, tensor in values.items()}
    return replace(found, values=shaped, at_points=_columns([evaluate(prepare(params), judge) for params in networks]))


def barycentric(points: Tensor, where: Tensor) -> Tensor:
    """Return the weights of three points `[3, 2]` that combine to `[..., 2]`. The weights sum to one, `[..., 3]`."""
    (_, _), (width, _), (x, y) = points.tolist()
    third = where[..., 1] / y
    second = (where[..., 0] - third * x) / width
    return torch.stack([1 - second - third, second, third], dim=-1)


def _coordinates(networks: tuple[Params, Params, Params], buffers: frozenset[str]) -> Tensor:
    """Return coordinates of networks, computed by Gram-Schmidt on differences from the first network, in float64."""
    a, *others = networks

    def differences() -> Iterator[list[Tensor]]:
        for name in _parameter_names(a, buffers):
            yield [p[name].to(a[name].device).double().flatten() - a[name].double().flatten() for p in others]

    uu = uv = vv = rest = 0.0
    for u, v in differences():
        uu, uv, vv = uu + float(u @ u), uv + float(u @ v), vv + float(v @ v)
    width = math.sqrt(uu)
    x = uv / width if width else 0.0
    for u, v in differences() if width else ():
        rest += float((v - u * (x / width)).square().sum())
    y = math.sqrt(rest)
    if y <= 1e-6 * max(width, math.sqrt(vv)):
        raise ValueError(
            "the three networks lie on one line (or two of them are the same) and span no plane; "
            "choose another third network, or use `regauge.line`"
        )
    return torch.tensor([[0.0, 0.0], [width, 0.0], [x, y]], dtype=torch.float64)


def _parameter_names(params: Mapping[str, Tensor], buffers: Collection[str]) -> list[str]:
    return [name for name, tensor in params.items() if tensor.is_floating_point() and name not in buffers]


def _evaluate_together(task: Task, flat: Plane, where: Tensor, advance: Advance) -> dict[str, Tensor]:
    size = sum(t.numel() for t in flat._networks[0].values())
    parts = []
    for chunk in torch.split(where, max(1, min(TOGETHER, VALUES // max(1, size)))):
        networks = [flat.at(float(x), float(y)) for x, y in chunk]
        parts.append(task.evaluate_each({name: torch.stack([p[name] for p in networks]) for name in networks[0]}))
        advance(len(chunk))
    return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}


def _columns(rows: list[dict[str, float]]) -> dict[str, Tensor]:
    return {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in rows[0]}
