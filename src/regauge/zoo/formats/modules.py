"""Modules for the networks of public zoos, with the published names of their parameters if there are any."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regauge.nets.siren import Siren

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leakyrelu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}
MOST_INPUT_VALUES = 1 << 24
"""The largest number of entries of an example input."""
MIDDLE = 0.5
"""The middle gray value, which `ImageSiren` adds."""


class ImageSiren(Siren):
    """A SIREN whose output is shifted by one half, the middle gray value: x -> siren(x) + 1/2.

    References:
        Navon et al. (2023), Equivariant architectures for learning in deep weight spaces; their released networks.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + MIDDLE


class SmallCNN(nn.Module):
    """A network of 3 x 3 convolutions with stride two and no padding, a mean over positions, and a linear layer.

    References:
        Unterthiner et al. (2020), Predicting neural network accuracy from weights, section 4.
    """

    def __init__(
        self, channels: Sequence[int] = (1, 16, 16, 16), classes: int = 10, *, activation: str = "relu"
    ) -> None:
        super().__init__()
        pairs = pairwise(channels)
        self.convolutions = nn.ModuleList(nn.Conv2d(before, after, 3, stride=2) for before, after in pairs)
        self.output = nn.Linear(channels[-1], classes)
        self.activation = _activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.convolutions:
            x = self.activation(layer(x))
        logits: Tensor = self.output(functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


class Listed(nn.Module):
    """A sequence of layers in a module list named `module_list`.

    Args:
        layers: Each layer is `["conv", in, out, kernel]`, `["linear", in, out]`, `["pool"]`, `["flatten"]`,
            `["dropout"]` or the name of an activation. Dropout has no effect but keeps its index in the list, because
            networks are evaluated in evaluation mode.

    References:
        Schürholt et al. (2022), Model zoos: a dataset of diverse populations of neural network models, appendix A.
    """

    def __init__(self, layers: Sequence[Sequence[Any]]) -> None:
        super().__init__()
        self.module_list = nn.ModuleList(_layer(*layer) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.module_list:
            x = layer(x)
        return x


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "conv": nn.Conv2d,
    "linear": nn.Linear,
    "pool": lambda: nn.MaxPool2d(2, 2),
    "flatten": nn.Flatten,
    "dropout": nn.Identity,
}
"""The layers of `Listed` by name."""


def _layer(kind: str, *sizes: int) -> nn.Module:
    return LAYERS[kind](*sizes) if kind in LAYERS else _activation(kind)


def _activation(name: str) -> nn.Module:
    if name not in ACTIVATIONS:
        raise ValueError(f"the activation {name!r} is unknown; there are {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


def examples(*shape: int) -> tuple[Tensor]:
    """Return a fixed batch of two example inputs; raise a ValueError if it would need too much memory."""
    if math.prod(shape) > MOST_INPUT_VALUES:
        raise ValueError(f"inputs of shape {shape} are too large to look for a symmetry with; give smaller ones")
    return (torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)),)
