"""Time for training, storing and aligning 10,000 small networks with two processes.

    python benchmarks/uci_zoo.py [networks] [processes]

The networks are MLPs 30-16-16-2 on UCI breast cancer as in the preset `uci_mlps`, trained for 50 epochs, of which only
the final networks are stored. Times are wall-clock seconds, and CPU seconds of all processes, including the start of
the processes. The networks are then aligned to the medoid of 64 networks, and 100 networks are compared before and
after alignment.
"""

import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from regauge.cli.zoo_options import ZooCompare
from regauge.cli.zoo_populations import task_on
from regauge.storage import Store, verify
from regauge.zoo import Barriers, mean_barrier, plan_population, plan_training, processes, run_jobs
from regauge.zoo.presets import uci_mlps


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


@contextmanager
def stage(name: str, total: list[float]) -> Iterator[None]:
    clock, cpu = time.perf_counter(), cpu_seconds()
    yield
    passed = time.perf_counter() - clock
    total.append(passed)
    print(f"{name:<34} {passed:8.1f} s {cpu_seconds() - cpu:8.1f} CPU s", flush=True)


def barrier(folder: Path, count: int) -> str:
    """Return the mean barrier between some networks of a store, which are the same in every store of these
    trajectories.
    """
    store = Store.open(folder)
    task = task_on(ZooCompare(store=folder, output=folder, data="breast-cancer"), store)
    ids = store.rows["id"].argsort()[: min(count, len(store))]
    params = store.read(ids)
    mean, deviation = mean_barrier(Barriers(task)(params, params))
    return f"{mean:.4f}, standard deviation {deviation:.4f}"


def main(count: int, workers: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        raw, aligned = Path(folder) / "raw", Path(folder) / "aligned"
        total: list[float] = []
        with stage("prepare (data, symmetry)", total):
            store, training = plan_training(replace(uci_mlps(count=count), checkpoints=None), raw)
        with stage(f"train and store {count:,}", total):
            run_jobs(training, executor=processes(workers))
        store.refresh()
        with stage("find the medoid of 64", total):
            moved, alignment = plan_population(raw, aligned, to="medoid")
        with stage("align and store", total):
            run_jobs(alignment, executor=processes(workers))
        moved.refresh()
        print(f"{'together':<34} {sum(total):8.1f} s")
        size = sum(shard.path.stat().st_size for shard in moved.shards) / 2**20
        print(f"{len(store)} networks trained, {len(moved)} aligned; {size:.1f} MiB; whole: {verify(aligned).ok}")
        before, after = (moved.rows[name].mean() for name in ("objective_before", "objective"))
        print(f"mean inner product with the medoid before: {before:.2f}; after: {after:.2f}")
        print(f"mean barrier of 100 before: {barrier(raw, 100)}; after: {barrier(aligned, 100)}")


if __name__ == "__main__":
    main(*(int(text) for text in (sys.argv[1:] + ["10000", "2"][len(sys.argv) - 1 :])))
