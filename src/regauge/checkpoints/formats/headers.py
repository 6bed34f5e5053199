"""Descriptions of tensors without their data, and headers of safetensors files, which locate tensors and strings."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from regauge.checkpoints.formats.file_formats import METADATA
from regauge.core.params import Params
from regauge.core.typed_json import parse_json

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in headers."""
PACKED = ("F4", "F6_E2M3", "F6_E3M2")
"""Names of dtypes in which several entries share a byte."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PROVENANCE = "regauge"
"""The header string that records how a file was made. The record of a file is not copied to files that are made from
it."""
SHARDING = "DCP_SHARDING_INFO"
"""The header string of `torch.distributed.checkpoint` for the offsets of a file's chunks in the network's tensors."""
LARGEST_HEADER = 100_000_000
"""The largest size of a header in bytes, which is also the limit of safetensors."""
BUFFER = 16384
"""The number of bytes that are read at once; most headers are shorter."""


class TensorSpec(NamedTuple):
    """A description of one tensor of a network: its key in the state dictionary, its shape and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Return the number of entries of a tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return self.size * self.dtype.itemsize


def layout_of(params: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Return the names, shapes and dtypes of the tensors of one network, in order."""
    return tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in params.items())


class StoredPart(NamedTuple):
    """A chunk of a tensor in a file: first byte, offsets in the tensor, sizes, and strides (None for C order)."""

    file: Path
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None


class StoredTensor(NamedTuple):
    """A tensor in a file. `start` is the first byte of the data, or None if the file is read as a whole.

    A tensor may consist of chunks in several files. If a file contains nested dictionaries, `inside` names the
    dictionaries that contain the tensor, from the outermost to the innermost.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int | None
    nbytes: int
    parts: tuple[StoredPart, ...] = ()
    inside: tuple[str, ...] = ()

    @property
    def is_parted(self) -> bool:
        """Whether the tensor consists of chunks that several processes wrote."""
        return bool(self.parts) or self.file.name == METADATA


class OpenedFile(NamedTuple):
    """An opened file: the tensors by name, the strings in the header, and the tensors that have already been read.

    The field `files` lists additional files that contain tensors of the checkpoint.
    """

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    params: Params | None = None
    files: tuple[Path, ...] = ()

    @classmethod
    def of(cls, file: Path, params: Params, metadata: Mapping[str, str] | None = None) -> "OpenedFile":
        """Return an opened file that was read completely."""
        stored = {n: StoredTensor(n, file, t.dtype, tuple(t.shape), None, t.nbytes) for n, t in params.items()}
        return cls(stored, metadata or {}, params)


class Header(NamedTuple):
    """The header of a file: the tensors in file order, and the byte at which the first tensor begins."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    start: int
    size: int


def read_header(file: Path) -> Header:
    """Read the header of a safetensors file without memory-mapping the file.

    A malformed header raises a ValueError without the name of the file, which the caller adds.
    """
    with open(file, "rb", buffering=BUFFER) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        start = 8 + length
        if not 2 <= length <= min(LARGEST_HEADER, size - 8):
            raise ValueError("its header is cut off")
        text = stream.read(length)
    try:
        header = parse_json(text)
    except ValueError as error:
        raise ValueError(f"its header is malformed: {error}") from error
    try:
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata are not all strings")
        tensors, end = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["dtype"] in PACKED:
                raise ValueError(f"{name!r} is {entry['dtype']}, so the network is quantized: dequantize it first")
            if entry["dtype"] not in DTYPES:
                raise ValueError(
                    f"{name!r} has dtype {entry['dtype']}, and only {', '.join(DTYPES)} can be read: convert it"
                )
            dtype, shape, begin = DTYPES[entry["dtype"]], tuple(entry["shape"]), end
            if not all(type(length) is int and 0 <= length < 1 << 63 for length in shape):
                raise ValueError(f"{name!r} has shape {list(shape)}, but lengths must be whole numbers from 0 to 2^63")
            if math.prod(max(1, length) for length in shape) * dtype.itemsize >= 1 << 63:
                raise ValueError(f"{name!r} has shape {list(shape)}, which is too large for a tensor")
            end += dtype.itemsize * math.prod(shape)
            if entry["data_offsets"] != [begin, end]:
                raise ValueError(f"the place of {name!r} does not fit its shape")
            tensors[name] = StoredTensor(name, file, dtype, shape, start + begin, end - begin)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is malformed: {type(error).__name__} {error}") from error
    if start + end != size:
        raise ValueError(f"it has {size} bytes instead of {start + end}")
    return Header(tensors, metadata, start, size)


def open_safetensors(file: Path, entry: str | None) -> OpenedFile:
    """Open a safetensors file by reading only the header. A safetensors file has no entries to choose from."""
    assert entry is None
    try:
        header = read_header(file)
    except ValueError as error:
        raise ValueError(
            f"{str(file)!r} is not a readable safetensors file ({error}); it is damaged, was not copied completely, or "
            "is of a newer format: fetch it again, or convert it"
        ) from error
    return OpenedFile(header.tensors, header.metadata)


def encode_header(tensors: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file of consecutive tensors, preceded by the header's length."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for spec in tensors:
        if spec.dtype not in NAMES:
            raise ValueError(f"{spec.name!r} is {spec.dtype}, which safetensors files cannot hold; convert it")
        offsets = [start, start + spec.nbytes]
        header[spec.name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        start = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
