"""The limit on the memory that work may hold, and the memory that the process holds already."""

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
"""The setting of glibc's `mallopt`: blocks of that size have pages of their own, given back with them."""
LARGE, LARGEST = 1 << 22, 1 << 25
"""Such a size, and the largest to which glibc raises it by itself when blocks are freed."""


@dataclass(frozen=True)
class MemoryLimit:
    """The bytes that work may hold in addition to `base`, the memory of the interpreter and its libraries.

    Unless `base` is given, it is the memory that the process holds when work begins.
    """

    nbytes: int
    base: int | None = None

    @classmethod
    def of(cls, memory: "int | str | MemoryLimit | None") -> "MemoryLimit":
        """Return a limit from bytes, or from text such as "2GB"; half of the machine's memory if None.

        Processes that torchrun started on one machine share that half.
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
        """Return a copy of the limit that does not count what the process holds now; itself if its base is known."""
        return self if self.base is not None else MemoryLimit(self.nbytes, resident())

    def held(self) -> int:
        """Bytes of the limit that the process holds already, such as what tracing the model left behind."""
        if self.base is None:
            return 0
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        if trim is not None:
            trim(0)
        return max(0, resident() - self.base)


def read_size(size: str, what: str) -> int:
    """Return the number of bytes from text such as "2GB"; errors call the text `what`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", size.strip().lower())
    if found is None or found[2] not in UNITS:
        raise ValueError(f"the {what} {size!r} cannot be read; write for example 3GB or 500MB")
    return int(float(found[1]) * UNITS[found[2]])


@contextmanager
def large_blocks_returned() -> Iterator[None]:
    """Give large blocks of memory back to the system when they are freed, until the context ends.

    Otherwise, glibc keeps blocks below 32 MiB for later allocations, which rarely fit. In a measurement, a rule that
    needs ten copies of a tensor held 24. Other C libraries are not changed.
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if setting is None:
        yield
        return
    setting(MMAP_THRESHOLD, LARGE)
    try:
        yield
    finally:
        setting(MMAP_THRESHOLD, LARGEST)


def resident() -> int:
    """Bytes of memory that the process holds; where only its peak is known, the peak; zero where nothing is."""
    if PAGES.exists():
        return int(PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def size_text(nbytes: float) -> str:
    """Return a number of bytes as readable text."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"
