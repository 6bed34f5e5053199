"""Folders of `torch.distributed.checkpoint`, into which each of many processes wrote one or more files of chunks.

The file `.metadata` lists the location of every chunk. A `.distcp` file is a sequence of torch files, one for each
chunk. `.metadata` and the torch files contain pickles. A pickle is a program; regauge reads the pickles as plain
records, and runs none of their code.
"""

import logging
import math
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regauge.checkpoints.formats.file_formats import METADATA
from regauge.checkpoints.formats.headers import DTYPES, OpenedFile, StoredPart, StoredTensor
from regauge.checkpoints.formats.plain_pickles import MEMBER, Name, Record, read_pickle
from regauge.checkpoints.formats.shards import require_whole
from regauge.checkpoints.formats.state_dicts import SKIPPED, choose_network
from regauge.core.counted import shorten

NAMED_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
STRIDED = "torch.strided"
_DCP, _SHARDS = "torch.distributed.checkpoint", "torch.distributed._shard.sharded_tensor.metadata"
IN_METADATA = frozenset(
    [
        MEMBER,
        *NAMED_DTYPES,
        *(f"{_DCP}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
        *(f"{_DCP}.metadata.{name}StorageMetadata" for name in ("Tensor", "Chunk", "Bytes")),
        *(f"{place}.TensorProperties" for place in (f"{_DCP}.metadata", _SHARDS)),
        *(f"{place}.{name}" for place in (f"{_DCP}.metadata", _SHARDS) for name in ("_MEM_FORMAT_ENCODING",)),
        *(f"{_SHARDS}.MEM_FORMAT_ENCODING",),
        *(f"{_DCP}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
        *(f"pathlib{inner}.{name}" for inner in ("", "._local") for name in ("PosixPath", "WindowsPath")),
        *("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict"),
    ]
)
"""Names that may occur in `.metadata` files of torch 2.0 and later."""
UNTYPED = "torch.storage.UntypedStorage"
STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.complex64: "ComplexFloatStorage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}
"""The storage classes that stand for dtypes in torch files. Other dtypes have their own names."""
IN_CHUNK = frozenset(
    [
        *NAMED_DTYPES,
        *(f"torch.{name}" for name in STORAGES.values()),
        *(UNTYPED, "collections.OrderedDict"),
        *("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"),
    ]
)
"""Names that may occur in the torch file of a chunk."""
DAMAGES = (
    *(ValueError, OSError, EOFError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError),
    *(struct.error, zipfile.BadZipFile),
)
"""Errors that are raised when a damaged torch file is read."""
LOG = logging.getLogger(__name__)


def open_metadata(file: Path, entry: str | None) -> OpenedFile:
    """Open a folder of `torch.distributed.checkpoint`. From a full training state, read only the network.

    Raises:
        FileNotFoundError: A file that the metadata names is missing.
        ValueError: The folder is damaged or incomplete, contains no network, or has no entry of the given name.
    """
    label = str(file.parent)
    if file.name != METADATA:
        raise ValueError(f"{str(file)!r} is a part of a distributed checkpoint; name its folder, {label!r}")
    try:
        content, places = _read_metadata(file)
        network, note = choose_network(content, entry, label)
        specs = dict(_tensors_in(network))
    except ValueError as error:
        raise ValueError(
            f"{label!r} is not a readable distributed checkpoint ({error}); it is damaged, was not copied completely, "
            "or is from another program: fetch it again, or save it again with torch.distributed.checkpoint"
        ) from error
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ValueError(
            f"{label!r} is not a readable distributed checkpoint ({METADATA} is malformed: {type(error).__name__}); "
            "fetch it again"
        ) from error
    if note is not None:
        LOG.warning(note)
    if not specs:
        raise ValueError(f"{label!r} holds no tensors; it is no checkpoint of a network: give the folder of one")
    names = [name for tensor in specs.values() for name, _, _, _ in places[id(tensor)].chunks]
    _require_there(file, names)
    with _Chunks(file.parent) as chunks:
        found = {name: chunks.place(name, tensor, places[id(tensor)]) for name, tensor in specs.items()}
    return OpenedFile(found, {}, files=tuple(file.parent / name for name in dict.fromkeys(sorted(names))))


class _ChunkPlaces:
    """The chunks of a tensor (file, first byte, length, offsets, sizes), and the dictionaries that hold the tensor."""

    def __init__(self, inside: tuple[str, ...]) -> None:
        self.inside = inside
        self.chunks: list[tuple[str, int, int, tuple[tuple[int, ...], tuple[int, ...]]]] = []


def _read_metadata(file: Path) -> tuple[dict[str, Any], dict[int, _ChunkPlaces]]:
    """Return the saved state, with tensors on the meta device, and the locations of each tensor's chunks.

    The keys of the locations are the `id` values of the tensors.
    """
    try:
        root = read_pickle(file.read_bytes(), IN_METADATA)
    except ValueError as error:
        raise ValueError(f"{METADATA}: {error}") from error
    stored: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in root.state["storage_data"].items():
        if index.state.get("offset") is not None:
            stored[index.state["fqn"], _size(index.state["offset"])] = info.state
    paths = root.state.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    content: dict[str, Any] = {}
    places = {}
    for key, about in root.state["state_dict_metadata"].items():
        if "size" not in about.state:  # bytes of another object
            continue
        tensor = _on_meta(key, about)
        path = paths.get(key) or (key,)
        if not isinstance(key, str) or not all(isinstance(part, str | int) for part in path):
            raise ValueError("it has an entry without a name")
        path = [str(part) for part in path]
        inner = content
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        if path[-1] in inner:
            raise ValueError(f"it has two entries {key!r}")
        inner[path[-1]] = tensor
        place = places[id(tensor)] = _ChunkPlaces(tuple(path[:-1]))
        for chunk in about.state["chunks"]:
            offsets, sizes = _size(chunk.state["offsets"]), _size(chunk.state["sizes"])
            if (key, offsets) not in stored:
                raise ValueError(f"it does not say where the chunk of {key!r} at {list(offsets)} is")
            info = stored[key, offsets]
            if info.get("transform_descriptors"):
                raise ValueError(f"{key!r} is compressed, but only plain values are read")
            name, start, length = info["relative_path"], info["offset"], info["length"]
            if not (isinstance(name, str) and name.isprintable() and Path(name).name == name):
                raise ValueError(f"the place of {key!r} is outside of the folder")
            if not (type(start) is type(length) is int and start >= 0 and length >= 0):
                raise ValueError(f"the place of {key!r} is outside of {name!r}")
            place.chunks.append((name, start, length, (offsets, sizes)))
        require_whole(key, tuple(tensor.shape), [where for _, _, _, where in place.chunks])
    return content, places


def _on_meta(key: str, about: Record) -> Tensor:
    properties = about.state["properties"]
    dtype, layout = properties.values[:2]
    shape = _size(about.state["size"])
    if isinstance(layout, Record) and layout.args != (STRIDED,):
        raise ValueError(f"{key!r} is a sparse tensor, but only dense tensors are supported")
    if not isinstance(dtype, Name) or dtype.path not in NAMED_DTYPES:
        raise ValueError(f"{key!r} has no dtype")
    if math.prod(max(1, length) for length in shape) * NAMED_DTYPES[dtype.path].itemsize >= 1 << 63:
        raise ValueError(f"{key!r} has shape {list(shape)}, which is too large for a tensor")
    return torch.empty(shape, dtype=NAMED_DTYPES[dtype.path], device="meta")


def _size(value: Any) -> tuple[int, ...]:
    """Return the lengths in a `torch.Size`."""
    return _lengths(value.args[0] if value.args else ())


def _lengths(value: Any) -> tuple[int, ...]:
    # A deeply nested tuple could not be shown in an error.
    if not isinstance(value, tuple) or not all(type(length) is int and 0 <= length < 1 << 63 for length in value):
        raise ValueError("it has a size that is no whole number")
    return value


def _tensors_in(network: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the network's tensors by name, without entries that are used only in training, such as optimizer states.

    Raises:
        ValueError: The network contains a dictionary with further floating-point tensors that are not scalars, or a
            tensor has a dtype that is not read.
    """
    for name, value in network.items():
        if isinstance(value, Tensor):
            if str(value.dtype) not in {str(dtype) for dtype in DTYPES.values()}:
                raise ValueError(f"{name!r} is {value.dtype}, which is not read")
            yield name, value
        elif SKIPPED.search(name) is None and any(one.ndim and one.is_floating_point() for one in _leaves(value)):
            raise ValueError(f"{name!r} is a dictionary with tensors next to those of a network")


def _leaves(value: Mapping[str, Any]) -> Iterator[Tensor]:
    waiting: list[Any] = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            yield one
        else:
            waiting.extend(one.values())


def _require_there(file: Path, names: Iterable[str]) -> None:
    every = sorted(set(names))
    absent = [name for name in every if not (file.parent / name).is_file()]
    if absent:
        raise FileNotFoundError(
            f"{str(file)!r} names files that are not there: {shorten(absent)} ({len(absent)} of {len(every)}); put "
            "them next to it"
        )


class FileRange(RawIOBase):
    """A range of the bytes of an open file that can be read like a file."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length, self._place = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        place = offset + (0, self._place, self._length)[whence]
        if place < 0:
            raise OSError("a place before the beginning")
        self._place = place
        return place

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._place)
        self._file.seek(self._start + self._place)
        content: bytes = self._file.read(left if size is None or size < 0 else min(size, left))
        self._place += len(content)
        return content


class _Chunks:
    """A reader of the chunks in the files of a folder. The reader opens one file at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name, self._size = "", 0
        self._file: Any = None

    def __enter__(self) -> "_Chunks":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def place(self, name: str, tensor: Tensor, place: _ChunkPlaces) -> StoredTensor:
        """Return the locations of a tensor's chunks in the files."""
        shape, dtype, parts = tuple(tensor.shape), tensor.dtype, []
        for file, start, length, (offsets, sizes) in place.chunks:
            if math.prod(sizes) == 0:
                continue
            try:
                parts.append(self._find(file, start, length, offsets, sizes, dtype))
            except DAMAGES as error:
                raise ValueError(
                    f"{str(self._folder / file)!r} does not hold the chunk of {name!r} at byte {start} ({error}); it "
                    "is damaged or was not copied completely: fetch it again"
                ) from error
        first = self._folder / place.chunks[0][0] if place.chunks else self._folder / METADATA
        return StoredTensor(name, first, dtype, shape, 0, tensor.nbytes, tuple(parts), place.inside)

    def _find(
        self, name: str, start: int, length: int, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
    ) -> StoredPart:
        path = self._folder / name
        if name != self._name:
            self.__exit__()
            self._name, self._file, self._size = name, path.open("rb"), path.stat().st_size
        if start + length > self._size:
            raise ValueError(f"the file ends at byte {self._size}, before {start + length}")
        with zipfile.ZipFile(FileRange(self._file, start, length)) as archive:
            records = {one.filename.partition("/")[2]: one for one in archive.infolist()}
            packed = [one.filename for one in records.values() if one.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise ValueError(f"{packed[0]!r} is compressed")
            if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
                raise ValueError("its byte order is that of another machine")
            strides, skipped = _read_chunk(archive.read(records["data.pkl"]), sizes, dtype, records)
            values = records["data/0"]
            with archive.open(values) as stream:  # which checks the local header
                first = start + values.header_offset + _local_length(archive, values)
                assert stream is not None
        if first + values.file_size > start + length:
            raise ValueError("its values exceed it")
        is_plain = strides == row_major(sizes)
        return StoredPart(path, first + skipped, offsets, sizes, None if is_plain else strides)


def _local_length(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> int:
    """Return the length of the local zip header that precedes the data of a record."""
    assert archive.fp is not None
    archive.fp.seek(record.header_offset)
    header = archive.fp.read(30)
    return 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def _read_chunk(
    content: bytes, sizes: tuple[int, ...], dtype: torch.dtype, records: Mapping[str, zipfile.ZipInfo]
) -> tuple[tuple[int, ...], int]:
    """Return the strides of a chunk in a torch file, and the number of bytes before the chunk's first value."""
    tensor = read_pickle(content, IN_CHUNK)
    storage, skipped, *sizes_and_strides = tensor.args[:4]
    shape, strides = map(_lengths, sizes_and_strides)
    kind, name, key, _, count = storage.args
    width = 1 if name.path == UNTYPED else dtype.itemsize
    if kind != "storage" or key != "0" or count * width != records["data/0"].file_size:
        raise ValueError("its values are elsewhere, or of another dtype")
    if shape != sizes:
        raise ValueError(f"its shape is {list(shape)}, not {list(sizes)}")
    ordered = sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1)
    dense = 1
    for stride, size in ordered:
        if stride != dense:
            raise ValueError(f"its strides are {list(strides)}")
        dense *= size
    if type(skipped) is not int or skipped < 0 or (skipped + dense) * dtype.itemsize > records["data/0"].file_size:
        raise ValueError("its values exceed it")
    return strides, skipped * dtype.itemsize


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
