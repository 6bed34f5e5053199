"""A check that a file holds enough numbers for the module that its header describes."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}
"""Functions that create the tensors of new modules."""
COPIES, SPARE = 2, 1 << 16
"""Two numbers that limit the entries of a single tensor: `COPIES` times the entries in the file, plus `SPARE`."""
PASSING, CALLS = 100, 20_000
"""Two numbers that limit all tensors together, many of which are temporary. All entries: `PASSING` times the limit for
one tensor. All tensors: `PASSING` times the tensors in the file, plus `CALLS`.
"""


class Claims(TorchFunctionMode):
    """A context that prevents building a module with far more floating-point entries than a file contains.

    Without the check of headers, a header of a few bytes that claims a width of a trillion, or a billion layers, would
    fill the memory.

    Args:
        tensors: The tensors that the file holds.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._held = sum(tensor.numel() for tensor in tensors.values())
        self._largest = COPIES * self._held + SPARE
        self._left, self._calls = PASSING * self._largest, CALLS + PASSING * len(tensors)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        dtype = given.get("dtype")
        if func in FACTORIES and (dtype is None or dtype.is_floating_point):
            size = given.get("size", args[:1] if func is torch.full else args)
            size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
            count = math.prod(size)
            self._left, self._calls = self._left - count, self._calls - 1
            if count > self._largest or self._left < 0 or self._calls < 0:
                raise ValueError(f"it claims to have many more values than the {self._held:,} that it contains")
        return func(*args, **given)
