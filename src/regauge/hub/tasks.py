"""Tasks: a model and data, both opened by name, and a loss."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from regauge.core.arguments import check_arguments
from regauge.core.task import Batch, Task, cross_entropy
from regauge.hub.batches import open_batches
from regauge.hub.build_model import described_networks
from regauge.hub.model import Model
from regauge.hub.user_code import users_code

Loss = Literal["cross-entropy", "mse"]
IGNORED = -100
"""The class index of targets that the cross entropy ignores."""


def open_task(
    model: Model,
    data: str | Path,
    *,
    loss: Loss = "cross-entropy",
    batch: int = 512,
    outputs: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
) -> Task:
    """Open the task of a model on data.

    Args:
        model: The initialized model.
        data: The name of the batches; see `open_batches`. If the model represents a signal, `data` may also be the name
            of a signal.
        loss: The loss. With the cross entropy, accuracy is also measured.
        batch: The batch size, for data from a file.
        outputs: The name of the output that is compared with the targets; the first output by default.
        dtype: The dtype of the parameters, to which floating-point inputs are converted.

    Raises:
        ValueError: The data cannot be read, the model raises an error for the data, or the targets do not fit the
            output.
    """
    task: Task | None = None
    if model.checkpoint is not None:
        task = described_networks(model.checkpoint).find_task(model.built, str(data), loss=loss, dtype=dtype)
    if task is None:
        task = make_task(model.module, open_batches(data, batch), loss=loss, dtype=dtype, outputs=outputs)
    return replace(task, name=str(data))


@check_arguments
def make_task(
    module: nn.Module,
    batches: Sequence[Batch],
    *,
    loss: Loss = "cross-entropy",
    dtype: torch.dtype = torch.float32,
    outputs: Sequence[str] = (),
) -> Task:
    """Make the task of a module on batches. The module is called on each batch once, to detect bad data early."""
    converted = [(convert(inputs, dtype), targets) for inputs, targets in batches]
    task = Task(module, converted, _squared_error if loss == "mse" else _cross_entropy, tuple(outputs) or None)
    blank = {name: t.to(dtype) if t.is_floating_point() else t for name, t in module.state_dict().items()}
    with torch.no_grad():
        for inputs, targets in converted:
            with users_code("the model fails on the data"):
                output = task.run(blank, inputs)
            try:
                task.criterion(output, targets)
            except (IndexError, RuntimeError, TypeError) as error:
                raise ValueError(f"the model fails on the data: {type(error).__name__}: {error}") from error
    if loss == "mse":
        return task
    # From here on, the loss is the default loss of `Task`, which methods recognize.
    classes = [(inputs, targets.long()) for inputs, targets in converted]
    return Task(module, classes, outputs=tuple(outputs) or None)


def example_task(model: Model, kwargs: Mapping[str, Any], outputs: Sequence[str] = ()) -> Task:
    """Make a task without targets on a model's example inputs.

    The loss of the task is the mean square of the output.
    """
    inputs: Any = dict(kwargs) if kwargs else model.inputs
    if model.inputs and kwargs:
        inputs = inspect.signature(model.module.forward).bind(*model.inputs, **kwargs).arguments
    return Task(model.module, [(inputs, torch.zeros(1))], _size, tuple(outputs) or None, has_targets=False)


def convert(inputs: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors among the inputs to a dtype."""
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)


def dtype_of(params: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype of the first floating-point parameter."""
    return next((t.dtype for t in params.values() if t.is_floating_point()), torch.float32)


def _size(output: Tensor, _: Any) -> Tensor:
    return output.float().square().mean()


def _squared_error(output: Tensor, targets: Tensor) -> Tensor:
    if output.shape != targets.shape:
        raise ValueError(
            f"the model's output has shape {tuple(output.shape)}, but the targets have {tuple(targets.shape)}; "
            "choose another output with `outputs=`, or other data"
        )
    return functional.mse_loss(output.float(), targets.float())


def _cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    classes = output.shape[-1]
    if output.shape[:-1] != targets.shape:
        raise ValueError(
            f"the model's output has shape {tuple(output.shape)}, with {classes} logits in each row, but the "
            f"targets have {tuple(targets.shape)}; choose another output with `outputs=`, or other data"
        )
    chosen = targets.long()
    if targets.is_floating_point() and not torch.equal(chosen.to(targets), targets):
        raise ValueError("the targets are not numbers of classes; for values, give `loss=mse`")
    strange = chosen[((chosen < 0) & (chosen != IGNORED)) | (chosen >= classes)]
    if len(strange):
        raise ValueError(
            f"a target is class {int(strange[0])}, but the model has {classes} outputs; correct the targets, or give "
            "another model"
        )
    return cross_entropy(output.float(), chosen)
