"""A checkpoint that stays on the disk: its header is read at once, its tensors one at a time, in pieces if need be.

Files are read with plain reads into a small buffer and never mapped, so that no page of them counts as this
process's memory.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regauge.storage.checkpoints.reading import locate, shards_of

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in safetensors headers."""
PIECE = 1 << 20
"""Bytes that are read at once; they stay in the cache until they are converted."""


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies.

    Attributes:
        name: Of the tensor.
        file: The file that holds it.
        dtype: Of its values.
        shape: Of the tensor.
        start: First byte in the file.
        nbytes: Length in bytes.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass
class Reading:
    """What was read so far, and how long that took (copying out of the page cache, without conversions)."""

    nbytes: int = 0
    seconds: float = 0.0


@dataclass
class LazyCheckpoint:
    """A safetensors checkpoint, sharded or not, whose values are read when they are asked for.

    Attributes:
        path: The file or index that was opened.
        entries: Where every tensor lies, by name.
        metadata: The strings in the header of each file.
        read_so_far: What was read.
    """

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[Path, Mapping[str, str]]
    read_so_far: Reading = field(default_factory=Reading)
    _descriptors: dict[Path, int] = field(default_factory=dict)
    _buffer: bytearray = field(default_factory=lambda: bytearray(PIECE))

    @classmethod
    def open(cls, path: str | Path) -> "LazyCheckpoint":
        """Read and check the headers of all files.

        Args:
            path: `.safetensors`, the `.index.json` of a sharded checkpoint, or a folder with one of them.

        Raises:
            FileNotFoundError: The file, or a shard that its index names, is not there.
            ValueError: A file is damaged or not complete, the index names what is not there, or the checkpoint is
                of another format.
        """
        path = locate(path)
        if path.name.endswith(".safetensors.index.json"):
            weight_map = shards_of(path)
            files = [path.parent / shard for shard in dict.fromkeys(weight_map.values())]
        elif path.suffix == ".safetensors":
            weight_map, files = None, [path]
        else:
            raise ValueError(
                f"{str(path)!r} cannot be read piece by piece; convert it to .safetensors, or give more --memory"
            )
        found: dict[str, Entry] = {}
        metadata = {}
        for file in files:
            entries, metadata[file] = read_header(file)
            for entry in entries:
                if weight_map is None or weight_map.get(entry.name) == file.name:
                    found[entry.name] = entry
        absent = [name for name in weight_map or () if name not in found]
        if weight_map is not None and absent:
            raise ValueError(
                f"{str(path)!r} says that {absent[0]!r} is in {weight_map[absent[0]]!r}, but it is not; index and "
                "shards are of different checkpoints"
            )
        return cls(path, found, metadata)

    def __enter__(self) -> "LazyCheckpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    @property
    def nbytes(self) -> int:
        """Length of all values."""
        return sum(entry.nbytes for entry in self.entries.values())

    def on_meta(self) -> dict[str, Tensor]:
        """Every tensor without values, on the meta device: names, shapes and dtypes."""
        return {name: torch.empty(e.shape, dtype=e.dtype, device="meta") for name, e in self.entries.items()}

    def read(self, name: str, *, rows: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, or a range of its first axis.

        Args:
            name: Of the tensor.
            rows: First index and end on axis 0; all unless given.
            dtype: Converts the values, piece by piece; that of the file unless given.

        Raises:
            ValueError: The file has become shorter since it was opened.
        """
        entry = self.entries[name]
        shape, start, nbytes = entry.shape, entry.start, entry.nbytes
        if rows is not None:
            first, end = rows
            row = nbytes // shape[0] if shape[0] else 0
            shape, start, nbytes = (end - first, *shape[1:]), start + first * row, (end - first) * row
        result = torch.empty(shape, dtype=dtype or entry.dtype)
        flat, size = result.view(-1), entry.dtype.itemsize
        done = 0
        while done < nbytes:
            length = min(PIECE, nbytes - done)
            self._fill(entry, start + done, length)
            piece = torch.frombuffer(self._buffer, dtype=entry.dtype, count=length // size)
            flat[done // size : (done + length) // size] = piece
            done += length
        return result

    def _fill(self, entry: Entry, start: int, length: int) -> None:
        before = time.perf_counter()
        if entry.file not in self._descriptors:
            self._descriptors[entry.file] = os.open(entry.file, os.O_RDONLY)
        view, done = memoryview(self._buffer)[:length], 0
        while done < length:
            count = os.preadv(self._descriptors[entry.file], [view[done:]], start + done)
            if count == 0:
                raise ValueError(
                    f"{str(entry.file)!r} ended inside {entry.name!r}: it was cut while it was read; fetch it again"
                )
            done += count
        self.read_so_far.nbytes += length
        self.read_so_far.seconds += time.perf_counter() - before


def read_header(file: Path) -> tuple[list[Entry], dict[str, str]]:
    """Where every tensor of a safetensors file lies, in the order of the file, and its metadata.

    Raises:
        ValueError: The file is damaged or not complete, or holds a dtype that torch lacks.
    """
    try:
        with safe_open(file, framework="pt"):  # The library checks offsets and the length of the file.
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
    except SafetensorError as error:
        raise ValueError(
            f"{str(file)!r} is not a readable safetensors file ({error}); it is damaged or was not copied "
            "completely: fetch it again"
        ) from error
    metadata = header.pop("__metadata__", {})
    entries = []
    for name, what in header.items():
        if what["dtype"] not in DTYPES:
            raise ValueError(
                f"{name!r} of {str(file)!r} has dtype {what['dtype']}; only {', '.join(DTYPES)} can be read"
            )
        first, end = what["data_offsets"]
        entries.append(Entry(name, file, DTYPES[what["dtype"]], tuple(what["shape"]), 8 + length + first, end - first))
    return sorted(entries, key=lambda entry: entry.start), metadata
