"""Read a checkpoint: safetensors, sharded safetensors, a folder in Hugging Face style, or a torch file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from regauge.core.params import Params
from regauge.storage.checkpoints.torch_files import TORCH_SUFFIXES, read_torch_file

FOLDER_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
"""What a folder is searched for, in this order."""


def load(path: str | Path) -> Params:
    """Read all parameters and buffers of a checkpoint, on the CPU, with the dtypes of the file.

    Args:
        path: `.safetensors`; `.index.json` of a sharded checkpoint; `.pt`, `.pth` or `.bin` with a state dict, or
            with a dictionary that holds one under "state_dict" or "model"; or a folder with such a file.

    Returns:
        Parameters and buffers by name.

    Raises:
        FileNotFoundError: The file, or a shard that its index names, is not there.
        ValueError: The file is none of these, is damaged, or holds something else than tensors.
    """
    path = locate(path)
    if path.name.endswith(".index.json"):
        return _load_sharded(path)
    if path.suffix == ".safetensors":
        return _load_safetensors(path)
    if path.suffix in TORCH_SUFFIXES:
        return _load_torch(path)
    raise ValueError(
        f"{str(path)!r} ends in {path.suffix!r}, but a checkpoint is .safetensors, .index.json (sharded), "
        ".pt, .pth, .bin or a folder that holds one of them; convert it, or rename it if only the name is wrong"
    )


def match(params: Mapping[str, Tensor], expected: Mapping[str, Tensor], label: str) -> Params:
    """The parameters of a checkpoint under exactly the names of a model's `state_dict()`.

    Tied parameters are often stored once; they are filled in under their other names.

    Args:
        params: What the checkpoint holds.
        expected: The `state_dict()` of the model, possibly on the meta device (where only one of tied names
            needs to be in the checkpoint as well).
        label: What the error calls the checkpoint.

    Returns:
        The parameters in the model's order. Dtypes stay those of the checkpoint.

    Raises:
        ValueError: Names are missing or unexpected, or a shape differs.
    """
    owners: dict[Any, str] = {}
    for name, tensor in expected.items():
        if name in params:
            owners.setdefault(_storage(tensor), name)
    result, missing = {}, []
    for name, tensor in expected.items():
        owner = name if name in params else owners.get(_storage(tensor))
        if owner is None:
            missing.append(name)
        else:
            result[name] = params[owner]
    unexpected = [name for name in params if name not in expected]
    if missing or unexpected:
        parts = []
        if missing:
            parts.append(f"{label} lacks {_shortened(missing)}, which the model has")
        if unexpected:
            parts.append(f"{label} has {_shortened(unexpected)}, which the model lacks")
        raise ValueError(f"{'; '.join(parts)}; give the checkpoint and the model of the same architecture")
    for name, tensor in expected.items():
        if result[name].shape != tensor.shape:
            raise ValueError(
                f"{name!r} has shape {tuple(result[name].shape)} in {label}, but {tuple(tensor.shape)} in the model; "
                "give the checkpoint and the model of the same architecture"
            )
    return result


def locate(path: str | Path) -> Path:
    """The file that holds a checkpoint, or the index of its shards: in a folder, what `load` would read.

    Raises:
        FileNotFoundError: There is none.
        ValueError: A folder holds several.
    """
    path = Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {str(path)!r}; check the path")
    return path


def _in_folder(folder: Path) -> Path:
    for name in FOLDER_FILES:
        if (folder / name).exists():
            return folder / name
    found = sorted(folder.glob("*.safetensors.index.json")) or sorted(folder.glob("*.safetensors"))
    found = [file for file in found if not file.name.endswith(".alignment.safetensors")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"the folder {str(folder)!r} holds several checkpoints ({_shortened([f.name for f in found])}); name one"
        )
    raise FileNotFoundError(
        f"the folder {str(folder)!r} holds no checkpoint ({', '.join(FOLDER_FILES)} or one other .safetensors file)"
    )


def _load_safetensors(path: Path) -> Params:
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise ValueError(
            f"{str(path)!r} is not a readable safetensors file ({error}); it is damaged or was not copied "
            "completely: fetch it again"
        ) from error


def shards_of(index: Path) -> dict[str, str]:
    """The file that holds each parameter, by the index of a sharded checkpoint.

    Raises:
        FileNotFoundError: A shard is not there.
        ValueError: It is no index, or it names files outside its own folder.
    """
    try:
        files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = list(dict.fromkeys(files.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(index)!r} is not the index of a sharded checkpoint: it lacks a 'weight_map' from parameter names "
            "to files"
        ) from error
    strange = [shard for shard in shards if not isinstance(shard, str) or Path(shard).name != shard]
    if strange:
        raise ValueError(
            f"{str(index)!r} names shards outside its own folder ({_shortened(strange)}); they are not read"
        )
    absent = [shard for shard in shards if not (index.parent / shard).exists()]
    if absent:
        raise FileNotFoundError(
            f"{str(index)!r} names shards that are not there: {_shortened(absent)} "
            f"({len(absent)} of {len(shards)}); put them beside it"
        )
    return files


def _load_sharded(index: Path) -> Params:
    files = shards_of(index)
    params: Params = {}
    for shard in dict.fromkeys(files.values()):
        there = load(index.parent / shard)
        for name in (name for name, file in files.items() if file == shard):
            if name not in there:
                raise ValueError(
                    f"{str(index)!r} says that {name!r} is in {shard!r}, but it is not; index and shards are of "
                    "different checkpoints"
                )
            params[name] = there[name]
    return params


def _load_torch(path: Path) -> Params:
    content = read_torch_file(path, str(path))
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(
            f"{str(path)!r} holds entries that are no tensors ({_shortened(others)}); save only "
            "`module.state_dict()`, or put it under 'state_dict'"
        )
    return {str(name): tensor.detach() for name, tensor in content.items()}


def _storage(tensor: Tensor) -> Any:
    """Equal for tensors that share their memory (on the meta device, for the same tensor object only)."""
    if tensor.is_meta:
        return ("meta", tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape))
    return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape))


def _shortened(names: list[str], limit: int = 4) -> str:
    listed = ", ".join(repr(name) for name in names[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"
