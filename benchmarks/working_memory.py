"""The memory of work on networks in files: the announced memory, and a measurement.

Networks with random float32 weights are written to files and processed in memory. "announced" is the memory that the
call announces before it begins. "measured" is the largest resident memory of the process above the memory before the
call. Both numbers include the networks, all copies, and the written result. "reordered" networks are copies of the
first network with noise, transformed by a random element of the symmetry. "unrelated" networks are independent. Every
row is measured in a separate process.

    OMP_NUM_THREADS=1 python benchmarks/working_memory.py docs/records/working-memory.jsonl [part of a row]
    python benchmarks/working_memory.py --table docs/records/working-memory.jsonl

Rows that are already in the record are not measured again. The command runs only on Linux.
"""

import argparse
import json
import logging
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import regauge as rg
from regauge.checkpoints.job import open_call
from regauge.checkpoints.memory_limit import MemoryLimit, resident
from regauge.nets.mlp import mlp
from regauge.nets.transformer import GPT, Llama, initialize_transformer

NOISE = 0.1
"""The standard deviation of the noise between a network and its reordered copy, as a share of the weights' standard
deviation."""
CALLS = {
    "align": ("aligning", 2),
    "align, permutations": ("aligning", 2),
    "merge": ("merging", 2),
    "merge three": ("merging", 3),
    "align_many three": ("aligning many networks", 3),
    "compare": ("comparing", 2),
    "canonicalize": ("canonicalizing", 1),
    "gauge": ("choosing a gauge", 1),
    "prune": ("pruning", 1),
    "transport": ("transporting", 3),
}
"""The kind of work of each call, and the number of networks."""
CASES = [
    *(
        (net, relation, call)
        for net in ("MLP", "CNN", "GPT", "Llama")
        for relation, call in (
            ("unrelated", "align"),
            ("reordered", "align"),
            ("unrelated", "merge"),
            ("unrelated", "compare"),
            ("unrelated", "canonicalize"),
            ("unrelated", "gauge"),
            ("unrelated", "prune"),
            ("unrelated", "transport"),
        )
    ),
    *((net, "unrelated", call) for net in ("MLP", "Llama") for call in ("merge three", "align_many three")),
    ("Llama", "unrelated", "align, permutations"),
    ("wide MLP", "unrelated", "align"),
]


def network(name: str) -> tuple[nn.Module, Any]:
    """Return a network of a given name, and inputs."""
    if name == "MLP":
        return mlp(2048, 3072, 3072, 2048, 10), torch.zeros(2, 2048)
    if name == "wide MLP":
        return mlp(784, 6000, 10), torch.zeros(2, 784)
    if name == "CNN":
        layers: list[nn.Module] = []
        for before, after in ((3, 256), (256, 512), (512, 1024), (1024, 1024), (1024, 1024)):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 10)), torch.zeros(
            2, 3, 8, 8
        )
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    if name == "Llama":
        return Llama(4000, width=512, layers=7, heads=8, kv_heads=4), tokens
    return GPT(4000, 128, width=512, layers=7, heads=8), tokens


def random_network(module: nn.Module, generator: torch.Generator) -> rg.Params:
    """Return random parameters, with gains and variances around one."""
    if isinstance(module, GPT | Llama):
        params = initialize_transformer(module, generator)
    else:
        params = {
            n: torch.randn(t.shape, generator=generator) / t[0].numel() ** 0.5 if t.ndim > 1 else t.clone()
            for n, t in module.state_dict().items()
        }
    for name, tensor in params.items():
        if tensor.ndim == 1 and tensor.is_floating_point():
            noise = 0.2 * torch.rand(tensor.shape, generator=generator)
            params[name] = tensor + noise
    return params


def call_of(call: str, paths: list[Path], symmetry: rg.Symmetry, out: Path, limit: str) -> Callable[[], object]:
    """Return the measured call."""
    ways: Any = {"out": out, "memory": limit}
    chance = torch.Generator().manual_seed(0)
    if call == "align, permutations":
        return lambda: rg.align(*paths, symmetry, rotate="never", **ways)
    if call.startswith("merge"):
        return lambda: rg.merge(paths, symmetry, **ways)
    if call.startswith("align_many"):
        return lambda: rg.align_many(
            paths, symmetry, out=[None, *(out.with_stem(f"{k}") for k in range(2))], memory=limit
        )
    if call == "compare":
        return lambda: rg.compare(*paths, symmetry, generator=chance, memory=limit, exact=True)
    if call == "gauge":
        return lambda: rg.gauge(paths[0], symmetry, generator=chance, **ways)
    if call == "prune":
        return lambda: rg.prune(paths[0], symmetry, share=0.25, **ways)
    work: Any = {"align": rg.align, "canonicalize": rg.canonicalize, "transport": rg.transport}[call]
    return lambda: work(*paths, symmetry, **ways)


def measure(net: str, relation: str, call: str, folder: Path) -> dict[str, Any]:
    """Return the row of one case."""
    torch.manual_seed(0)
    module, inputs = network(net)
    symmetry = rg.discover(module.eval(), (inputs,), verify=False)
    work, count = CALLS[call]
    paths, first = [], random_network(module, torch.Generator().manual_seed(0))
    for k in range(count):
        path, chance = folder / f"{k}.safetensors", torch.Generator().manual_seed(k)
        params = first if relation == "reordered" else random_network(module, chance)
        if relation == "reordered" and k:
            noisy = {
                n: t + NOISE * t.std() * torch.randn(t.shape, generator=chance) if t.ndim > 1 else t
                for n, t in first.items()
            }
            params = symmetry.act(symmetry.random(chance, ("permutation", "sign")), noisy)
        rg.save(params, path)
        paths.append(path)
    values = sum(tensor.numel() for tensor in first.values())
    del params, first, module
    named: Any = {f"network {k}": path for k, path in enumerate(paths)}
    out, limit = folder / "out.safetensors", "20GB"
    job = open_call("rg.align", {}, named, work=work, symmetry=symmetry, out=out, memory=limit)
    assert job is not None
    announced = job.nbytes
    run = call_of(call, paths, symmetry, out, limit)
    MemoryLimit(0, base=0).held()  # gives freed memory back
    before = resident()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is now what is held now
    run()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    row = {"net": net, "relation": relation, "call": call, "values": values}
    return row | {"announced": announced, "measured": peak - before}


def _work(case: tuple[str, str, str], pipe: Any) -> None:
    logging.disable()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pipe.send(measure(*case, Path(folder)))


def table(path: Path) -> str:
    """Return the rows of a record as a table."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [
        "| network | file | networks are | call | announced | measured | announced / measured |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        sizes = [f"{size / 1e6:.0f} MB" for size in (row["announced"], row["measured"])]
        cells = [row["net"], f"{4 * row['values'] / 1e6:.0f} MB", row["relation"], f"`{row['call']}`", *sizes]
        lines.append(f"| {' | '.join(cells)} | {row['announced'] / row['measured']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("part", nargs="?", default="")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        lines = options.record.read_text(encoding="utf-8").splitlines() if options.record.exists() else []
        done = [tuple(json.loads(one)[name] for name in ("net", "relation", "call")) for one in lines]
        spawn = multiprocessing.get_context("spawn")
        for case in CASES:
            if case in done or options.part not in f"{' '.join(case)}.":
                continue
            pipe, end = spawn.Pipe()
            process = spawn.Process(target=_work, args=(case, end))
            process.start()
            end.close()
            row = pipe.recv()
            process.join()
            with options.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), file=sys.stderr, flush=True)
    print(table(options.record))


if __name__ == "__main__":
    main()
