"""Writers of `torch.distributed.checkpoint` folders: `.metadata`, and files of chunks, one whole tensor per chunk.

Any number of processes can load such a folder, because torch splits the tensors again.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from regauge.checkpoints.formats.distributed import STORAGES, FileRange, row_major
from regauge.checkpoints.formats.headers import TensorSpec
from regauge.checkpoints.writing import Pieces, Shard, encode_values

ALIGNED = 64
"""Alignment in bytes of tensor data in a torch file."""
EARLY = (1980, 1, 1, 0, 0, 0)
"""The modification time of all records. The time is constant, because equal runs must write equal bytes."""


def encode_chunks(shard: Shard, pieces: Pieces) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file of chunks, which is a sequence of torch files, one for each tensor."""
    for spec in shard.tensors:
        sink: Any = _Sink()
        with zipfile.ZipFile(sink, "w") as archive:
            for name, text in (("data.pkl", _describe(spec)), ("byteorder", b"little"), ("version", b"3\n")):
                archive.writestr(zipfile.ZipInfo(f"archive/{name}", EARLY), text)
            yield from sink.take()
            record = zipfile.ZipInfo("archive/data/0", EARLY)
            record.file_size = spec.nbytes
            is_long = spec.nbytes >= zipfile.ZIP64_LIMIT // 2
            head = 30 + len(record.filename) + 4 + 20 * is_long
            padding = -(sink.count + head) % ALIGNED
            record.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            with archive.open(record, "w", force_zip64=is_long) as stream:
                yield from sink.take()
                for part in encode_values(spec, pieces):
                    stream.write(part)
                    yield from sink.take()
        yield from sink.take()


class _Sink:
    """A file object that collects the bytes of an archive. `take` returns and clears the collected bytes."""

    def __init__(self) -> None:
        self._parts: list[Any] = []
        self.count = 0

    def write(self, part: Any) -> int:
        self._parts.append(part)
        self.count += len(part)
        return len(part)

    def flush(self) -> None:
        """Do nothing, because no bytes are buffered elsewhere."""

    def take(self) -> list[Any]:
        """Return the bytes written since the last call."""
        parts, self._parts = self._parts, []
        return parts


class _Values:
    """A reference to the storage of a tensor in a torch file."""

    def __init__(self, spec: TensorSpec) -> None:
        own = STORAGES.get(spec.dtype)
        kind = torch.UntypedStorage if own is None else getattr(torch, own)
        self.identity = "storage", kind, "0", "cpu", spec.nbytes if own is None else spec.size


class _Described:
    """A description of a tensor that is pickled in the same way as torch pickles tensors."""

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        spec = self._spec
        hooks: OrderedDict[str, Any] = OrderedDict()
        args = _Values(spec), 0, spec.shape, row_major(spec.shape), False, hooks
        if spec.dtype in STORAGES:
            return torch._utils._rebuild_tensor_v2, args
        return torch._utils._rebuild_tensor_v3, (*args, spec.dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.identity if isinstance(obj, _Values) else None


def _describe(spec: TensorSpec) -> bytes:
    """Return the pickle in the torch file of a tensor."""
    content = io.BytesIO()
    _Pickler(content, protocol=2).dump(_Described(spec))
    return content.getvalue()


def encode_metadata(shards: Sequence[Shard], folder: Path, inside: Mapping[str, Sequence[str]]) -> bytes:
    """Return the content of `.metadata` for the files of chunks in a folder.

    Args:
        shards: The files with their tensors, in order.
        folder: The folder that holds the files.
        inside: For each tensor in nested dictionaries, the names of these dictionaries.
    """
    from torch.distributed.checkpoint import metadata as known
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensors: dict[str, known.TensorStorageMetadata | known.BytesStorageMetadata] = {}
    places, paths = {}, {}
    for shard in shards:
        for spec, (start, length) in zip(shard.tensors, _find_archives(folder / shard.file), strict=True):
            path = (*inside.get(spec.name, ()), spec.name)
            key, origin, shape = ".".join(path), torch.Size([0] * len(spec.shape)), torch.Size(spec.shape)
            chunk = known.ChunkStorageMetadata(origin, shape)
            tensors[key] = known.TensorStorageMetadata(known.TensorProperties(spec.dtype), shape, [chunk])
            places[known.MetadataIndex(key, origin, 0)] = _StorageInfo(shard.file, start, length)
            paths[key] = path
    return pickle.dumps(known.Metadata(tensors, paths, places), protocol=4)


def _find_archives(file: Path) -> list[tuple[int, int]]:
    """Return the first byte and the length of every torch file in a file of chunks.

    The search runs backwards, because the directory of records is at the end of each torch file.
    """
    found: list[tuple[int, int]] = []
    end = file.stat().st_size
    with file.open("rb") as stream:
        while end > 0:
            with zipfile.ZipFile(FileRange(stream, 0, end)) as archive:
                start = min(record.header_offset for record in archive.infolist())
            found.append((start, end - start))
            end = start
    return found[::-1]
