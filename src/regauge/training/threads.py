"""A limit to one torch thread, for training many small networks in parallel."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Environment variables that set the number of threads of new processes."""


KEPT_BYTES = 31 * 2**20
"""The size in bytes of a block whose release makes glibc keep freed memory. The size is just below glibc's limit of 32
MiB."""


def keep_freed_memory() -> None:
    """Make glibc keep up to 62 MiB of freed memory. By default, every training step would return the memory to the
    system and request it again.

    If a separately mapped block is freed, glibc raises two thresholds to the block's size and to twice that size
    (mallopt(3), M_MMAP_THRESHOLD). Nothing is written to the block, so the block uses no memory. With other allocators,
    the call has no effect.
    """
    torch.empty(KEPT_BYTES, dtype=torch.uint8)


class _Limit:
    """The thread settings from before the limit.

    The settings of threads are restored when the last `with` block that uses the limit ends, in any thread.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blocks, self.threads = 0, 1
        self.before: dict[str, str] = {}


_LIMIT = _Limit()


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread within a `with` block, also for new processes. Several threads may enter the block.

    For a small network, threads mostly wait for one another, and take processor time from other processes. In
    measurements with other processes, training with two threads took 3 to 16 times as long as with one thread.
    Processes that train different networks do not wait for one another.
    """
    with _LIMIT.lock:
        if not _LIMIT.blocks:
            _LIMIT.before = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
            _LIMIT.threads = torch.get_num_threads()
            os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
        _LIMIT.blocks += 1
        torch.set_num_threads(1)  # the number is per thread
    try:
        yield
    finally:
        with _LIMIT.lock:
            _LIMIT.blocks -= 1
            if not _LIMIT.blocks:
                for name in THREAD_VARIABLES:
                    os.environ.pop(name, None)
                os.environ.update(_LIMIT.before)
                torch.set_num_threads(_LIMIT.threads)
