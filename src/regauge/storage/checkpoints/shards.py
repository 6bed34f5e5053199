"""Write a checkpoint piece by piece: one safetensors file, or shards with their index, never all of it in memory."""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from regauge.storage.architecture import TensorSpec
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.headers import DTYPES
from regauge.storage.checkpoints.writing import flush

INDEX = "model.safetensors.index.json"
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Pieces = Callable[[str], Iterator[Tensor]]
"""From the name of a tensor to its values in the dtype of the output, in pieces along axis 0."""


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint: its name, its tensors in their order, and the strings in its header."""

    file: str
    tensors: tuple[TensorSpec, ...]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Length of all values."""
        return sum(spec.nbytes for spec in self.tensors)


def layout(checkpoint: Checkpoint, file: str | None = None) -> list[Shard]:
    """The files of a checkpoint, to write another one of the same files, names, dtypes and order.

    Args:
        checkpoint: The checkpoint whose form is taken over.
        file: The name of a single file for all tensors, wide dtypes first so that values stay aligned; as many files as
            the checkpoint has unless given.
    """
    by_file: dict[Path, list[TensorSpec]] = {path: [] for path in checkpoint.metadata}
    for one in checkpoint.stored.values():
        by_file[one.file].append(TensorSpec(one.name, one.shape, one.dtype))
    if file is None and len(by_file) > 1:
        return [Shard(path.name, tuple(own), checkpoint.metadata[path]) for path, own in by_file.items()]
    every = sorted((spec for own in by_file.values() for spec in own), key=lambda spec: -spec.dtype.itemsize)
    return [Shard(file or "model.safetensors", tuple(every), checkpoint.header)]


def write_shard(shard: Shard, folder: Path, pieces: Pieces) -> tuple[int, int]:
    """Write one file; it appears under its name only when it is complete and on the disk.

    Returns:
        Its size and the CRC-32 of its bytes.

    Raises:
        ValueError: The pieces of a tensor are not what the layout says.
    """
    path, temporary = folder / shard.file, folder / f".{shard.file}.writing"
    size = crc = 0
    with temporary.open("wb", buffering=0) as stream:

        def put(data: bytes | memoryview) -> None:
            nonlocal size, crc
            view = memoryview(data)
            while view:
                view = view[stream.write(view) :]
            size, crc = size + len(data), zlib.crc32(data, crc)

        put(_header(shard))
        for spec in shard.tensors:
            written = 0
            for piece in pieces(spec.name):
                if piece.dtype != spec.dtype:
                    raise ValueError(
                        f"{spec.name!r} is {spec.dtype} in the layout, but {piece.dtype} was to be written"
                    )
                data = memoryview(piece.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
                if len(data):
                    put(data)
                written += len(data)
            if written != spec.nbytes:
                raise ValueError(f"{spec.name!r} has {spec.nbytes} bytes in the layout, but {written} were written")
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    flush(folder)
    return size, crc


def write_index(shards: Sequence[Shard], folder: Path, name: str = INDEX) -> None:
    """Write the index of a sharded checkpoint, as transformers reads it."""
    weight_map = {spec.name: shard.file for shard in shards for spec in shard.tensors}
    total = sum(shard.nbytes for shard in shards)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def crc_of(path: Path) -> int:
    """The CRC-32 of a file."""
    crc = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def _header(shard: Shard) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(shard.metadata) | {"format": "pt"}}
    start = 0
    for spec in shard.tensors:
        offsets = [start, start + spec.nbytes]
        header[spec.name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        start = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
