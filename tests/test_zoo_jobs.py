"""Jobs that write files: each job is done once, workers may die, and a second run does the missing jobs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest
from progress import Recorded

from regauge.training.threads import one_thread
from regauge.zoo import JobsError, processes, run_jobs, share_of
from regauge.zoo.jobs.driver import Share, perform
from regauge.zoo.jobs.executors import dask


@dataclass(frozen=True)
class Squares:
    """Job k writes k squared, and a mark if the file already exists. Some jobs kill their process at the first attempt.

    One operation creates the file and fails if the file exists. Therefore the process cannot be killed between the
    result and its mark.
    """

    folder: Path
    count: int
    deadly: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()

    @property
    def keys(self) -> range:
        return range(self.count)

    def path(self, key: int) -> Path:
        return self.folder / f"{key}.txt"

    def is_done(self, key: int) -> bool:
        return self.path(key).exists()

    def __call__(self, key: int) -> None:
        assert os.environ["OMP_NUM_THREADS"] == "1"
        if key in self.broken:
            raise ArithmeticError(f"{key} has no square")
        attempt = self.folder / f"attempt-{key}"
        if key in self.deadly and not attempt.exists():
            attempt.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        temporary = self.folder / f".{key}.{os.getpid()}"
        temporary.write_text(str(key * key))
        try:
            os.link(temporary, self.path(key))
        except FileExistsError:
            os.link(temporary, self.folder / f"{key}.again")

    def results(self) -> list[int]:
        return [int(self.path(key).read_text()) for key in self.keys if self.is_done(key)]

    def log(self) -> list[int]:
        """Return the finished jobs. A job that was done twice occurs twice."""
        return sorted(int(path.stem) for suffix in ("txt", "again") for path in self.folder.glob(f"*.{suffix}"))


def test_jobs_are_done_once_and_a_second_run_does_the_rest(tmp_path: Path) -> None:
    told = Recorded()
    job = Squares(tmp_path, 5)
    perform(job, 2)
    assert run_jobs(job, progress=told) == 4
    assert (told.totals, told.amounts) == ([4], [1] * 4)
    assert job.results() == [0, 1, 4, 9, 16]
    assert run_jobs(job) == 0
    assert job.log() == [0, 1, 2, 3, 4]
    assert run_jobs(Squares(tmp_path, 7), executor=lambda: ThreadPoolExecutor(2)) == 2
    assert job.log() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("given", [None, "7"])
def test_the_limit_of_threads_holds_until_the_last_of_several_workers_ends(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    both, first_ended = Event(), Event()

    def first() -> None:
        with one_thread():
            assert both.wait(5)
        first_ended.set()

    def second() -> str | None:
        with one_thread():
            both.set()
            assert first_ended.wait(5)
            return os.environ.get("OMP_NUM_THREADS")

    with ThreadPoolExecutor(2) as pool:
        ended, seen = pool.submit(first), pool.submit(second)
        ended.result()
        assert seen.result() == "1"
    assert os.environ.get("OMP_NUM_THREADS") == given


def test_shares_are_all_jobs_together(tmp_path: Path) -> None:
    job = Squares(tmp_path, 10)
    assert [run_jobs(job, share=Share(rank, 3)) for rank in range(3)] == [4, 3, 3]
    assert job.log() == list(range(10))


def test_launchers_tell_the_share() -> None:
    assert share_of({}) == Share(0, 1)
    assert share_of({"RANK": "2", "WORLD_SIZE": "4", "SLURM_ARRAY_TASK_ID": "1"}) == Share(2, 4)
    slurm = {"SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "10", "SLURM_ARRAY_TASK_STEP": "5"}
    assert [share_of(slurm | {"SLURM_ARRAY_TASK_ID": str(k)}) for k in (10, 15, 20)] == [Share(k, 3) for k in range(3)]
    with pytest.raises(ValueError, match="but not WORLD_SIZE"):
        share_of({"RANK": "0"})
    with pytest.raises(ValueError, match="rank 4 of 4"):
        share_of({"RANK": "4", "WORLD_SIZE": "4"})
    with pytest.raises(ValueError, match="but not SLURM_ARRAY_TASK_COUNT"):
        share_of({"SLURM_ARRAY_TASK_ID": "0"})


def test_a_worker_that_dies_breaks_the_pool_and_loses_nothing(tmp_path: Path) -> None:
    job = Squares(tmp_path, 12, deadly=(3,))  # pools that break again are tested below, in threads
    assert run_jobs(job, executor=processes(2)) == 12
    assert job.results() == [k * k for k in range(12)]
    assert job.log() == list(range(12))


def test_a_scheduler_that_does_not_answer_leaves_no_store(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed", reason="needs the extra 'dask'")
    monkeypatch.setattr("regauge.zoo.jobs.executors.PATIENCE", 0.1)
    options = ["--networks", "4", "--on", "tcp://127.0.0.1:9"]
    assert "no Dask scheduler answers at 'tcp://127.0.0.1:9'" in refused(
        "zoo", "train", "sine-inrs", "-o", str(tmp_path / "zoo"), *options
    )
    assert not list(tmp_path.iterdir())


def test_a_worker_of_a_cluster_that_dies_loses_nothing(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="needs the extra 'dask'")
    job = Squares(tmp_path, 12, deadly=(5,))
    assert run_jobs(job, executor=dask(workers=2)) == 12
    assert job.results() == [k * k for k in range(12)]
    assert job.log() == list(range(12))


def test_failures_are_told_and_what_is_done_stays(tmp_path: Path) -> None:
    job = Squares(tmp_path, 6, broken=(1, 4))
    with pytest.raises(JobsError, match="2 of 6 jobs failed, the last with ArithmeticError") as caught:
        run_jobs(job, executor=lambda: ThreadPoolExecutor(2))
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert job.log() == [0, 2, 3, 5]
    with pytest.raises(ArithmeticError, match="1 has no square"):
        run_jobs(job)
    assert run_jobs(Squares(tmp_path, 6)) == 2


def test_workers_that_always_die_are_given_up(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Deadly(Squares):
        def __call__(self, key: int) -> None:
            from concurrent.futures.process import BrokenProcessPool

            raise BrokenProcessPool("a process died")

    with pytest.raises(JobsError, match="2 of 2 jobs failed, the last with BrokenProcessPool"):
        run_jobs(Deadly(tmp_path, 2), executor=lambda: ThreadPoolExecutor(2), rounds=3)
    with pytest.raises(ValueError, match="at least 1"):
        processes(0)


def test_pools_may_break_often_as_long_as_jobs_get_done(tmp_path: Path) -> None:
    pools = []

    @dataclass(frozen=True)
    class Frail(Squares):
        def __call__(self, key: int) -> None:
            from concurrent.futures.process import BrokenProcessPool

            if len(self.results()) >= len(pools):
                raise BrokenProcessPool("a process died")
            super().__call__(key)

    def pool() -> ThreadPoolExecutor:
        pools.append(1)
        return ThreadPoolExecutor(1)

    assert run_jobs(Frail(tmp_path, 6), executor=pool, rounds=2) == 6
    assert len(pools) == 6


@dataclass(frozen=True)
class Beating:
    """Job k never ends, and a growing file shows that it is alive."""

    folder: Path

    @property
    def keys(self) -> range:
        return range(2)

    def is_done(self, key: int) -> bool:
        return False

    def __call__(self, key: int) -> None:
        with open(self.folder / f"{key}", "ab", buffering=0) as file:
            while True:
                file.write(b".")
                time.sleep(0.02)


@pytest.mark.parametrize("executor", ["processes(2)", pytest.param("dask(workers=2)", marks=pytest.mark.slow)])
def test_workers_end_with_a_parent_that_is_killed(executor: str, tmp_path: Path) -> None:
    if executor.startswith("dask"):
        pytest.importorskip("distributed", reason="needs the extra 'dask'")

    def beats() -> list[int]:
        return [path.stat().st_size if path.exists() else 0 for path in (tmp_path / "0", tmp_path / "1")]

    code = "\n".join(
        (
            "if __name__ == '__main__':",
            "    import sys",
            "    from pathlib import Path",
            "    from test_zoo_jobs import Beating",
            "    from regauge.zoo.jobs import dask, processes, run_jobs",
            f"    run_jobs(Beating(Path(sys.argv[1])), executor={executor})",
        )
    )
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=os.environ | {"PYTHONPATH": path})
    try:
        deadline = time.monotonic() + 60
        while min(beats()) < 2:  # both workers are in a job
            assert time.monotonic() < deadline
            assert parent.poll() is None
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 60
    before = beats()
    time.sleep(1)
    while beats() != before:
        assert time.monotonic() < deadline, "the workers outlive their parent"
        before = beats()
        time.sleep(1)
