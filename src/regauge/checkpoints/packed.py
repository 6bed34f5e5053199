"""Compressed files whose content may be far larger than they are: what they claim is compared with their size first."""

import gzip
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from regauge.checkpoints.memory_limit import size_text

RATIO, SPARE = 100, 1 << 28
"""Bytes that one byte of a compressed file may become, and bytes that every file may become."""
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Methods by which members of a zip file may be packed: one step of other methods can fill the memory."""


def most_bytes(packed: int) -> int:
    """Return the largest number of bytes that a file of this size may become."""
    return max(SPARE, RATIO * packed)


def require_modest(members: Sequence[zipfile.ZipInfo], packed: int, remedy: str) -> None:
    """Raise a ValueError, as a clause, where members of a zip file would become far more bytes than they have."""
    unpacked = sum(member.file_size for member in members)
    if unpacked > most_bytes(packed):
        raise ValueError(f"its {size_text(packed)} would become {size_text(unpacked)}; {remedy}")
    if any(member.compress_type not in METHODS for member in members):
        raise ValueError(f"it is packed by another method than deflate; {remedy}")


def read_gzip(path: Path) -> bytes:
    """Return the content of a gzip file.

    Raises:
        ValueError: It is damaged, or would become far larger than it is.
    """
    most = most_bytes(path.stat().st_size)
    try:
        with gzip.open(path) as file:
            content = file.read(most + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}); fetch it again") from error
    if len(content) > most:
        raise ValueError(f"{str(path)!r} would become more than {size_text(most)}; unpack it, and look at it first")
    return content
