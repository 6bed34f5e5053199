"""Simultaneous searches for the best elements of several families of groups. The searches run on the CPU, while a
device computes the costs of the next families.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")
MOST_SEARCHES = 16
"""The largest number of searches that run at the same time. Each search stores its costs twice."""


class Launch(Protocol):
    """A function that starts work and returns a function that waits for the result."""

    def __call__(self, work: Callable[[], T], /) -> Callable[[], T]: ...


def count_searches() -> int:
    """Return the number of searches to run at the same time, which is one for each core."""
    return min(MOST_SEARCHES, os.cpu_count() or 1)


@contextmanager
def searching(count: int, device: torch.device) -> Iterator[Launch]:
    """Start work in up to `count` threads at a time.

    Solvers of assignment problems release Python's interpreter lock, so several threads can run at once. A thread takes
    over the device stream and the gradient mode from the thread that starts it, so operations on the device keep their
    order.
    """
    has_gradients = torch.is_grad_enabled()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run(work: Callable[[], T]) -> T:
        with torch.set_grad_enabled(has_gradients), torch.cuda.stream(stream):
            return work()

    with ThreadPoolExecutor(count) as pool:
        yield lambda work: pool.submit(run, work).result
