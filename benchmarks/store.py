"""Speed of writing and reading a population, compared with folders that contain one file for each network.

    OMP_NUM_THREADS=1 python benchmarks/store.py [networks] [rows]

The tables show CPU seconds of one thread with files in the page cache, as medians of interleaved rounds. A batch
contains 64 networks, sampled at random. All methods return stacked parameters by name. The second table opens a store
of many rows, and shows the time and the memory of queries.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from regauge.storage import Store, verify
from regauge.storage.architecture import Architecture

SHARD = 512
BATCH = 64
ARCHITECTURES = {
    "MLP 30-16-16-2": Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [30, 16, 16, 2]}),
    "MLP 784-10-10": Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [784, 10, 10]}),
    "MLP 784-128-128-128-10": Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [784, 128, 128, 128, 10]}),
}


def population(architecture: Architecture, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {spec.name: torch.randn(count, *spec.shape, generator=generator) for spec in architecture.layout}


def known(start: int, count: int, generator: torch.Generator) -> list[dict[str, Any]]:
    """Return settings and metrics as a training run would record them."""
    numbers = torch.rand(count, 6, generator=generator, dtype=torch.float64).tolist()
    return [
        {
            "id": (start + k) // 10,
            "step": 100 * ((start + k) % 10),
            "seed": 2**31 + (start + k) // 10,
            "optimizer": "adam",
            "activation": ("relu", "tanh")[(start + k) // 10 % 2],
            "batch": 128,
            "lr": numbers[k][0],
            "weight_decay": numbers[k][1],
            "train_loss": numbers[k][2],
            "train_accuracy": numbers[k][3],
            "validation_loss": numbers[k][4],
            "validation_accuracy": numbers[k][5],
        }
        for k in range(count)
    ]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def cpu(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def stacked(networks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([network[name] for network in networks]) for name in networks[0]}


def reading(name: str, architecture: Architecture, count: int, folder: Path) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    store = Store.create(folder / "store", architecture)
    each, pickled, by_parameter = folder / "each", folder / "pth", folder / "parameters"
    for place in (each, pickled, by_parameter):
        place.mkdir()
    written = {"store": 0.0, "array": 0.0, "parameters": 0.0, "each": 0.0, "pth": 0.0}
    array = folder / "array" / "weights.npy"
    array.parent.mkdir()
    matrix = np.lib.format.open_memmap(array, mode="w+", dtype=np.float32, shape=(count, architecture.size))
    for start in range(0, count, SHARD):
        rows = known(start, min(SHARD, count - start), generator)
        params = population(architecture, len(rows), generator)
        written["store"] += cpu(lambda p=params, r=rows: store.append(p, r))
        written["array"] += cpu(
            lambda p=params, s=start: matrix.__setitem__(
                slice(s, s + SHARD), torch.cat([tensor.flatten(1) for tensor in p.values()], 1).numpy()
            )
        )
        written["parameters"] += cpu(lambda p=params, s=start: save_file(p, by_parameter / f"{s}.safetensors"))
        networks = [{key: tensor[k].clone() for key, tensor in params.items()} for k in range(len(rows))]
        for k, network in enumerate(networks, start):
            written["each"] += cpu(lambda n=network, k=k: save_file(n, each / f"{k}.safetensors"))
            written["pth"] += cpu(lambda n=network, k=k: torch.save(n, pickled / f"{k}.pth"))
    store = Store.open(folder / "store")
    order = store.rows["id"] * 10 + store.rows["step"] // 100  # numbers of the store as numbers of the files
    opened = [safe_open(by_parameter / f"{s}.safetensors", framework="pt") for s in range(0, count, SHARD)]
    names = [spec.name for spec in architecture.layout]

    def from_parameters(batch: list[int]) -> dict[str, Tensor]:
        networks = []
        for k in batch:
            file = opened[k // SHARD]
            networks.append({key: file.get_slice(key)[k % SHARD] for key in names})
        return stacked(networks)

    def from_array(batch: list[int]) -> dict[str, Tensor]:
        values = torch.from_numpy(mapped[batch])
        pieces = values.split([spec.size for spec in architecture.layout], 1)
        return {s.name: p.view(len(batch), *s.shape) for s, p in zip(architecture.layout, pieces, strict=True)}

    matrix.flush()
    mapped = np.load(array, mmap_mode="r")
    again = store.read([0] * BATCH)
    ways: dict[str, Callable[[list[int]], dict[str, Tensor]]] = {
        "store": store.read,
        "again": lambda batch: store.read(batch, out=again),
        "array": from_array,
        "parameters": from_parameters,
        "each": lambda batch: stacked([load_file(each / f"{k}.safetensors") for k in batch]),
        "pth": lambda batch: stacked([torch.load(pickled / f"{k}.pth", weights_only=True) for k in batch]),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    walls: dict[str, list[float]] = {way: [] for way in ways}
    for trial in range(11):
        batch = torch.randint(count, (BATCH,), generator=generator)
        found = {}
        for way, read in ways.items():
            indices = batch.tolist() if way in ("store", "again") else order[batch.numpy()].tolist()
            wall, start_cpu = time.perf_counter(), time.process_time()
            found[way] = read(indices)
            if trial:  # the first round fills the caches
                times[way].append(time.process_time() - start_cpu)
                walls[way].append(time.perf_counter() - wall)
        for way in ways:
            assert all(torch.equal(found[way][key], found["store"][key]) for key in names), way
    values = count * architecture.size * 4
    written["again"] = written["store"]
    places = {
        "store": folder / "store",
        "again": folder / "store",
        "array": array.parent,
        "parameters": by_parameter,
        "each": each,
        "pth": pickled,
    }
    titles = {
        "store": "store",
        "again": "store, in the memory of the last batch",
        "array": "numpy.memmap, one .npy file, one row for each network and nothing else",
        "parameters": f"safetensors, {SHARD} networks in a file, one tensor for each parameter",
        "each": "safetensors, one file for each network",
        "pth": "torch.save, one file for each network",
    }
    fastest = statistics.median(times["store"])
    return [
        f"| {name} | {titles[way]} | {written[way]:.2f} | {size(places[way]) / values - 1:+.1%} | "
        f"{statistics.median(times[way]) * 1e3:.2f} | {statistics.median(walls[way]) * 1e3:.2f} | "
        f"{statistics.median(times[way]) / fastest:.1f} |"
        for way in ways
    ]


MEASURED = """
import json, os, sys, time
import torch
from regauge.storage import Store
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
before = resident()
start = time.process_time()
store = Store.open(sys.argv[1])
count = len(store)
opened = time.process_time() - start
headers = resident() - before
start = time.process_time()
found = store.rows.where(activation="tanh", validation_accuracy=lambda values: values > 0.99)
first = time.process_time() - start
start = time.process_time()
store.rows.where(activation="tanh", validation_accuracy=lambda values: values > 0.99)
again = time.process_time() - start
start = time.process_time()
for name in store.rows.names:
    store.rows.column(name)
