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


def _by_output(operator: Any, *arguments: float) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The derivative that an operator of torch computes from the output."""

    def backward(delta: Tensor, output: Tensor, _: Tensor | None) -> Tensor:
        operator.grad_input(delta, output, *arguments, grad_input=delta)
        return delta

    return backward


ACTIVATIONS = {
    "identity": InPlace(lambda z, _: z, lambda delta, *_: delta),
    "relu": InPlace(lambda z, _: z.relu_(), _by_output(torch.ops.aten.threshold_backward, 0)),
    "tanh": InPlace(lambda z, _: _elementwise(np.tanh, torch.tanh, z, z), _by_output(torch.ops.aten.tanh_backward)),
    "sigmoid": InPlace(lambda z, _: z.sigmoid_(), _by_output(torch.ops.aten.sigmoid_backward)),
    "sin": InPlace(_sine, _slope),
}

NAMES: dict[Any, str] = {
    **dict.fromkeys((torch.relu, functional.relu, nn.ReLU, "relu"), "relu"),
    **dict.fromkeys((torch.tanh, functional.tanh, nn.Tanh, "tanh"), "tanh"),
    **dict.fromkeys((torch.sigmoid, functional.sigmoid, nn.Sigmoid, "sigmoid"), "sigmoid"),
    **dict.fromkeys((torch.sin, "sin"), "sin"),
    nn.Identity: "identity",
}
"""What modules, functions and methods compute."""
