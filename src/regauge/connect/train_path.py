"""Train the inner points of a path so that the loss along it is low."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from regauge.connect.paths import ControlledPath
from regauge.connect.straighten import first_names
from regauge.core.interpolation import combine
from regauge.core.params import Params, require_alike, require_same_shapes
from regauge.core.progress import Progress, no_progress
from regauge.core.task import Batch, Task
from regauge.training import Adam, Cosine, Descent, Optimizer, Schedule, differentiate, minimize
from regauge.training.descent import cycle

Trained = TypeVar("Trained", bound=ControlledPath)


def train_path(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    task: Task,
    path: Trained,
    *,
    generator: torch.Generator,
    steps: int = 300,
    optimizer: Optimizer | None = None,
    schedule: Schedule | None = None,
    progress: Progress = no_progress,
) -> Trained:
    """Minimize the expected loss at a point t drawn uniformly from the path, over its inner control points.

    Every step takes one batch and one t. Align the networks first: otherwise much of
    what the curve learns is the way around a symmetry, which an element removes for nothing.

    Only parameters are trained; buffers are combined like weights. With batch normalization give the task a
    `prepare` that recomputes the statistics (from few batches, since every step does): gradients do not flow
    through it.

    Args:
        params_a: The network at t = 0, unchanged.
        params_b: The network at t = 1, unchanged.
        task: Module, batches, loss. Batches come in their order, over and over.
        path: Where training starts, such as `Bezier.between(a, b)`; unchanged.
        generator: Draws t, on the CPU.
        optimizer: Adam with a learning rate of 0.01 unless given.
        schedule: Of the learning rate; half a cosine down to zero unless given.

    Returns:
        A path of the same kind with new inner points, in the dtypes that the old ones have.

    Raises:
        ValueError: The networks or the inner points have different parameters or hold NaN or Inf, there are no
            batches, there is no step, or the loss is not finite.

    References:
        Garipov et al. (2018), equation 2; Navon et al. (2024), section 6, for curves after alignment.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} cannot train a path: at least one is needed")
    require_alike(params_a, params_b)
    for point in path.inner:
        require_same_shapes(params_a, point)
    first = first_names(task, params_a)
    ends = [{name: tensor.detach() for name, tensor in end.items()} for end in (params_a, params_b)]
    learned = {
        _key(k, name): point[name].detach().to(torch.promote_types(point[name].dtype, torch.float32))
        for k, point in enumerate(path.inner)
        for name in first.values()
    }

    def complete(learned: Params) -> list[Params]:
        """Put trained parameters into the inner points, under all their names."""
        return [
            {name: learned[_key(k, first[name])] if name in first else tensor for name, tensor in point.items()}
            for k, point in enumerate(path.inner)
        ]

    def loss(learned: Params, batch: Batch) -> Tensor:
        t = float(torch.rand((), generator=generator, dtype=torch.float64))
        params = combine((ends[0], *complete(learned), ends[1]), path.weights(t))
        return task.loss(task.prepare_average(params), batch)

    found = minimize(
        differentiate(loss),
        learned,
        cycle(task),
        Descent(steps=steps, optimizer=optimizer or Adam(1e-2), schedule=schedule or Cosine()),
        progress=progress,
        label="training the path",
    ).params
    return type(path)(
        tuple(
            {name: tensor.to(point[name].dtype) for name, tensor in moved.items()}
            for point, moved in zip(path.inner, complete(found), strict=True)
        )
    )


def _key(point: int, name: str) -> str:
    return f"{point}.{name}"
