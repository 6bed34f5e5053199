"""The cost of a batch of networks: reading the batch, and transforming each network by a random element.

    OMP_NUM_THREADS=1 python benchmarks/loader.py [networks] [--disk]

The table shows CPU milliseconds of one thread for a batch of 64 or 256 networks, sampled from a store in the page
cache. The numbers are means over the batches of an epoch, and medians over interleaved rounds. The times of "random
elements" and "permutations alone" are added to the time of reading. "apart" samples an element and then acts with it
(`symmetry.random`, `symmetry.act`). As in a long training, tensors of some megabytes are made and freed beforehand, so
batches do not request their memory from the system each time.

`--disk` also measures reading in wall-clock milliseconds without the page cache, as in the first epoch, and in every
epoch of a store that is larger than memory (Linux only).
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from regauge.core.symmetry import Symmetry
from regauge.discovery import discover
from regauge.storage import Store
from regauge.storage.architecture import Architecture
from regauge.storage.loader import Loader

BATCHES, SHARD, ROUNDS = (64, 256), 512, 7
WARM = 7_500_000
"""The number of entries of the tensor that is made and freed beforehand."""
MOST = 1 << 26
"""The largest number of entries of a store."""
SIREN = {"in_features": 2, "width": 32, "out_features": 1, "depth": 2}
CASES: dict[str, tuple[Architecture, tuple[int, ...], tuple[str, ...]]] = {
    "SIREN 2-32-32-1": (
        Architecture("SIREN", "regauge.nets.siren:Siren", SIREN),
        (2,),
        ("permutation", "sign", "shift"),
    ),
    "MLP 784-128-128-128-10": (
        Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [784, 128, 128, 128, 10]}),
        (784,),
        ("permutation", "scale"),
    ),
    "MLP 30-16-16-2": (
        Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [30, 16, 16, 2]}),
        (30,),
        ("permutation", "scale"),
    ),
    "MLP 784-10-10": (
        Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [784, 10, 10]}),
        (784,),
        ("permutation", "scale"),
    ),
    "CNN 1-16-32-64-10": (
        Architecture("CNN", "regauge.nets.cnn:CNN", {"channels": [16, 32], "hidden": 64, "classes": 10, "image": 12}),
        (1, 12, 12),
        ("permutation", "scale"),
    ),
    "transformer layer, 24 wide": (
        Architecture(
            "encoder layer",
            "torch.nn:TransformerEncoderLayer",
            {"d_model": 24, "nhead": 4, "dim_feedforward": 96, "batch_first": True},
        ),
        (8, 24),
        ("permutation", "scale", "sign"),
    ),
}


def cpu(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return (time.process_time() - start) * 1e3


def measure(name: str, folder: Path, count: int, *, is_on_disk: bool) -> Iterator[str]:
    architecture, shape, parts = CASES[name]
    generator = torch.Generator().manual_seed(0)
    symmetry = discover(architecture.module().eval(), (torch.randn(2, *shape, generator=generator),))
    store = Store.create(folder, architecture, symmetry)
    count = max(BATCHES[-1], min(count, MOST // architecture.size))
    for start in range(0, count, SHARD):
        size = min(SHARD, count - start)
        params = {s.name: torch.rand(size, *s.shape, generator=generator).to(s.dtype) for s in architecture.layout}
        store.append(params, [{"id": start + k, "step": 0} for k in range(size)])
    store.refresh()
    for batch in BATCHES:
        times = [statistics.median(spent) for spent in _times(store, symmetry, parts, batch)]
        read, elements, permutations, apart = times
        row = f"{read:.2f} | {elements - read:.2f} | {permutations - read:.2f} | {apart:.2f}"
        if is_on_disk:
            row += f" | {statistics.median(_from_disk(folder, batch) for _ in range(ROUNDS)):.2f}"
        yield f"| {len(store):,} {name} ({architecture.size:,} values) | {', '.join(parts)} | {batch} | {row} |"


def _from_disk(folder: Path, batch: int) -> float:
    """Return the wall-clock milliseconds for a batch, with nothing of the store in the page cache."""
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    loader = Loader(Store.open(folder), batch=batch, generator=torch.Generator().manual_seed(1))
    start = time.perf_counter()
    number = sum(1 for _ in loader)
    return (time.perf_counter() - start) * 1e3 / number


def _times(store: Store, symmetry: Symmetry, parts: tuple[str, ...], batch: int) -> list[list[float]]:
    """Return the milliseconds of each round for reading, random elements, permutations alone, and both steps apart."""
    loaders = {
        way: Loader(store, batch=batch, augment=chosen, generator=torch.Generator().manual_seed(1))
        for way, chosen in {"reading": (), "elements": parts, "permutations": ("permutation",)}.items()
    }
    params, generator = store.read(range(batch)), torch.Generator().manual_seed(0)
    times: dict[str, list[float]] = {way: [] for way in (*loaders, "apart")}
    for trial in range(ROUNDS):
        for way, loader in loaders.items():
            spent = cpu(lambda loader=loader: [None for _ in loader]) / len(loader)
            if trial:  # the first round compiles, and fills the caches
                times[way].append(spent)
        spent = cpu(lambda: symmetry.act(symmetry.random(generator, parts, (batch,)), params))
        if trial:
            times["apart"].append(spent)
    return list(times.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", type=int, nargs="?", default=8192)
    parser.add_argument("--disk", action="store_true", help="reading from the disk, too, by the clock")
    parser.add_argument("--only", choices=tuple(CASES), help="that architecture alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.ones(WARM)
    columns = ["networks", "parts", "batch", "reading", "random elements", "permutations alone", "apart"]
    columns += ["reading from the disk"] if options.disk else []
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for name in [options.only] if options.only else CASES:
        with tempfile.TemporaryDirectory() as place:
            for row in measure(name, Path(place) / "store", options.networks, is_on_disk=options.disk):
                print(row, flush=True)


if __name__ == "__main__":
    main()
