"""A driver of jobs that write files.

The driver does each job once, on any executor. A driver that is started again does only the missing jobs.

A job is a pure function of its key. A job writes one file, which gets its final name when the file is complete. The
files are therefore the whole state, and no locks are needed. After a crash, start the driver again with the same
arguments.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, as_completed
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from regauge.core.products import Library, chosen_library, default_library
from regauge.core.progress import Advance, Progress, no_progress
from regauge.storage import Store
from regauge.training.threads import one_thread
from regauge.zoo.jobs.executors import MakeExecutor

K = TypeVar("K")


class Job(Protocol[K]):
    """A function of a key that writes one file. A job must be picklable and small."""

    @property
    def keys(self) -> Sequence[K]:
        """The keys of all jobs."""

    def is_done(self, key: K) -> bool:
        """Return whether the file of the job with the given key exists."""

    def __call__(self, key: K) -> object:
        """Do the job. The result does not depend on when the job is done."""


class JobsError(RuntimeError):
    """An error: some jobs are not done after all attempts. The files of finished jobs are kept."""


class Share(NamedTuple):
    """The jobs that one process does: jobs whose index is `rank` modulo `world`."""

    rank: int = 0
    world: int = 1


WHOLE = Share()


def run_jobs(
    job: Job[K],
    *,
    executor: MakeExecutor | None = None,
    share: Share = WHOLE,
    rounds: int = 5,
    progress: Progress = no_progress,
) -> int:
    """Do all jobs that are not done yet.

    Args:
        job: The jobs.
        executor: The executor of the jobs. By default, jobs are done one after the other in this process. If the pool
            of the executor breaks because a worker died, another pool is opened for the missing jobs.
        share: The share of all jobs that this process does.
        rounds: The number of consecutive pools that may break without any finished job. No further round follows a
            round in which the pool does not break and no job succeeds.
        progress: The display of the number of finished jobs.

    Returns:
        The number of jobs that this call did.

    Raises:
        JobsError: Jobs are missing after the last round. The `__cause__` of the `JobsError` is the error of a missing
            job. If jobs are done in this process, the first error of a job is raised immediately and unchanged.
    """
    missing = missing_jobs(job, share)
    total, done = len(missing), progress("jobs", len(missing))
    if executor is None:
        for key in missing:
            perform(job, key)
            done()
        return total
    error: BaseException | None = None
    futile = 0
    while missing and futile < rounds:
        before = len(missing)
        error = _submit(job, missing, executor, done)
        missing = [key for key in missing if not job.is_done(key)]
        if len(missing) < before:
            futile = 0
        elif isinstance(error, BrokenExecutor):
            futile += 1
        else:
            break
    if missing:
        reason = f"{type(error).__name__}: {error}" if error else "they wrote no files"
        raise JobsError(
            f"{len(missing)} of {total} jobs failed, the last with {reason}; correct the cause and run the same again: "
            "finished jobs are kept"
        ) from error
    return total


def recorded_library(folder: str | Path) -> Library:
    """Return the library of matrix products for the jobs of a store: chosen by the user, recorded, or the default."""
    known = Store.find(folder)
    recorded = None if known is None else known.about.get("products")
    return chosen_library() or recorded or default_library()


def missing_jobs(job: Job[K], share: Share = WHOLE) -> list[K]:
    """Return the keys of the jobs in a share that are not done yet."""
    keys = [key for number, key in enumerate(job.keys) if number % share.world == share.rank]
    return [key for key in keys if not job.is_done(key)]


def perform(job: Job[K], key: K) -> None:
    """Do one job with one thread, unless its file exists."""
    if not job.is_done(key):
        with one_thread():
            job(key)


def share_of(environment: Mapping[str, str] = os.environ) -> Share:
    """Return the jobs of this process as a `Share`, from RANK and WORLD_SIZE (torchrun) or from a Slurm job array.

    If neither torchrun nor Slurm has set environment variables, this process does all jobs.

    Raises:
        ValueError: Only some of the variables are set, or their values are invalid.
    """
    try:
        if "RANK" in environment or "WORLD_SIZE" in environment:
            share = Share(int(environment["RANK"]), int(environment["WORLD_SIZE"]))
        elif "SLURM_ARRAY_TASK_ID" in environment:
            first = int(environment.get("SLURM_ARRAY_TASK_MIN", "0"))
            step = int(environment.get("SLURM_ARRAY_TASK_STEP", "1"))
            rank = (int(environment["SLURM_ARRAY_TASK_ID"]) - first) // step
            share = Share(rank, int(environment["SLURM_ARRAY_TASK_COUNT"]))
        else:
            share = Share()
    except KeyError as error:
        raise ValueError(
            f"the environment names a part of a job array but not {error.args[0]}; set it too, or neither"
        ) from error
    if not 0 <= share.rank < share.world:
        raise ValueError(f"rank {share.rank} of {share.world} processes is impossible; ranks count from 0")
    return share


def _submit(job: Job[K], keys: Sequence[K], executor: MakeExecutor, done: Advance) -> BaseException | None:
    """Submit jobs and wait for all jobs. Return the error of one job, preferably the error of a broken pool."""
    found: BaseException | None = None
    with executor() as pool:
        try:
            futures: list[Future[Any]] = [pool.submit(perform, job, key) for key in keys]
        except BrokenExecutor as error:
            return error
        try:
            for future in as_completed(futures):
                failure = future.exception()
                if failure is None:
                    done()
                elif not isinstance(found, BrokenExecutor):
                    found = failure
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    return found
