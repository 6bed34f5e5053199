"""Values on another device."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def to_device(values: Any, device: torch.device | str) -> Any:
    """Tensors and modules, or tuples and mappings of them, on a device; modules are moved themselves."""
    if isinstance(values, Mapping):
        return {name: to_device(value, device) for name, value in values.items()}
    if isinstance(values, tuple | list):
        return tuple(to_device(value, device) for value in values)
    return values.to(device) if isinstance(values, Tensor | nn.Module) else values
