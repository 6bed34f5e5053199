"""State dictionaries that are read from torch files and matched by name with a model or another checkpoint.

A training checkpoint contains state dictionaries as named entries, together with optimizer states and similar entries.

Torch files are pickles, which can run code when they are loaded. Therefore regauge always reads torch files with
`weights_only=True`.
"""

import logging
import os
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from regauge.checkpoints.formats.headers import OpenedFile
from regauge.checkpoints.formats.quantized import refusal
from regauge.core.counted import shorten
from regauge.core.params import VALUES, Params

SHARED = 1 << 26
"""The largest size in bytes of a tensor whose entries share memory."""
USUAL = ("state_dict", "model", "model_state_dict")
"""Names under which training scripts usually store the network."""
AVERAGED = re.compile(r"ema|averag|swa|shadow", re.IGNORECASE)
"""A pattern of the names of weight averages over a training run."""
SKIPPED = re.compile(r"optim|sched|scaler|rng|loops", re.IGNORECASE)
"""A pattern of the names of entries that only training uses."""
DEEPEST = 3
"""The nesting depth to which entries are searched."""
BETWEEN = "/"
"""The separator between the names of nested entries."""
LOG = logging.getLogger(__name__)


def read_torch_file(source: Path | BinaryIO, label: str, entry: str | None = None) -> Mapping[Any, Any]:
    """Return a torch file's state dictionary on the CPU; it may be an entry of a training checkpoint.

    If the file contains several networks, `entry` selects one. Without `entry`, the network under a usual name is read,
    and the log names the other networks. A ValueError is raised if the file is damaged, contains no dictionary, or has
    no entry of the given name. A ValueError is also raised if the file contains objects other than tensors and plain
    values.
    """
    damaged = (
        f"{label!r} is not a readable torch file; it is damaged, was not copied completely, or is from another "
        "program: fetch it again"
    )
    _require_stored(source, label)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old pickles and quantized tensors; both are refused in a sentence
            content = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Unsupported operand" in str(error):  # an unknown opcode: no pickle at all
            raise ValueError(damaged) from error
        raise ValueError(
            f"{label!r} contains pickled Python objects, not only tensors; loading them could run any code, so regauge "
            "refuses: save `module.state_dict()` instead, best as .safetensors"
        ) from error
    except MemoryError as error:
        raise ValueError(f"{label!r} claims more than the memory holds; {damaged}") from error
    except (
        RuntimeError, OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, AssertionError,
        OverflowError, ArithmeticError, NotImplementedError, struct.error, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        raise ValueError(damaged) from error
    if isinstance(content, Mapping):
        content, note = choose_network(content, entry, label)
        if note is not None:
            LOG.warning(note)
    if not isinstance(content, Mapping) or not content:
        raise ValueError(
            f"{label!r} holds a {type(content).__name__}, not a state dict (names to tensors); "
            "save `module.state_dict()`"
        )
    return content


def find_networks(content: Mapping[Any, Any]) -> dict[str, Mapping[Any, Any]]:
    """Return the entries of a training checkpoint that are networks, by name; empty for a plain state dictionary."""
    is_plain = any(isinstance(value, Tensor) and value.ndim for value in content.values())
    if is_plain and not any(isinstance(content.get(name), Mapping) for name in USUAL):
        return {}
    return _networks_in(content, "", DEEPEST)


def _networks_in(content: Mapping[Any, Any], inside: str, depth: int) -> dict[str, Mapping[Any, Any]]:
    found: dict[str, Mapping[Any, Any]] = {}
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, Mapping) or SKIPPED.search(key):
            continue
        is_named = (not inside and key in USUAL) or AVERAGED.search(key) is not None
        if _is_network(value) and (is_named or any("." in str(name) for name in value)):
            found[inside + key] = value
        elif depth > 1 and (is_named or inside or key == "callbacks"):
            found |= _networks_in(value, inside + key + BETWEEN, depth - 1)
    return found


def _is_network(value: Mapping[Any, Any]) -> bool:
    """Return whether a dictionary is not empty and maps names to tensors only."""
    return bool(value) and all(isinstance(k, str) and isinstance(one, Tensor) for k, one in value.items())


def choose_network(content: Mapping[Any, Any], entry: str | None, label: str) -> tuple[Any, str | None]:
    """Return the network in the named entry (by default, the usual entry), and a message if there are networks in other
    entries.

    Raises:
        ValueError: There is no entry of the given name. The error is also raised if no entry is given, and the file
            contains several networks, but none under a usual name.
    """
    found = find_networks(content)
    listed = ", ".join(map(repr, found))
    if entry is not None:
        if entry not in found:
            there = f"the networks in it are {listed}" if found else "it contains only one network, without a name"
            raise ValueError(f"{label!r} has no network called {entry!r}; {there}")
        return found[entry], None
    usual = next((name for name in USUAL if isinstance(content.get(name), Mapping)), None)
    plain = [name for name in found if not AVERAGED.search(name)]
    chosen = usual or (plain[0] if len(plain) == 1 else next(iter(found)) if len(found) == 1 else None)
    if chosen is None:
        if found:
            raise ValueError(
                f"{label!r} contains several networks ({listed}); choose one with FILE:NAME, such as "
                f"{label}:{next(iter(found))}, or in Python entry={next(iter(found))!r}"
            )
        return content, None
    others = [name for name in found if name != chosen]
    note = None
    if others:
        note = (
            f"{label!r} contains several networks: {chosen!r} is read, but not {', '.join(map(repr, others))}; to "
            f"choose another, write {label}:{others[0]}, or in Python entry={others[0]!r}"
        )
    return found.get(chosen) or content[chosen], note


