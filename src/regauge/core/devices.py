"""Finding devices by name, and copying values to a device."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def find_device(name: str, *, is_here: bool = True) -> torch.device:
    """Return the device with the given name; raise an error for devices on which nothing can be trained.

    Args:
        name: The name, in the form that `torch.device` accepts.
        is_here: Whether the device must exist on the present machine.

    Raises:
        ValueError: The device does not exist, is not on this machine although it must be, or is "meta", which stores no
            values.
    """
    try:
        device = torch.device(name)
        if is_here:
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = re.split(r"\n|[.:] ", str(error))[0]
        raise ValueError(f"device {name!r} cannot be used here ({reason}); choose cpu") from error
    if device.type == "meta":
        raise ValueError("device 'meta' has no values, so nothing can be trained there; choose cpu or cuda")
    return device


def to_device(values: Any, device: torch.device | str) -> Any:
    """Return the given values on a device: a tensor, a module, or a tuple or mapping that contains them.

    Modules are moved to the device in place.
    """
    if isinstance(values, Mapping):
        return {name: to_device(value, device) for name, value in values.items()}
    if isinstance(values, tuple | list):
        return tuple(to_device(value, device) for value in values)
    return values.to(device) if isinstance(values, Tensor | nn.Module) else values
