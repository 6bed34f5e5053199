"""Writers of files that appear completely or not at all. Checkpoints are written as safetensors, chunk by chunk."""

import json
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from regauge.checkpoints.disk import PARTIAL, full_disks_told, held, remove_leftovers, require_space
from regauge.checkpoints.formats.file_formats import is_single_file, weight_suffixes, writer_of
from regauge.checkpoints.formats.headers import TensorSpec, encode_header, layout_of
from regauge.checkpoints.plain_files import require_expanded, require_suffix
from regauge.core.arguments import check_arguments
from regauge.core.params import round_to

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"

Pieces = Callable[[str], Iterator[Tensor]]
"""A function from a tensor's name to the tensor in chunks along axis 0, each rounded once to the output's dtype."""


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint: the file name, the tensors in order, and the header's strings.

    If names in the file differ from names in the module, `translate` converts chunks of module tensors to chunks of
    file tensors.
    """

    file: str
    tensors: tuple[TensorSpec, ...]
    metadata: Mapping[str, str]
    translate: Callable[[Pieces], Pieces] | None = None

    @property
    def nbytes(self) -> int:
        """The total size of all tensors in bytes."""
        return sum(spec.nbytes for spec in self.tensors)


def path_beside(checkpoint: Path, ending: str) -> Path:
    """Return the path of a companion file next to a checkpoint.

    For `out.safetensors`, the file name is `out` plus the ending. For a folder, the file in the folder is named
    `regauge` plus the ending.
    """
    if is_single_file(checkpoint):
        return checkpoint.with_name(checkpoint.stem + ending)
    return checkpoint / f"regauge{ending}"


@contextmanager
def whole_file(path: str | Path, *, is_new: bool = False, nbytes: int | None = None) -> Iterator[Path]:
    """Yield a temporary name for a new file. The file gets its final name when the block ends without an error.

    The file is on the disk before it gets the final name.

    No other writer, on this machine or another machine, uses the same temporary name. If a file of the final name
    exists at the end, it is replaced. With `is_new`, the existing file is kept and a FileExistsError is raised. If the
    disk is full, the OSError states this. If `nbytes` is given, the error also states the required size.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}{PARTIAL}")
    try:
        with full_disks_told(path, nbytes), held(temporary):
            yield temporary
            flush(temporary)
            if is_new:
                _link(temporary, path)
            else:
                os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def _link(temporary: Path, path: Path) -> None:
    """Give a file its final name unless another file has this name."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise FileExistsError(
            f"{str(path)!r} was written by another process in the meantime, and is kept; choose another name"
        ) from None
    except OSError:  # a file system without hard links, on which two writers at the same instant are not detected
        if path.exists():
            raise FileExistsError(
                f"{str(path)!r} was written by another process in the meantime, and is kept; choose another name"
            ) from None
        os.replace(temporary, path)


@check_arguments
def save(
    params: Mapping[str, Tensor],
    path: str | Path,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write parameters to a safetensors file. `load(save(params, path))` has the same bits, shapes and dtypes.

    The file appears at its path only when it is complete and on the disk. Tensors that share memory (tied parameters,
    views) are written in full under every name.

    Args:
        params: Parameters and buffers by name.
        path: A path in an existing folder. The path ends in `.safetensors`, or in the suffix of another format that can
            be written.
        overwrite: Whether an existing file of this name may be replaced.
        metadata: Strings to store in the file's header.

    Returns:
        The path.

    Raises:
        FileExistsError: The file exists and `overwrite` is false.
        FileNotFoundError: The folder of `path` does not exist.
        OSError: The disk is full.
        ValueError: The path has another suffix, or a tensor has no data (meta device).
    """
    path = Path(path)
    require_writable(path, overwrite=overwrite)
    require_space(path, sum(tensor.nbytes for tensor in params.values()))
    for name, tensor in params.items():
        if tensor.is_meta:
            raise ValueError(f"{name!r} is on the meta device and has no values to write; materialize the model first")
    specs = sorted(layout_of(params), key=lambda spec: -spec.dtype.itemsize)  # values stay aligned
    shard = Shard(path.name, tuple(specs), metadata or {})
    with whole_file(path, nbytes=shard.nbytes) as temporary, open(temporary, "wb") as file:
        file.writelines(writer_of(path.name)(shard, lambda name: iter([params[name].detach()])))
    return path


