"""The memory that learning an element needs: the estimate of `rg.align`, and a measurement.

Two transformers with random weights, in files, are aligned by a method that learns from batches of random examples. The
method takes one step of gradient descent, because further steps need no further memory. "announced" is the memory that
the call announces before it begins. "measured" is the largest resident memory of the process above the memory before
the call. Both numbers include the networks, their copies, the activations of a batch, and the written result. Every row
is measured in a separate process.

    OMP_NUM_THREADS=1 python benchmarks/learning_memory.py docs/records/learning-memory.jsonl
    python benchmarks/learning_memory.py --table docs/records/learning-memory.jsonl

Rows that are already in the record are not measured again. The command runs only on Linux.
"""

import argparse
import json
import logging
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import regauge as rg
from regauge.alignment import ContinuousDescent, Method, Sinkhorn, StraightThrough
from regauge.alignment.align_networks import with_learning
from regauge.alignment.descent_method import held_by_batch
from regauge.checkpoints.job import open_call
from regauge.checkpoints.memory_limit import MemoryLimit, resident
from regauge.nets.transformer import GPT, Llama, ViT, initialize_transformer

TOKENS, LENGTH, LAYERS = 256, 64, 4
CASES = [
    *((style, width, 32, "ContinuousDescent") for style in ("ViT", "GPT", "Llama") for width in (128, 256)),
    ("GPT", 128, 128, "ContinuousDescent"),
    *(("GPT", 256, 32, method) for method in ("ContinuousDescent from weights", "Sinkhorn", "StraightThrough")),
]
"""Style, width, number of examples in a batch, and method."""


def network(style: str, width: int) -> nn.Module:
    """Return a network of a style, with four layers and four heads."""
    if style == "ViT":
        return ViT(width=width, layers=LAYERS).eval()
    if style == "GPT":
        return GPT(TOKENS, LENGTH, width=width, layers=LAYERS).eval()
    return Llama(TOKENS, width=width, layers=LAYERS).eval()


def method_named(name: str) -> Method:
    """Return a method that takes one step."""
    once: Any = {"steps": 1, "every": 1}
    return {
        "ContinuousDescent": ContinuousDescent(**once),
        "ContinuousDescent from weights": ContinuousDescent(init=rg.WeightMatching(), **once),
        "Sinkhorn": Sinkhorn(**once),
        "StraightThrough": StraightThrough(**once),
    }[name]


def measure(style: str, width: int, examples: int, method: str, folder: Path) -> dict[str, Any]:
    """Return the row of one case."""
    torch.manual_seed(0)
    module = network(style, width)
    if style == "ViT":
        inputs, targets = torch.randn(2 * examples, 1, 28, 28), torch.randint(10, (2 * examples,))
    else:
        inputs, targets = (torch.randint(TOKENS, (2 * examples, LENGTH)) for _ in "xy")
    symmetry = rg.discover(module, (inputs[:2],), verify=False)
    paths = [folder / "a.safetensors", folder / "b.safetensors"]
    for seed, path in enumerate(paths):
        rg.save(initialize_transformer(module, torch.Generator().manual_seed(seed)), path)
    task = rg.Task(module, list(zip(inputs.split(examples), targets.split(examples), strict=True)))
    chosen, out = method_named(method), folder / "out.safetensors"
    named: Any = {"network_a": paths[0], "network_b": paths[1]}
    job = open_call("rg.align", {}, named, work="aligning", symmetry=symmetry, out=out, memory="8GB")
    assert job is not None
    announced = with_learning(job, chosen, task).nbytes
    MemoryLimit(0, base=0).held()  # gives freed memory back
    before = resident()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is now what is held now
    rg.align(*paths, symmetry, method=chosen, task=task, out=out, memory="8GB")
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    values = sum(tensor.numel() for tensor in module.state_dict().values())
    batch = held_by_batch(task, dict(module.state_dict()))
    return {
        "style": style,
        "width": width,
        "examples": examples,
        "method": method,
        "values": values,
        "batch": batch,
        "announced": announced,
        "measured": peak - before,
    }


def _work(case: tuple[str, int, int, str], pipe: Any) -> None:
    logging.disable()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pipe.send(measure(*case, Path(folder)))


def table(path: Path) -> str:
    """Return the rows of a record as a table."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [
        "| network | values | examples | method | activations | announced | measured | announced / measured |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        sizes = [f"{row[name] / 1e6:.0f} MB" for name in ("batch", "announced", "measured")]
        cells = [f"{row['style']}, width {row['width']}", f"{row['values'] / 1e6:.2f} M", str(row["examples"])]
        cells += [row["method"], *sizes, f"{row['announced'] / row['measured']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        lines = options.record.read_text(encoding="utf-8").splitlines() if options.record.exists() else []
        done = [tuple(json.loads(one)[name] for name in ("style", "width", "examples", "method")) for one in lines]
        spawn = multiprocessing.get_context("spawn")
        for case in CASES:
            if case in done:
                continue
            pipe, end = spawn.Pipe()
            process = spawn.Process(target=_work, args=(case, end))
            process.start()
            row = pipe.recv()
            process.join()
            with options.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), file=sys.stderr, flush=True)
    print(table(options.record))


if __name__ == "__main__":
    main()
