"""One shard: a safetensors file with the weights and the rows of some networks, written once.

The layout of the file is specified in docs/store.md. Its header is read here directly, without mapping the file, so
that opening thousands of shards takes little; any other program reads a shard as the safetensors file that it is.
"""

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regauge.storage.checkpoints.writing import SUFFIX, whole_file
from regauge.storage.store.columns import Array, Column, describe, narrow
from regauge.storage.store.packing import Segment

FORMAT = "regauge.shard"
VERSION = 1
FOLDER = "shards"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=-]*")
"""Names that shards can have."""
LARGEST_HEADER = 100_000_000
"""Bytes; the limit of safetensors itself."""
BLANK = "0" * 64
"""The text in the place of the checksum while it is computed."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Extent(NamedTuple):
    """The place of a tensor in its file: dtype, shape, and position of the first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Shard:
    """The header of a shard.

    Attributes:
        path: Its file.
        count: Number of networks.
        columns: Kind and constant value or distinct values of each column, by name.
        places: Places of its tensors by name.
        checksum: The checksum of the whole file.
        start: Position of the first byte behind the header.
        size: Bytes of the whole file.
    """

    path: Path
    count: int
    columns: Mapping[str, Any]
    places: Mapping[str, Extent]
    checksum: str
    start: int
    size: int


def path_of(folder: Path, name: str) -> Path:
    """The file of the shard of that name in the store of a folder, whether or not it is there.

    Raises:
        ValueError: The name is not usable in a file's name.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"a shard cannot be named {name!r}; use letters, digits, '-', '_', '=' and '.'")
    return folder / FOLDER / f"{name}{SUFFIX}"


def list_shards(folder: Path) -> list[Path]:
    """The files of the shards in the store of a folder, in the order of their names."""
    with os.scandir(folder / FOLDER) as entries:
        names = sorted(e.name for e in entries if e.name.endswith(SUFFIX) and not e.name.startswith("."))
    return [folder / FOLDER / name for name in names]


def write(path: Path, weights: Mapping[str, Tensor], columns: Mapping[str, Column], count: int) -> Path:
    """Write a shard, whole or not at all: temporary name, flush to the disk, final name.

    Args:
        path: Its final name.
        weights: Rows of values by the names of their tensors, `[networks, values]`.
        columns: The known values of the networks, by name.
        count: Number of networks.

    Raises:
        FileExistsError: Another writer has written a shard of that name; it stays, because shards never change.
    """
    tensors = dict(weights)
    described = {name: describe(column) for name, column in columns.items()}
    for name, column in columns.items():
        if "value" not in described[name]:
            tensors[f"rows/{name}"] = torch.from_numpy(column.values)
            if column.null is not None:
                tensors[f"null/{name}"] = torch.from_numpy(column.null)
    header: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "version": str(VERSION),
            "checksum": BLANK,
            "rows": str(count),
            "columns": json.dumps(described),
        }
    }
    start = 0
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # every tensor is aligned
    for name, tensor in ordered:
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    first = struct.pack("<Q", len(text)) + text
    pieces = [_bytes(tensor).data for _, tensor in ordered]
    digest = hashlib.sha256(first)
    for piece in pieces:
        digest.update(piece)
    first = first.replace(BLANK.encode(), digest.hexdigest().encode(), 1)
    with whole_file(path, is_new=True) as temporary, open(temporary, "wb", buffering=0) as file:
        for piece in (memoryview(first), *pieces):
            while piece:
                piece = piece[file.write(piece) :]
    return path


def read_header(path: Path) -> Shard:
    """Read the header of a shard.

    Raises:
        ValueError: The file is no shard, is cut off, or is of another version.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(16384)
        (length,) = struct.unpack("<Q", first[:8]) if len(first) >= 8 else (0,)
        if not 2 <= length <= min(LARGEST_HEADER, size - 8):
            raise ValueError(damage_message(path, "its header is cut off"))
        text = first[8 : 8 + length]
        while len(text) < length:
            more = file.read(length - len(text))
            if not more:
                raise ValueError(damage_message(path, "its header is cut off"))
            text += more
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__")
        if metadata["format"] != FORMAT:
            raise ValueError(f"its format is {metadata['format']!r}, not {FORMAT!r}")
        if metadata["version"] != str(VERSION):
            raise ValueError(f"it is of version {metadata['version']}, but this regauge reads version {VERSION}")
        places, end = {}, 0
        for name, entry in header.items():
            place = Extent(DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            wanted = place.dtype.itemsize * int(np.prod(place.shape, dtype=np.int64))
            if entry["data_offsets"] != [end, end + wanted]:
                raise ValueError(f"the place of {name!r} does not fit its shape")
            places[name], end = place, end + wanted
        if 8 + length + end != size:
            raise ValueError(f"it has {size} bytes instead of {8 + length + end}")
        count = int(metadata["rows"])
        if any(place.shape[:1] != (count,) for place in places.values()):
            raise ValueError(f"a tensor has not {count} rows")
        columns = json.loads(metadata["columns"])
        return Shard(path, count, columns, places, metadata["checksum"], 8 + length, size)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = str(error) if type(error) is ValueError else f"its header is malformed: {type(error).__name__} {error}"
        raise ValueError(damage_message(path, reason)) from error


def require_segments(shard: Shard, segments: Iterable[Segment]) -> None:
    """Refuse a shard of another store.

    Raises:
        ValueError: Its networks have other values than these.
    """
    for segment in segments:
        place = shard.places.get(segment.name)
        if place is None or (place.dtype, place.shape) != (segment.dtype, (shard.count, segment.size)):
            raise ValueError(
                f"the shard {str(shard.path)!r} has no {segment.name} of shape {(shard.count, segment.size)}, so it "
                "is of another store; move it away"
            )


def check(path: Path) -> Shard:
    """Read a whole shard and compare its checksum.

    Raises:
        ValueError: It is damaged.
    """
    shard = read_header(path)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        header = file.read(8)
        header += file.read(struct.unpack("<Q", header)[0])
        digest.update(header.replace(shard.checksum.encode(), BLANK.encode(), 1))
        while piece := file.read(1 << 22):
            digest.update(piece)
    if digest.hexdigest() != shard.checksum:
        raise ValueError(damage_message(path, "its checksum does not agree with its bytes"))
    return shard


def read_column(shard: Shard, content: Array, name: str) -> Column | None:
    """One column of a shard from the bytes of its file, or None if no network in it has that column."""
    described = shard.columns.get(name)
    if described is None:
        return None
    distinct = tuple(described.get("distinct", ()))
    if "value" in described:
        return Column(described["kind"], narrow(np.array([described["value"]])), None, distinct)

    def values(place: Extent) -> Array:
        dtype = str(place.dtype).removeprefix("torch.")
        return np.frombuffer(content, dtype, math.prod(place.shape), place.start).copy()

    null = shard.places.get(f"null/{name}")
    return Column(
        described["kind"], values(shard.places[f"rows/{name}"]), None if null is None else values(null), distinct
    )


def _bytes(tensor: Tensor) -> Array:
    """The bytes of a contiguous tensor, shared with it."""
    flat: Array = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


def damage_message(path: Path, reason: str) -> str:
    """The sentence about a file that cannot be read as a shard."""
    return (
        f"{str(path)!r} cannot be read as a shard: {reason}; `regauge zoo verify` lists all such files, and without "
        "them the store is whole"
    )
