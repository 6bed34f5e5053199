"""Arrays in files: `.npz` as numpy writes it, and `.safetensors`."""

import zlib
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch

from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.memory_limit import size_text
from regauge.checkpoints.plain_files import require_plain
from regauge.core.params import Params

SUFFIXES = (".npz", ".safetensors")
RATIO, SPARE = 100, 1 << 28
"""How many bytes one byte of a compressed file may become; and the bytes that every file may become."""


def read_arrays(path: str | Path) -> Params:
    """The arrays in a file by name; nothing is unpickled.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, holds objects, or is packed so tightly that it would fill the memory.
    """
    path = Path(path)
    if not path.is_file():
        require_plain(path)
        raise FileNotFoundError(f"there is no data file {str(path)!r}")
    if path.suffix == ".safetensors":
        return load(path)
    try:
        with ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > max(SPARE, RATIO * path.stat().st_size):
            raise ValueError(
                f"its {size_text(path.stat().st_size)} would become {size_text(unpacked)}; write it with `numpy.savez`"
            )
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(np.asarray(arrays[name])) for name in arrays.files}
    except (
        *(OSError, ValueError, TypeError, EOFError, KeyError, NotImplementedError),
        *(OverflowError, SyntaxError, MemoryError, RuntimeError, BadZipFile, zlib.error),
    ) as error:
        raise ValueError(f"{str(path)!r} cannot be read as arrays: {error}") from error
