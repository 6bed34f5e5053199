"""The model of a Hugging Face folder, with example inputs for tracing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regauge.checkpoints.names.from_transformers import find_factory
from regauge.core.symmetry import Symmetry
from regauge.hub.example_inputs import Kwargs, example_inputs, parts_of
from regauge.hub.user_code import Values, users_code

MATERIALIZED = 150_000_000
"""The largest number of parameters of a model that is initialized. Larger models of folders are built on the meta
device, without weights."""
EXPERTS = "batched_mm"
"""The implementation of experts in transformers whose operators and shapes do not depend on values."""


def build_folder(folder: Path, values: Values) -> tuple[nn.Module, Iterator[Kwargs]]:
    """Return the model of a folder with config.json in evaluation mode, and example inputs, the best inputs first."""
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"the folder {str(folder)!r} has no config.json, so its model is unknown; name the model as "
            "package.module:factory or file.py:factory"
        )
    try:
        build = find_factory(folder)
    except ImportError as error:
        raise ValueError("a folder with config.json needs transformers: pip install 'regauge[transformers]'") from error
    with users_code(f"transformers cannot build the model of {str(folder)!r}"):
        with torch.device("meta"):
            module = traceable(build())
        is_small = sum(p.numel() for p in module.parameters()) <= MATERIALIZED
        if values == "always" or (values == "if small" and is_small):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # The verification gives the same result in every run.
                module = traceable(build())
    return module.eval(), example_inputs(module, module.config)


def traceable(module: nn.Module) -> nn.Module:
    """Return a model with traceable expert loops, with the same weights and the same function."""
    model: Any = module
    model.set_experts_implementation(EXPERTS)
    return module


def unreached_parts(module: nn.Module, symmetry: Symmetry) -> list[str]:
    """Return submodels of a transformers model, such as an image model, whose tensors are all unused."""
    unused, parts = set(symmetry.unused), []
    for name, part in parts_of(module).items():
        if unused.issuperset(f"{name}.{one}" for one, tensor in part.named_parameters() if tensor.ndim):
            parts.append(name)
    return [name for name in parts if not any(name.startswith(f"{other}.") for other in parts)]
