"""What a batch of a training on networks costs: reading it, and moving each network by a random element.

    OMP_NUM_THREADS=1 python benchmarks/loader.py [networks]

CPU milliseconds of one thread for 64 networks drawn at random from a store in the page cache, medians of interleaved
rounds. "Apart" draws an element and acts with it (`symmetry.random`, `symmetry.act`).
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from regauge.core.random_moves import RandomMoves
from regauge.discovery import discover
from regauge.storage.architecture import Architecture
from regauge.storage.store import Store

BATCH, SHARD, ROUNDS = 64, 512, 41
SIREN = {"in_features": 2, "width": 32, "out_features": 1, "depth": 2}
CASES: dict[str, tuple[Architecture, int, tuple[str, ...]]] = {
    "SIREN 2-32-32-1": (
        Architecture("SIREN", "regauge.nets.siren:Siren", SIREN),
        2,
        ("permutation", "sign", "shift"),
    ),
    "MLP 30-16-16-2": (
        Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [30, 16, 16, 2]}),
        30,
        ("permutation", "scale"),
    ),
    "MLP 784-10-10": (
        Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [784, 10, 10]}),
        784,
        ("permutation", "scale"),
    ),
}


def cpu(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = run()
    return (time.process_time() - start) * 1e3, result


def measure(name: str, folder: Path, count: int) -> str:
    architecture, inputs, parts = CASES[name]
    generator = torch.Generator().manual_seed(0)
    symmetry = discover(architecture.module(), (torch.randn(2, inputs, generator=generator),))
    store = Store.create(folder, architecture, symmetry)
    for start in range(0, count, SHARD):
        params = {s.name: torch.randn(SHARD, *s.shape, generator=generator) for s in architecture.layout}
        store.append(params, [{"id": start + k, "step": 0} for k in range(SHARD)])
    store.refresh()
    moves = RandomMoves(symmetry, parts)
    times: dict[str, list[float]] = {way: [] for way in ("read", "moves", "permutations", "apart")}
    only = RandomMoves(symmetry, ("permutation",))
    for trial in range(ROUNDS):
        numbers = torch.randint(len(store), (BATCH,), generator=generator).tolist()
        found = {}
        found["read"], params = cpu(lambda numbers=numbers: store.read(numbers))
        found["moves"], _ = cpu(lambda params=params: moves(params, generator))
        found["permutations"], _ = cpu(lambda params=params: only(params, generator))
        found["apart"], _ = cpu(lambda params=params: symmetry.act(symmetry.random(generator, parts, (BATCH,)), params))
        if trial:  # the first round compiles, and fills the caches
            for way, spent in found.items():
                times[way].append(spent)
    row = " | ".join(f"{statistics.median(spent):.2f}" for spent in times.values())
    return f"| {len(store):,} {name} | {', '.join(parts)} | {row} |"


def main() -> None:
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    print("| networks | parts | reading | random elements | permutations alone | apart |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in CASES:
        with tempfile.TemporaryDirectory() as place:
            print(measure(name, Path(place) / "store", count), flush=True)


if __name__ == "__main__":
    main()
