"""One tensor of a checkpoint without its values: name, shape, dtype."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class TensorSpec(NamedTuple):
    """One tensor of a network: its key in the state dictionary, its shape without a model axis, and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Length of the values in bytes."""
        return self.size * self.dtype.itemsize


def layout_of(params: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """The tensors of one network: names, shapes and dtypes, in order."""
    return tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in params.items())
