"""Fully connected networks."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """A perceptron with widths such as `(784, 512, 512, 10)` and an activation between layers.

    Images are flattened before the first layer.
    """

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
    """Return an MLP with the given widths: `mlp(784, 512, 512, 512, 10)`."""
    return MLP(widths, activation)


class ResidualBlock(nn.Module):
    """A residual block `x -> x + down relu(up x)`."""

    def __init__(self, stream: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(stream, hidden)
        self.down = nn.Linear(hidden, stream)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class ResidualMLP(nn.Module):
    """A residual MLP without normalization: a linear layer into the stream, residual blocks, and a linear layer.

    One permutation acts on the whole residual stream, and therefore on the first layer, the last layer and every block.
    A separate permutation acts on the hidden units of each block. Images are flattened before the first layer.
    """

    def __init__(self, in_features: int, stream: int, hidden: int, blocks: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(in_features, stream)
        self.blocks = nn.ModuleList(ResidualBlock(stream, hidden) for _ in range(blocks))
        self.head = nn.Linear(stream, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)
