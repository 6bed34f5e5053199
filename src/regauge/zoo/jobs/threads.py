"""One thread for each worker."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread within the block, and in what is imported or started there.

    Threads of one small network mostly wait for one another, and where other processes run they wait busily: two
    threads were 3 to 16 times slower than one. Processes for different networks need no such waiting.
    """
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(dict.fromkeys(VARIABLES, "1"))
    torch = sys.modules.get("torch")
    threads = 0 if torch is None else torch.get_num_threads()
    if torch is not None:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if torch is not None:
            torch.set_num_threads(threads)
