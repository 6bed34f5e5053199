"""Residual MLPs: a stream that blocks of two linear layers read and write."""

import torch
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """`x -> x + down relu(up x)`."""

    def __init__(self, stream: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(stream, hidden)
        self.down = nn.Linear(hidden, stream)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class ResidualMLP(nn.Module):
    """A linear layer into the stream, blocks that add to it, a linear layer out of it; nothing is normalized.

    One permutation acts on the whole stream, seen by the first and the last layer and by every block, and one on
    the hidden units of each block. Images are flattened.
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
