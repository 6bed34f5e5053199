"""Fully connected networks."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers of widths such as `(784, 512, 512, 10)` with an activation between them; images are flattened."""

    def __init__(self, widths: Sequence[int], activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        if len(widths) < 2:
            raise ValueError(f"an MLP needs at least inputs and outputs, but widths is {tuple(widths)}")
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


def mlp(*widths: int, activation: Callable[[Tensor], Tensor] = torch.relu) -> MLP:
    """An MLP by its widths: `mlp(784, 512, 512, 512, 10)`."""
    return MLP(widths, activation)
