"""The option `--device`."""

import re

import torch

from regauge.cli.options import UsageError


def require_device(name: str, *, is_here: bool = True) -> torch.device:
    """The device of that name; refuses one that is none, or that this machine does not have but should."""
    try:
        device = torch.device(name)
        if is_here:
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = re.split(r"\n|[.:] ", str(error))[0]
        raise UsageError(f"--device {name!r} cannot be used here ({reason}); say cpu") from error
    if device.type == "meta":
        raise UsageError("--device meta has no values, so nothing can be trained there; say cpu or cuda")
    return device
