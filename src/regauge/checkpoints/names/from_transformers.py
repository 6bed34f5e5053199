"""Checkpoints under the tensor names of the models that transformers builds from the checkpoints' folders."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.names.prefixes import unwrap
from regauge.core.symmetry import Symmetry

if TYPE_CHECKING:
    from regauge.checkpoints.names.conversion import Blank

CONFIG = "config.json"


def find_factory(folder: Path) -> Callable[[], Any]:
    """Return a factory of the model of a folder with config.json. A checkpoint in the folder helps to choose the class.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers does not know the configuration, or cannot build a model from it.
    """
    from regauge.checkpoints.names.transformers_models import choose_factory

    try:
        stored = _blanks(Checkpoint.open(folder))
    except (FileNotFoundError, ValueError):
        stored = None
    return choose_factory(folder, stored)


def name_by(checkpoint: Checkpoint, symmetry: Symmetry) -> Checkpoint:
    """Return a checkpoint under a symmetry's names, if the model has these names and the files have other names.

    If the files contain tensors that the symmetry does not have, the model determines which of these tensors belong to
    no class.
    """
    names = {place.parameter for group in symmetry.groups for place in group.placements}
    needed = names - {name for names in symmetry.tied for name in names}
    if not needed <= checkpoint.stored.keys():
        checkpoint = unwrap(checkpoint, needed)
    is_named = needed <= checkpoint.stored.keys()
    if is_named and checkpoint.stored.keys() <= symmetry.shapes.keys():
        return checkpoint
    try:
        module = module_of(checkpoint)
        named = checkpoint if module is None else name_for(checkpoint, module)
    except ValueError:
        if not is_named:
            raise
        return checkpoint
    return checkpoint if is_named and not needed <= named.stored.keys() else named


def module_of(checkpoint: Checkpoint) -> nn.Module | None:
    """Return the model of a checkpoint's folder, uninitialized.

    The result is None if the folder has no configuration or transformers is not installed.

    Raises:
        ValueError: transformers does not know the configuration, or cannot build a model from it.
    """
    folder = checkpoint.path.parent
    if not (folder / CONFIG).is_file():
        return None
    try:
        build = find_factory(folder)
    except ImportError:
        return None
    with torch.device("meta"):
        module: nn.Module = build()
    return module


def name_for(checkpoint: Checkpoint, module: nn.Module) -> Checkpoint:
    """Return a checkpoint under the tensor names of its module.

    If the module is not a transformers model, or the files already have the module's names, the checkpoint is returned
    unchanged.

    Raises:
        ValueError: The module's tensors are not just rearranged entries of the tensors in the files.
    """
    if not is_of_transformers(module):
        return checkpoint
    from regauge.checkpoints.names.converted import Converted
    from regauge.checkpoints.names.transformers_models import find_conversion

    if isinstance(checkpoint, Converted):
        return checkpoint
    try:
        conversion = find_conversion(_blanks(checkpoint), module)
    except ValueError as error:
        raise ValueError(f"{checkpoint.label!r} cannot be read as transformers reads it: {error}") from error
    if conversion.is_identity or (not conversion.renamed and not conversion.made):
        return checkpoint
    return Converted(checkpoint, conversion)


def expected_of(module: nn.Module, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    """Return the tensors of a module, except missing tensors that the module allows a checkpoint to lack."""
    state = module.state_dict()
    patterns = getattr(module, "_keys_to_ignore_on_load_missing", None) if is_of_transformers(module) else None
    spared = [n for n in state if n not in checkpoint.stored and any(re.search(p, n) for p in patterns or ())]
    return {name: tensor for name, tensor in state.items() if name not in spared}


def share(checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Replace tensors that no class of the model has by the first checkpoint's tensors; see `share_extra`."""
    if not any(one.unknown for one in checkpoints):
        return tuple(checkpoints)
    from regauge.checkpoints.names.extra import share_extra

    return share_extra(checkpoints)


def is_of_transformers(module: nn.Module) -> bool:
    """Return whether a module is a transformers model, without importing transformers."""
    return any(one.__module__ == "transformers.modeling_utils" for one in type(module).__mro__)


def _blanks(checkpoint: Checkpoint) -> "dict[str, Blank]":
    from regauge.checkpoints.names.conversion import Blank

    return {name: Blank(one.shape, one.dtype) for name, one in checkpoint.stored.items()}
