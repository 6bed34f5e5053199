"""Models by name, built in evaluation mode. Example inputs are included if the factory returns them."""

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.location import find_cached
from regauge.checkpoints.writing import SUFFIX
from regauge.hub.user_code import Values, call_factory

DESCRIBED = {"regauge.inr": "regauge.inr.described_networks"}
"""Kinds of networks that headers of checkpoints describe, each with the Python module that builds the networks.

Each listed Python module has two functions. `build` returns a torch module and example inputs for a checkpoint.
`find_task` returns a task for the data that the network of a checkpoint represents.
"""


@dataclass(frozen=True)
class Built:
    """A module in evaluation mode with its example inputs.

    Attributes:
        module: The module, uninitialized if it is on the meta device.
        inputs: Positional inputs.
        kwargs: Keyword inputs.
        checkpoint: The checkpoint that describes the network; None for other models.
        further: Further keyword inputs for the trace, which are used if the first inputs cannot be traced or do not
            reach every submodel.
        lack: The reason why example inputs are missing.
    """

    module: nn.Module
    inputs: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    checkpoint: Checkpoint | None = None
    further: Iterable[Mapping[str, Any]] = ()
    lack: str = ""

    @property
    def is_meta(self) -> bool:
        """Whether the module is on the meta device."""
        return any(tensor.is_meta for tensor in self.module.state_dict().values())


def build_model(name: str, values: Values = "if small") -> Built:
    """Build the model with a given name. The model may lack example inputs.

    Args:
        name: `package.module:factory`, `file.py:factory`, a folder with config.json, a model of the Hugging Face hub
            that is in the cache on this machine, or a checkpoint whose header describes its network.
        values: Whether the model is initialized. A model that is not initialized is built on the meta device.

    Raises:
        ValueError: The name is unknown, or the model cannot be built.
    """
    folder = folder_of(name)
    if folder is not None:
        from regauge.hub.folder_model import build_folder  # it imports code of transformers

        module, tried = build_folder(folder, values)
        try:
            return Built(module, (), next(tried), further=tried)
        except ValueError as error:
            return Built(module, lack=str(error))
    device = torch.device("meta") if values == "never" else nullcontext()
    if name.endswith(SUFFIX):
        checkpoint = Checkpoint.open(name)
        with device:
            module, own = described_networks(checkpoint).build(checkpoint, with_values=values != "never")
        return Built(module.eval(), own, checkpoint=checkpoint)
    made = call_factory(name, "MODEL", device)
    if isinstance(made, nn.Module):
        return Built(made.eval())
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        inputs = made[1] if isinstance(made[1], tuple | list) else (made[1],)
        return Built(made[0].eval(), tuple(inputs), made[2] if len(made) == 3 else None)
    raise ValueError(
        f"the factory {name!r} returned a {type(made).__name__}; it must return a torch.nn.Module, "
        "(module, example_inputs) or (module, example_inputs, example_kwargs)"
    )


def folder_of(name: str) -> Path | None:
    """Return the folder to which a model's name refers, possibly in the hub's cache; None for other names."""
    folder = find_cached(name) or Path(name)
    return folder if folder.is_dir() else None


def name_model(checkpoint: Checkpoint) -> str | None:
    """Return the name of the model in the checkpoint's header, or None."""
    is_described = (Path(checkpoint.home) / "config.json").is_file() or checkpoint.header.get("kind") in DESCRIBED
    return checkpoint.home if is_described else None


def described_networks(checkpoint: Checkpoint) -> Any:
    """Return the Python module in `DESCRIBED` that can build the network of a checkpoint.

    Raises:
        ValueError: The header does not describe a network.
    """
    kind = checkpoint.header.get("kind", "")
    if kind not in DESCRIBED:
        raise ValueError(
            f"the model of {checkpoint.label!r} is unknown; name the model as package.module:factory or "
            "file.py:factory, or as a folder with config.json"
        )
    return importlib.import_module(DESCRIBED[kind])


def describe_inputs(shapes: Sequence[str], dtypes: Sequence[str], device: str = "cpu") -> tuple[Tensor, ...]:
    """Return positional inputs of the given shapes and dtypes: normal noise or small integers.

    Args:
        shapes: Shapes as sizes separated by x, such as `2x3x32x32`.
        dtypes: Names of torch dtypes, one for each input or one for all inputs; float32 by default.
        device: Device of the inputs.

    Raises:
        ValueError: A shape or a dtype cannot be read, or the numbers of dtypes and shapes differ.
    """
    dtypes = dtypes or ("float32",)
    if len(dtypes) == 1:
        dtypes = (*dtypes,) * len(shapes)
    if len(dtypes) != len(shapes):
        raise ValueError(f"there are {len(shapes)} input shapes but {len(dtypes)} dtypes; give one dtype each, or one")
    generator = torch.Generator().manual_seed(0)
    return tuple(_input(s, d, generator).to(device) for s, d in zip(shapes, dtypes, strict=True))


def _input(shape: str, dtype: str, generator: torch.Generator) -> Tensor:
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise ValueError(f"the input shape {shape!r} cannot be read; write sizes with x between them: 2x3x32x32")
    sizes = [int(size) for size in shape.split("x")]
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or kind.is_complex:
        raise ValueError(f"the input dtype {dtype!r} is unknown; write for example float32 or int64")
    if kind.is_floating_point:
        return torch.randn(sizes, generator=generator).to(kind)
    return torch.randint(0, 2, sizes, generator=generator).to(kind)
