"""Arrays in files: numpy's `.npz`, and `.safetensors`."""

import tokenize
import warnings
import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.packed import require_modest
from regauge.checkpoints.plain_files import require_plain
from regauge.core.params import Params

SUFFIXES = (".npz", ".safetensors")
DAMAGE = (
    *(OSError, ValueError, TypeError, EOFError, KeyError, NotImplementedError, AttributeError),
    *(OverflowError, SyntaxError, MemoryError, RuntimeError, BadZipFile, zlib.error, tokenize.TokenError),
)
"""Errors of numpy for damaged files."""


def read_arrays(path: str | Path) -> Params:
    """Return the arrays in a file by name; nothing is unpickled.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, holds objects, or is compressed so strongly that it would fill the memory.
    """
    path = Path(path)
    if not path.is_file():
        require_plain(path)
        raise FileNotFoundError(f"there is no data file {str(path)!r}; check the path")
    if path.suffix == ".safetensors":
        return load(path)
    found = read_npz(path)
    try:
        return {name: torch.from_numpy(array) for name, array in found.items()}
    except TypeError as error:
        raise ValueError(f"{str(path)!r} cannot be read as arrays: {error}; write it with numpy.savez") from error


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays in an `.npz` file by name, as numpy has them; nothing is unpickled.

    Raises:
        ValueError: The file is damaged, holds objects, or is compressed so strongly that it would fill the memory.
    """
    try:
        with ZipFile(path) as archive:
            require_modest(archive.infolist(), path.stat().st_size, "write it with `numpy.savez`")
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return {name: np.asarray(arrays[name]) for name in arrays.files}
    except DAMAGE as error:
        raise ValueError(f"{str(path)!r} cannot be read as arrays: {error}; write it with numpy.savez") from error


def map_array(path: Path) -> NDArray[Any]:
    """Return the numbers of a `.npy` file, which are read on access; nothing is unpickled.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or holds values that are not real numbers.
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
