"""Models for the command line: `regauge discover examples/models.py:cnn`.

A factory takes no arguments and returns a module, or a module and example inputs.
"""

import torch
from torch import Tensor, nn


def cnn() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A small convolutional network for 28 x 28 images, with batch normalization."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )
    return model, (torch.randn(2, 1, 28, 28),)


def transformer() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A transformer encoder of two layers with four heads."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(2, 5, 32),)