def write_shard(shard: Shard, folder: Path, pieces: Pieces) -> tuple[int, int]:
    """Write one file completely or not at all; return the size and the CRC-32 of its bytes."""
    crc, translated = 0, pieces if shard.translate is None else shard.translate(pieces)
    with whole_file(folder / shard.file, nbytes=shard.nbytes) as temporary, open(temporary, "wb") as file:
        for part in writer_of(shard.file)(shard, translated):
            file.write(part)
            crc = zlib.crc32(part, crc)
        return file.tell(), crc


def encode_safetensors(shard: Shard, pieces: Pieces) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file in chunks: first the header, then the tensors."""
    yield encode_header(shard.tensors, {**shard.metadata, "format": "pt"})
    for spec in shard.tensors:
        yield from encode_values(spec, pieces)


def encode_values(spec: TensorSpec, pieces: Pieces) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in chunks, rounded to the tensor's dtype."""
    count = 0
    for piece in pieces(spec.name):
        if piece.dtype != spec.dtype and not (piece.is_floating_point() and spec.dtype.is_floating_point):
            raise ValueError(f"{spec.name!r} is {spec.dtype} in the layout, but the written values are {piece.dtype}")
        piece = round_to(piece, spec.dtype, spec.name)
        count += piece.nbytes
        yield bytes_of(piece)
    if count != spec.nbytes:
        raise ValueError(f"{spec.name!r} has {spec.nbytes} bytes in the layout, but {count} were written")


def write_index(
    shards: Sequence[Shard], folder: Path, name: str = INDEX, metadata: Mapping[str, object] | None = None
) -> None:
    """Write the index of a sharded checkpoint in transformers' format, with additional entries in the metadata."""
    weight_map = {spec.name: shard.file for shard in shards for spec in shard.tensors}
    total = sum(shard.nbytes for shard in shards)
    document = {"metadata": {**(metadata or {}), "total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in C order. A CPU tensor already in C order shares its memory with the result."""
    return memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def save_text(text: str, path: str | Path, *, is_new: bool = False) -> Path:
    """Write a text file completely or not at all; see `whole_file`."""
    with whole_file(path, is_new=is_new) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def save_bytes(content: bytes, path: str | Path) -> Path:
    """Write a file completely or not at all; see `whole_file`."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def require_folder(path: Path) -> None:
    """Raise an error, before any work is done, unless files can be created in the folder of an output.

    Raises:
        FileNotFoundError: The folder does not exist.
        PermissionError: The folder is read-only.
        ValueError: The path begins with ~.
    """
    require_expanded(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} of the output does not exist; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(
            f"nothing can be written to the folder {str(path.parent)!r} of the output; choose another one, or change "
            "its permissions"
        )


def require_writable(path: str | Path, *, overwrite: bool, suffixes: tuple[str, ...] | None = None) -> None:
    """Raise an error, before any work is done, unless a file of a given name can be written.

    By default, the name must end in the suffix of a weight file. Temporary files of killed runs for this name are
    removed.
    """
    path = Path(path)
    require_suffix(path, weight_suffixes(is_written=True) if suffixes is None else suffixes)
    require_folder(path)
    if path.is_dir():
        raise FileExistsError(f"the output {str(path)!r} is a folder, but a file is written; choose another name")
    if path.exists() and not overwrite:
        raise FileExistsError(f"the output {str(path)!r} exists already; choose another name, or give `overwrite=True`")
    remove_leftovers(path)


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows does not open folders.
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
