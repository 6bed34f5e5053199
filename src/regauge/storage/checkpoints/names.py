"""Names of tensors: those of a checkpoint and those of a model, or of another checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from regauge.core.params import Params


def match(params: Mapping[str, Tensor], expected: Mapping[str, Tensor], label: str, model: str = "the model") -> Params:
    """The parameters of a checkpoint under exactly the names of a model's `state_dict()`.

    Tied parameters are often stored once; they are filled in under their other names.

    Args:
        params: What the checkpoint holds.
        expected: The `state_dict()` of the model, possibly on the meta device (where only one of tied names
            needs to be in the checkpoint as well).
        label: What the error calls the checkpoint.
        model: What it calls the model.

    Returns:
        The parameters in the model's order. Dtypes stay those of the checkpoint.

    Raises:
        ValueError: Names are missing or unexpected, or a shape differs.
    """
    owners: dict[Any, str] = {}
    for name, tensor in expected.items():
        if name in params:
            owners.setdefault(_memory_of(tensor), name)
    result, missing = {}, []
    for name, tensor in expected.items():
        owner = name if name in params else owners.get(_memory_of(tensor))
        if owner is None:
            missing.append(name)
        else:
            result[name] = params[owner]
    unexpected = [name for name in params if name not in expected]
    if missing or unexpected:
        parts = [f"{label} lacks {shorten(missing)}, which {model} has"] if missing else []
        parts += [f"{label} has {shorten(unexpected)}, which {model} lacks"] if unexpected else []
        raise ValueError(f"{'; '.join(parts)}; give the checkpoint and {model} of the same architecture")
    for name, tensor in expected.items():
        if result[name].shape != tensor.shape:
            raise ValueError(
                f"{name!r} has shape {tuple(result[name].shape)} in {label}, but {tuple(tensor.shape)} in {model}; "
                f"give the checkpoint and {model} of the same architecture"
            )
    return result


def shorten(names: Sequence[str], limit: int = 4) -> str:
    """Some names for a sentence."""
    listed = ", ".join(repr(name) for name in names[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"


def _memory_of(tensor: Tensor) -> Any:
    """Equal for tensors that share their memory (on the meta device, for the same tensor object only)."""
    if tensor.is_meta:
        return ("meta", tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape))
    return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