def _require_stored(source: Path | BinaryIO, label: str) -> None:
    """Raise an error for compressed records: torch never writes them, and they may unpack to far more bytes."""
    try:
        with zipfile.ZipFile(source) as archive:
            packed = [one.filename for one in archive.infolist() if one.compress_type != zipfile.ZIP_STORED]
            size = sum(one.file_size for one in archive.infolist())
            length = source.stat().st_size if isinstance(source, Path) else source.seek(0, os.SEEK_END)
    except (zipfile.BadZipFile, ValueError, NotImplementedError):  # not a zip file: torch raises the error
        return
    finally:
        if not isinstance(source, Path):
            source.seek(0)
    if packed or size > length:
        what = f"the compressed record {packed[0]!r}" if packed else f"records of {size} bytes in {length}"
        raise ValueError(f"{label!r} holds {what}, which torch never writes; save `module.state_dict()` again")


def load_torch_file(path: Path, entry: str | None = None) -> Params:
    """Return the tensors in a torch file on the CPU; raise an error for entries that are not tensors."""
    content = read_torch_file(path, str(path), entry)
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    packed = next((name for name in others if name.endswith("._packed_params")), None)
    if packed is not None:
        raise ValueError(refusal(str(path), f"torch: it holds {packed!r}", "torch"))
    if others:
        raise ValueError(
            f"{str(path)!r} holds entries that are no tensors ({shorten(others)}); save only "
            "`module.state_dict()`, or put it under 'state_dict'"
        )
    return dense_tensors(content, str(path))


def dense_tensors(content: Mapping[Any, Tensor], label: str) -> Params:
    """Return the tensors of a torch file by name.

    Raises:
        ValueError: Two tensors have the same name. The error is also raised if a tensor does not store all its entries,
            because it is quantized, sparse, nested or expanded.
    """
    if len(set(map(str, content))) < len(content):
        raise ValueError(
            f"{label!r} contains two tensors with the same name, such as 1 and '1'; give every tensor a different name"
        )
    for name, tensor in content.items():
        if tensor.is_quantized:
            raise ValueError(refusal(label, f"torch: {name!r} is {tensor.dtype}", "torch"))
        if tensor.layout == torch.strided and tensor.nbytes > max(SHARED, tensor.untyped_storage().nbytes()):
            raise ValueError(
                f"{str(name)!r} in {label!r} expands {tensor.untyped_storage().nbytes()} bytes to {tensor.nbytes}; "
                "save it with `.clone()`"
            )
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
            kind = "on the meta device" if tensor.is_meta else "nested" if tensor.is_nested else f"{tensor.layout}"
            raise ValueError(f"{str(name)!r} in {label!r} is {kind}; save it as a dense tensor with its values")
    return {str(name): tensor.detach() for name, tensor in content.items()}


def open_torch_file(file: Path, entry: str | None) -> OpenedFile:
    """Read a torch file completely, or one of the networks in it."""
    return OpenedFile.of(file, load_torch_file(file, entry))


def match(params: Mapping[str, Tensor], expected: Mapping[str, Tensor], label: str, model: str = "the model") -> Params:
    """Return a checkpoint's parameters under exactly the names of a model's `state_dict()`.

    Tied parameters are often stored under only one of their names. The missing names of tied parameters are added.

    Args:
        params: The tensors of the checkpoint.
        expected: The `state_dict()` of the model, possibly on the meta device. For tied parameters, the checkpoint
            needs only one of the names.
        label: The name of the checkpoint in error messages.
        model: The name of the model in error messages.

    Returns:
        The parameters, in the model's order and with the checkpoint's dtypes.

    Raises:
        ValueError: Names are missing or unexpected, a shape differs, or a tensor contains integer codes instead of
            weights.
    """
    owners: dict[Any, str] = {}
    for name, tensor in expected.items():
        if name in params:
            owners.setdefault(memory_of(tensor), name)
    result, missing = {}, []
    for name, tensor in expected.items():
        owner = name if name in params else owners.get(memory_of(tensor))
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
        if tensor.is_floating_point() and result[name].dtype not in VALUES:
            raise ValueError(
                f"{name!r} is {result[name].dtype} in {label}, but only values in float16, bfloat16, float32 or "
                "float64 can be used; if it is quantized, dequantize the network first and save it in bfloat16"
            )
    return result


def has_names(params: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Return whether a checkpoint has exactly the tensors of a model's `state_dict()`; see `match`."""
    try:
        match(params, expected, "")
    except ValueError:
        return False
    return True


def memory_of(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors that share memory. On the meta device, the key is the storage object."""
    if tensor.is_meta:
        return ("meta", tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape))
    return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
