"""A reader of arrays in `.npz` and `.safetensors` files. The reader refuses compressed files that would fill the
memory.
"""

import gzip
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.location import is_address
from regauge.checkpoints.memory_limit import size_text
from regauge.checkpoints.plain_files import require_plain
from regauge.core.params import Params

SUFFIXES = (".npz", ".safetensors")
DAMAGE = (
    *(OSError, ValueError, TypeError, EOFError, KeyError, NotImplementedError, AttributeError),
    *(OverflowError, SyntaxError, MemoryError, RuntimeError, BadZipFile, zlib.error, tokenize.TokenError),
)
"""Errors that numpy raises for damaged files."""
RATIO, SPARE = 100, 1 << 28
"""A file may unpack to `RATIO` bytes for each byte of the compressed file, or to `SPARE` bytes if this is more."""
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Accepted compression methods of the files in a zip archive. With other methods, one decompression step can fill the
memory."""


def read_arrays(path: str | Path) -> Params:
    """Return the arrays in a file by name. No pickle is loaded.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, contains objects, or would fill the memory when it is unpacked.
    """
    path = Path(path)
    if not path.is_file():
        require_plain(path)
        hint = (
            "it is an address, and regauge fetches nothing: download it" if is_address(str(path)) else "check the path"
        )
        raise FileNotFoundError(f"there is no data file {str(path)!r}; {hint}")
    if path.suffix == ".safetensors":
        return load(path)
    found = read_npz(path)
    try:
        return {name: torch.from_numpy(array) for name, array in found.items()}
    except TypeError as error:
        raise ValueError(f"{str(path)!r} cannot be read as arrays: {error}; write it with numpy.savez") from error


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays in an `.npz` file by name, as numpy arrays. No pickle is loaded.

    Raises:
        ValueError: The file is damaged, contains objects, or would fill the memory when it is unpacked.
    """
    try:
        with ZipFile(path) as archive:
            require_modest(archive.infolist(), path.stat().st_size, "unpack it, and look at it first")
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return {name: np.asarray(arrays[name]) for name in arrays.files}
    except DAMAGE as error:
        raise ValueError(f"{str(path)!r} cannot be read as arrays: {error}; write it with numpy.savez") from error


def map_array(path: Path) -> NDArray[Any]:
    """Return the array in a `.npy` file as a memory map, whose entries are read on access. No pickle is loaded.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or holds entries that are not real numbers.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}; check the path")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers of old versions
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "biuf":
            raise ValueError("it holds no array of numbers")
    except DAMAGE as error:
        raise ValueError(f"{str(path)!r} cannot be read as an array: {error}; write it with numpy.save") from error
    return found


def most_bytes(packed: int) -> int:
    """Return the largest number of bytes to which a file of a given size may unpack."""
    return max(SPARE, RATIO * packed)


def require_modest(members: Sequence[zipfile.ZipInfo], packed: int, remedy: str) -> None:
    """Raise a ValueError if a zip file would unpack to far more bytes than its own size. The caller adds the file's
    name.
    """
    unpacked = sum(member.file_size for member in members)
    if unpacked > most_bytes(packed):
        raise ValueError(f"its {size_text(packed)} would unpack to {size_text(unpacked)}; {remedy}")
    if any(member.compress_type not in METHODS for member in members):
        raise ValueError(f"it is not packed by deflate; {remedy}")


def read_gzip(path: Path) -> bytes:
    """Return the content of a gzip file.

    Raises:
        ValueError: The file is damaged, or would unpack to far more bytes than the file has.
    """
    most = most_bytes(path.stat().st_size)
    try:
        with gzip.open(path) as file:
            content = file.read(most + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}); fetch it again") from error
    if len(content) > most:
        raise ValueError(f"{str(path)!r} would unpack to more than {size_text(most)}; unpack it, and look at it first")
    return content
