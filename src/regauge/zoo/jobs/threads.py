"""One thread for each worker."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class _Limit:
    """The settings before the limit, restored when the last block that shares it ends, in whatever thread."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.blocks = 0
        self.before: dict[str, str | None] = {}
        self.threads: int | None = None

    def enter(self) -> None:
        torch = sys.modules.get("torch")
        with self.lock:
            if not self.blocks:
                self.before = {name: os.environ.get(name) for name in VARIABLES}
                self.threads = None if torch is None else torch.get_num_threads()
                os.environ.update(dict.fromkeys(VARIABLES, "1"))
            self.blocks += 1
            if torch is not None:
                torch.set_num_threads(1)  # each thread has a number of its own

    def leave(self) -> None:
        with self.lock:
            self.blocks -= 1
            if self.blocks:
                return
            for name, value in self.before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            if self.threads is not None:
                sys.modules["torch"].set_num_threads(self.threads)


_LIMIT = _Limit()


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread within the block, and in what is imported or started there; several threads may be in one.

    Threads of one small network mostly wait for one another, and where other processes run they wait busily: two
    threads were 3 to 16 times slower than one. Processes for different networks need no such waiting.
    """
    _LIMIT.enter()
    try:
        yield
    finally:
        _LIMIT.leave()
