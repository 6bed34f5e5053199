"""Activations and their derivatives, in place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class InPlace:
    """An activation and its derivative, both in place.

    Forward takes what comes in, and the place for slopes where there is one; backward the derivative by the output, the
    output, and the slopes.
    """

    forward: Callable[[Tensor, Tensor | None], object]
    backward: Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _sine(z: Tensor, slope: Tensor | None) -> None:
    if slope is not None:
        _elementwise(np.cos, torch.cos, z, slope)
    _elementwise(np.sin, torch.sin, z, z)


def _elementwise(by_numpy: np.ufunc, by_torch: Callable[..., Tensor], z: Tensor, out: Tensor) -> None:
    """A function of single values. In single precision on a CPU numpy takes 0.3 to 0.7 of torch's time on one thread.

    It has only one: with more than two, torch is faster.
    """
    if z.dtype == torch.float32 and z.device.type == "cpu" and torch.get_num_threads() <= 2:
        # A network that diverges is no reason to warn.
        with np.errstate(all="ignore"):
            by_numpy(z.numpy(), out=out.numpy())
    else:
        by_torch(z, out=out)


def _slope(delta: Tensor, _: Tensor, slope: Tensor | None) -> Tensor:
    assert slope is not None
    return delta.mul_(slope)


def _relu(delta: Tensor, output: Tensor, _: Tensor | None) -> Tensor:
    torch.ops.aten.threshold_backward.grad_input(delta, output, 0, grad_input=delta)
    return delta


def _tanh(delta: Tensor, output: Tensor, _: Tensor | None) -> Tensor:
    torch.ops.aten.tanh_backward.grad_input(delta, output, grad_input=delta)
    return delta


def _sigmoid(delta: Tensor, output: Tensor, _: Tensor | None) -> Tensor:
    torch.ops.aten.sigmoid_backward.grad_input(delta, output, grad_input=delta)
    return delta


ACTIVATIONS = {
    "identity": InPlace(lambda z, _: z, lambda delta, *_: delta),
    "relu": InPlace(lambda z, _: z.relu_(), _relu),
    "tanh": InPlace(lambda z, _: _elementwise(np.tanh, torch.tanh, z, z), _tanh),
    "sigmoid": InPlace(lambda z, _: z.sigmoid_(), _sigmoid),
    "sin": InPlace(_sine, _slope),
}

NAMES: dict[Any, str] = {
    torch.relu: "relu",
    functional.relu: "relu",
    nn.ReLU: "relu",
    torch.tanh: "tanh",
    functional.tanh: "tanh",
    nn.Tanh: "tanh",
    torch.sigmoid: "sigmoid",
    functional.sigmoid: "sigmoid",
    nn.Sigmoid: "sigmoid",
    torch.sin: "sin",
    nn.Identity: "identity",
} | {name: name for name in ("relu", "tanh", "sigmoid", "sin")}
"""What modules, functions and methods compute."""
