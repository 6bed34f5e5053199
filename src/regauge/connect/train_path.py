"""Train the inner points of a path so that the loss along it is low."""

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from regauge.alignment.descent import repeated
from regauge.connect.paths import ControlledPath
from regauge.core.interpolation import combine
from regauge.core.params import require_finite, require_same_shapes
from regauge.core.progress import Progress, no_progress
from regauge.core.task import Task

Trained = TypeVar("Trained", bound=ControlledPath)


def train_path(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    task: Task,
    path: Trained,
    *,
    generator: torch.Generator,
    steps: int = 300,
    lr: float = 1e-2,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    progress: Progress = no_progress,
) -> Trained:
    """Minimize the expected loss at a point t drawn uniformly from the path, over its inner control points.

    Every step takes one batch and one t; the learning rate falls to zero along half a cosine. Align the networks
    first: otherwise much of what the curve learns is the way around a symmetry that an element removes for nothing.

    Only parameters are trained; buffers are combined like weights. With batch normalization give the task a
    `prepare` that recomputes the statistics (from few batches, since every step does): gradients do not flow
    through it.

    Args:
        params_a: The network at t = 0, unchanged.
        params_b: The network at t = 1, unchanged.
        task: Module, batches, loss. Batches come in their order, over and over.
        path: Where training starts, such as `Bezier.between(a, b)`; unchanged.
        generator: Draws t, on the CPU.
        steps: Number of steps.
        lr: Learning rate at the start.
        optimizer: From tensors and `lr` to an optimizer: `torch.optim.Adam`, or
            `functools.partial(torch.optim.SGD, momentum=0.9)`.
        progress: Shows the steps and their losses.

    Returns:
        A path of the same kind with new inner points, in the dtypes that the old ones have.

    Raises:
        ValueError: The networks or the inner points have different parameters or hold NaN or Inf, there are no
            batches, steps or lr are not positive, or the loss is not finite.

    References:
        Garipov et al. (2018), equation 2; Navon et al. (2024), section 6, for curves after alignment.
    """
    if steps < 1 or lr <= 0:
        raise ValueError(f"steps={steps} and lr={lr} cannot train a path: both must be positive")
    for label, params in (("first network", params_a), ("second network", params_b)):
        require_finite(params, f"the {label}")
    for other in (*path.inner, params_b):
        require_same_shapes(params_a, other)
    names: dict[int, list[str]] = {}
    for name, parameter in task.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    missing = [name for every in names.values() for name in every if name not in params_a]
    if missing:
        raise ValueError(
            f"the networks lack {missing[:5]}, which the task's module has; they must be of its architecture"
        )
    learned = [{every[0]: _leaf(point[every[0]]) for every in names.values()} for point in path.inner]
    optimizing = optimizer([tensor for point in learned for tensor in point.values()], lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizing, T_max=steps)
    further = {name for every in names.values() for name in every[1:]}
    ends = [{name: t.detach() for name, t in p.items() if name not in further} for p in (params_a, params_b)]
    fixed = [{name: t for name, t in point.items() if name not in further} for point in path.inner]
    advance = progress("training the path", steps)
    for step, batch in zip(range(steps), repeated(task), strict=False):
        t = float(torch.rand((), generator=generator, dtype=torch.float64))
        inner = [{**buffers, **point} for buffers, point in zip(fixed, learned, strict=True)]
        params = combine((ends[0], *inner, ends[1]), path.weights(t))
        loss = task.loss(params if task.prepare is None else task.prepare(params), batch)
        value = loss.item()
        if not math.isfinite(value):
            raise ValueError(f"the loss is {value} at t={t:.3g} in step {step}; try a smaller lr than {lr}")
        optimizing.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizing.step()
        schedule.step()
        advance(loss=value)
    result = []
    for point, new in zip(path.inner, learned, strict=True):
        moved = {name: new[every[0]].detach().to(point[name].dtype) for every in names.values() for name in every}
        result.append({name: moved.get(name, tensor) for name, tensor in point.items()})
    return type(path)(tuple(result))


def _leaf(tensor: Tensor) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.detach().to(dtype, copy=True).requires_grad_()
