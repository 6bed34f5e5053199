"""Executors of jobs: local processes, or a Dask cluster. Each worker has one thread."""

import logging
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from typing import Any

from regauge.training.threads import THREAD_VARIABLES, one_thread

MakeExecutor = Callable[[], AbstractContextManager[Executor]]
"""A function that opens an executor. After a pool breaks, the function is called again and opens a new executor."""
RETRIES = 3
"""The number of times that Dask repeats a job that failed or whose worker died."""

PATIENCE = 10
"""The number of seconds in which a Dask scheduler must answer."""


def processes(count: int) -> MakeExecutor:
    """Return a function that opens a pool of local processes, each with one thread.

    The processes are spawned and not forked, because the thread pools of torch do not survive a fork.

    Raises:
        ValueError: The number of processes is less than one.
    """
    if count < 1:
        raise ValueError(f"the number of processes is {count}, but must be at least 1")
    context = multiprocessing.get_context("spawn")
    return partial(ProcessPoolExecutor, count, context, _begin)


def executor_of(on: str) -> MakeExecutor | None:
    """Return the executor for a name: here (None), processes, processes:4, dask, dask:4 or tcp://HOST:PORT.

    Raises:
        ValueError: The string does not name an executor.
    """
    if on == "here":
        return None
    if re.match(r"(tcp|tls|ucx|ws|wss)://", on):
        return dask(on)
    kind, colon, text = on.partition(":")
    if kind not in ("processes", "dask") or (colon and not re.fullmatch(r"[1-9]\d*", text)):
        raise ValueError(
            f"`on={on}` is not a place for training; choose here, processes, processes:4, dask, dask:4 or "
            "tcp://HOST:PORT"
        )
    count = int(text) if colon else os.cpu_count() or 1
    return processes(count) if kind == "processes" else dask(workers=count)


def dask(address: str | None = None, *, workers: int | None = None) -> MakeExecutor:
    """Return a function that connects to the workers of a Dask cluster.

    Args:
        address: The address of the scheduler, such as "tcp://10.0.0.1:8786". By default, a cluster of local processes
            is started. The store's folder must have the same path on all machines of the cluster.
        workers: The number of local processes; by default one per processor.

    Raises:
        ConnectionError: No scheduler answers at the given address.
        ImportError: Dask is not installed.
    """
    if find_spec("distributed") is None:
        raise ImportError("Dask is not installed: pip install 'regauge[dask]'")
    if address is not None:
        _connect(address).close()
    return partial(_dask, address, workers)


@contextmanager
def _dask(address: Any, workers: int | None) -> Iterator[Executor]:
    distributed: Any = import_module("distributed")  # it has no types
    with ExitStack() as stack:
        if address is None:
            stack.enter_context(one_thread())
            address = stack.enter_context(
                distributed.LocalCluster(
                    n_workers=workers or os.cpu_count(),
                    threads_per_worker=1,
                    processes=True,
                    dashboard_address=None,
                    silence_logs=logging.CRITICAL,  # closing it interrupts heartbeats; failed jobs are told anyway
                )
            )
        client = stack.enter_context(_connect(address))
        executor = client.get_executor(retries=RETRIES)
        # The driver has waited for all jobs; waiting here would gather results that a dead worker took with it.
        stack.callback(executor.shutdown, wait=False)
        yield executor


def _connect(address: Any) -> Any:
    """Return a client of a scheduler, or of a new cluster in this process."""
    distributed: Any = import_module("distributed")
    try:
        return distributed.Client(address, timeout=PATIENCE)
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"no Dask scheduler answers at {address!r} within {PATIENCE} s; start one there with `dask scheduler`, or "
            "check the address"
        ) from error


def _begin() -> None:
    """Prepare a new process of a pool, which uses one thread and ends with its parent."""
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


def _exit_with(parent: BaseProcess) -> None:
    """Wait until the parent process ends, then end this process. The process also ends if the parent is killed."""
    parent.join()
    os._exit(1)
