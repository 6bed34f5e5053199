"""The disk of an output: its free space, and the temporary files of killed runs."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from regauge.checkpoints.memory_limit import size_text

try:
    import fcntl
except ImportError:  # Windows, where files that are open cannot be removed
    fcntl = None  # type: ignore[assignment]

PARTIAL = ".partial"
"""The suffix of the names of incomplete files."""
TEMPORARY = re.compile(rf"\.(?P<name>.+)\.[0-9a-f]{{12}}{re.escape(PARTIAL)}", re.DOTALL)
"""A pattern of the temporary names of files that are not yet complete."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FullDiskError(OSError):
    """An error about a disk without enough space for an output, or about an exhausted quota.

    Args:
        path: The path of the output.
        nbytes: The number of bytes that the output still needs, if it is known.
        remedy: The advice in the error.
    """

    def __init__(self, path: Path, nbytes: int | None, remedy: str = "free space, or write elsewhere") -> None:
        needed = "" if nbytes is None else f", which needs {size_text(nbytes)}"
        free = shutil.disk_usage(path.parent).free
        # If enough space is free, a quota, or files that were removed again, took the space.
        is_short = nbytes is None or free < nbytes
        told = f" ({size_text(free)} are free)" if is_short else ""
        super().__init__(f"the disk is too full to write {str(path)!r}{needed}{told}; {remedy}")


def require_space(path: Path, nbytes: int) -> None:
    """Raise an error unless the disk has space for an output of a given size."""
    if shutil.disk_usage(path.parent).free < nbytes:
        raise FullDiskError(path, nbytes)


@contextmanager
def full_disks_told(path: Path, nbytes: int | None = None) -> Iterator[None]:
    """Return a context that converts errors about a full disk or quota to an error with the output's name and
    advice.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise FullDiskError(path, nbytes) from error


@contextmanager
def held(temporary: Path) -> Iterator[None]:
    """Create a new file that `remove_leftovers` does not delete before the `with` block or this process ends."""
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    try:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files of killed runs next to a file, which have names as in `TEMPORARY`.

    Files that a running process is writing, files with other names, and links are not removed.
    """
    for leftover in path.parent.iterdir():
        found = TEMPORARY.fullmatch(leftover.name)
        if found is None or found["name"] != path.name or not leftover.is_file() or leftover.is_symlink():
            continue
        with suppress(OSError):
            if fcntl is None:
                leftover.unlink()
                continue
            descriptor = os.open(leftover, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()
            finally:
                os.close(descriptor)
