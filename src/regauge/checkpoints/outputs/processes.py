"""Processes, started by torchrun or Slurm, that together write one output."""

import atexit
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from regauge.core.progress import Crew

T = TypeVar("T")
Made = TypeVar("Made")
PLACES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
"""Environment variables that contain the rank of this process and the number of processes."""
PATIENCE = timedelta(days=30)
"""The time for which a process waits for the other processes. The end of another process is noticed immediately."""
ENDED = (
    "another process that writes this output ended; finished work is kept: start all processes again with `resume=True`"
)


class Ranks(Crew):
    """This process and all other processes that make the same call.

    Args:
        rank: The rank of this process.
        size: The number of processes.
        group: The process group of `torch.distributed` in which the processes communicate.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self._group = rank, size, group

    def first(self, make: Callable[[], T]) -> T:
        """Call a function in the first process, and return its result or raise its error in all processes."""
        made, error = self._try(make) if self.rank == 0 else (None, None)
        told: list[Any] = [(made, None if error is None else str(error))]
        self._talk(lambda: dist.broadcast_object_list(told, src=0, group=self._group))
        result: T = self._agree(error, told)[0]
        return result

    def map(self, make: Callable[[T], Made], items: Iterable[T]) -> list[Made]:
        """Distribute the calls of a function for each item over the processes; return all results in every process."""
        every = list(items)
        made, error = self._try(lambda: [make(one) for one in every[self.rank :: self.size]])
        told: list[Any] = [None] * self.size
        own = made, None if error is None else str(error)
        self._talk(lambda: dist.all_gather_object(told, own, group=self._group))
        parts = self._agree(error, told)
        return [parts[k % self.size][k // self.size] for k in range(len(every))]

    def sum(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Sum tensors with the same key over all processes. A tensor that a process lacks counts as zeros."""
        own = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
        known = {key: kind for kinds in self.map(lambda _: own, range(self.size)) for key, kind in kinds.items()}
        found = {}
        for key in sorted(known):
            shape, dtype = known[key]
            found[key] = tensors[key] if key in tensors else torch.zeros(shape, dtype=dtype)
            self._talk(partial(dist.all_reduce, found[key], group=self._group))
        return found

    def _try(self, make: Callable[[], T]) -> tuple[T | None, Exception | None]:
        try:
            return make(), None
        except Exception as error:  # any error is sent to the waiting processes
            return None, error

    def _agree(self, error: Exception | None, told: Sequence[tuple[Any, str | None]]) -> list[Any]:
        if error is not None:
            raise error
        texts = [text for _, text in told if text is not None]
        if texts:
            raise ValueError(f"another process that writes this output reports: {texts[0]}")
        return [made for made, _ in told]

    def _talk(self, send: Callable[[], object]) -> None:
        try:
            send()
        except RuntimeError as error:
            raise OSError(ENDED) from error


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@cache
def join() -> Crew:
    """Return all processes that torchrun or Slurm started together, as a group that shares work. Each process calls
    `join` once.

    Raises:
        ValueError: The environment does not describe other processes, or has no address for their communication. The
            error is also raised if torch was built without torch.distributed.
    """
    place = next((names for names in PLACES if all(name in os.environ for name in names)), None)
    if place is None:
        raise ValueError(
            "work is shared by processes that torchrun or srun started, and this one was not; start for example "
            "`torchrun --nproc-per-node 4 -m regauge ...`"
        )
    rank, size = (int(os.environ[name]) for name in place)
    if size == 1:
        return Crew()
    if not dist.is_available():
        raise ValueError("this torch has no torch.distributed, which sharing work needs; leave `shared=True` out")
    if dist.is_initialized():
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
    else:
        absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if absent:
            raise ValueError(
                f"the processes cannot find one another: set {' and '.join(absent)}, for example "
                "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500"
            )
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=PATIENCE)
        # A process that ends while threads of the group run is aborted.
        atexit.register(_leave)
        group = dist.group.WORLD
    return Ranks(rank, size, group)
