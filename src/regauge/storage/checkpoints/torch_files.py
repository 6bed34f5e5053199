"""State dictionaries in torch files.

Torch files are pickles and can run code when they are loaded; they are read with `weights_only=True`, always.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from regauge.core.params import Params
from regauge.storage.checkpoints.names import shorten

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
WRAPPERS = ("state_dict", "model")
"""Names under which training scripts put the state dict beside optimizer states and the like."""


def read_torch_file(source: Path | BinaryIO, label: str) -> Mapping[Any, Any]:
    """The state dictionary in a torch file, on the CPU, also where it lies under one of `WRAPPERS`.

    Raises ValueError if it is damaged, or holds no dictionary or more than tensors and plain values.
    """
    damaged = (
        f"{label!r} is not a readable torch file; it is damaged, was not copied completely, or is of another program: "
        "fetch it again"
    )
    try:
        content = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Unsupported operand" in str(error):  # an unknown opcode: no pickle at all
            raise ValueError(damaged) from error
        raise ValueError(
            f"{label!r} holds pickled Python objects besides tensors; loading them could run any code, so it is "
            "refused: save `module.state_dict()` instead, best as .safetensors"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError) as error:
        raise ValueError(damaged) from error
    for name in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
            break
    if not isinstance(content, Mapping) or not content:
        raise ValueError(
            f"{label!r} holds a {type(content).__name__}, not a state dict (names to tensors); "
            "save `module.state_dict()`"
        )
    return content


def load_torch_file(path: Path) -> Params:
    """The tensors of a checkpoint in a torch file, on the CPU; other entries are refused."""
    content = read_torch_file(path, str(path))
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(
            f"{str(path)!r} holds entries that are no tensors ({shorten(others)}); save only "
            "`module.state_dict()`, or put it under 'state_dict'"
        )
    return {str(name): tensor.detach() for name, tensor in content.items()}