rest = time.process_time() - start
everything = resident() - before
start = time.process_time()
store.split()
split = time.process_time() - start
start = time.perf_counter()
store.read(torch.randint(count, (64,)).tolist())
batch = time.perf_counter() - start
print(json.dumps([count, len(store.shards), opened, headers, first, again, rest, everything, split, batch]))
"""


def opening(count: int, folder: Path) -> str:
    tiny = Architecture("MLP 2-1", "regauge.nets.mlp:mlp", {"widths": [2, 1]})
    store, generator = Store.create(folder, tiny), torch.Generator().manual_seed(0)
    for start in range(0, count, SHARD):
        rows = known(start, min(SHARD, count - start), generator)
        store.append(population(tiny, len(rows), generator), rows)
    done = subprocess.run([sys.executable, "-c", MEASURED, str(folder)], capture_output=True, text=True, check=True)
    rows, shards, opened, headers, first, again, rest, everything, split, batch = json.loads(done.stdout)
    checked = cpu(lambda: verify(folder))
    return (
        f"| {rows:,} | {shards:,} | {opened:.2f} | {headers:.0f} | {first:.2f} | {again * 1e3:.1f} | {rest:.2f} | "
        f"{everything:.0f} | {split * 1e3:.0f} | {batch * 1e3:.1f} | {checked:.1f} |"
    )


def main() -> None:
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    rows = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
    print("| networks | kept as | writing, s | bytes besides values | batch, CPU ms | batch, wall ms | / store |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, architecture in ARCHITECTURES.items():
        with tempfile.TemporaryDirectory() as place:
            fitting = min(count, 2**31 // (4 * architecture.size))
            for line in reading(f"{fitting:,} {name}", architecture, fitting, Path(place)):
                print(line, flush=True)
    print()
    print(
        "| rows | shards | opening, s | MiB | first query of two columns, s | again, ms | ten more columns, s | MiB | "
        "split, ms | a batch of 64, ms | verifying, s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as place:
        print(opening(rows, Path(place) / "store"))


if __name__ == "__main__":
    main()
