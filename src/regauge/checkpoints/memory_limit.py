"""The limit on the memory that work may use, and the memory that the process already uses."""

import ctypes
import gc
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
PAGES = Path("/proc/self/statm")
MMAP_THRESHOLD = -3
"""The `mallopt` parameter of glibc for the size of large blocks, whose pages are returned to the system when they are
freed."""
LARGE, LARGEST = 1 << 22, 1 << 25
"""The value to which `MMAP_THRESHOLD` is set, and the largest value to which glibc raises it when blocks are freed."""


@dataclass(frozen=True)
class MemoryLimit:
    """The number of bytes that work may use in addition to `base`, the memory of the interpreter and its libraries.

    By default, `base` is the memory that the process uses when the work begins.
    """

    nbytes: int
    base: int | None = None

    @classmethod
    def of(cls, memory: "int | str | MemoryLimit | None") -> "MemoryLimit":
        """Return a limit from a number of bytes or a string such as "2GB".

        If the argument is None, the limit is half of the machine's memory.

        If torchrun started several processes on one machine, they share half of the machine's memory.
        """
        if isinstance(memory, MemoryLimit):
            return memory
        if isinstance(memory, int):
            return cls(memory)
        if memory is None:
            if not hasattr(os, "sysconf"):
                raise ValueError("this system does not report how much memory it has; give the limit with `memory=`")
            sharing = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
            return cls(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (2 * sharing))
        return cls(read_size(memory, "memory"))

    def from_now(self) -> "MemoryLimit":
        """Return a copy whose `base` is the memory that the process uses now, or the limit itself if its `base` is
        known.
        """
        return self if self.base is not None else MemoryLimit(self.nbytes, resident())

    def held(self) -> int:
        """The number of bytes of the limit that the process already uses, for example after tracing a model."""
        if self.base is None:
            return 0
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        if trim is not None:
            trim(0)
        return max(0, resident() - self.base)


def read_size(size: str, what: str) -> int:
    """Return the number of bytes from a string such as "2GB"; `what` names the string in errors."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", size.strip().lower())
    if found is None or found[2] not in UNITS:
        raise ValueError(f"the {what} {size!r} cannot be read; write for example 3GB or 500MB")
    return int(float(found[1]) * UNITS[found[2]])


_RETURNING = [0]
"""The number of open contexts of `large_blocks_returned`."""


@contextmanager
def large_blocks_returned() -> Iterator[None]:
    """Return a context in which large freed memory blocks are returned to the system; contexts may be nested.

    By default, glibc keeps freed blocks below 32 MiB for later allocations, but later allocations rarely fit into freed
    blocks. In a measurement, a rule that needs ten copies of a tensor used the memory of 24 copies, and aligning two
    MLPs in files of 88 MB used 931 MB instead of 611 MB. Other C libraries are not affected.
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if setting is None:
        yield
        return
    _RETURNING[0] += 1
    setting(MMAP_THRESHOLD, LARGE)
    try:
        yield
    finally:
        _RETURNING[0] -= 1
        if not _RETURNING[0]:
            setting(MMAP_THRESHOLD, LARGEST)


def resident() -> int:
    """Return the memory of the process in bytes: the current memory, or else the peak; zero if both are unknown."""
    if PAGES.exists():
        return int(PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def size_text(nbytes: float) -> str:
    """Return a number of bytes as a readable string."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"
