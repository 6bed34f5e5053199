"""Barriers between transformers from different seeds whose residual stream is reordered or rotated.

Pairs of small transformers in the styles of ViT (digits), GPT and Llama (the help topics of Python) are trained from
different seeds on the same data. `rg.align` aligns them with `rotate="never"` and `rotate="always"`. Heads are not tied
to embeddings. The barrier is measured by the loss on test data, on the line in the coordinates of the first network.
Methods with data use only training data. "as trained" is the control without alignment.

    export OMP_NUM_THREADS=1 OUT=docs/records/rotations.jsonl
    python benchmarks/rotations.py ViT GPT Llama --out $OUT
    python benchmarks/rotations.py ViT --only weights --pairs 10 --out $OUT
    python benchmarks/rotations.py GPT Llama --only weights --pairs 5 --out $OUT

Each row is written when it is measured, and existing rows are not measured again.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from lineage_networks import Family, Params, digits, halves, help_topics, windows
from torch import nn
from torch.nn import functional

import regauge as rg
from regauge.alignment import ContinuousDescent, Method, MixedMatching
from regauge.nets.transformer import GPT, Llama, ViT

STEPS = 600
"""The number of steps of Adam for each network."""
BATCHES = 8
"""The number of batches of 64 training examples for methods with data."""


@dataclass(frozen=True)
class Row:
    """A pair of networks, aligned by one method.

    Attributes:
        style: The architecture.
        pair: The number of the pair.
        method: The method of alignment.
        rotate: Whether the stream was rotated.
        losses: The test losses of both endpoints.
        barrier: The largest excess of the loss on the line over the interpolated losses of the endpoints.
    """

    style: str
    pair: int
    method: str
    rotate: str
    losses: tuple[float, float]
    barrier: float


def family(style: str) -> Family:
    """Return an architecture and its data."""
    images, text = digits(), help_topics()
    pictures = [(images.train_images, images.train_labels), (images.test_images, images.test_labels)]
    pieces, symbols = [windows(text.train, 32), windows(text.validation, 32)], len(text.symbols)
    module: nn.Module
    if style == "ViT":
        module, (train, test) = ViT(8, 2, width=48, layers=2, heads=4), pictures
    elif style == "Llama":
        module, (train, test) = Llama(symbols, width=48, layers=2, heads=4, kv_heads=2), pieces
    else:
        module, (train, test) = GPT(symbols, 32, width=48, layers=2, heads=4), pieces
    return Family(style, module.eval(), 2e-3, halves(*train), test)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of classes, or of each token."""
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def methods() -> Iterator[tuple[str, Method]]:
    """Return the methods of the table."""
    yield "weights", rg.WeightMatching()
    yield "mixed", MixedMatching()
    yield "descent, 100 steps", ContinuousDescent("midpoint", init=MixedMatching(), steps=100)


def pair(one: Family, number: int) -> tuple[Params, Params]:
    """Return two networks from different seeds, trained on both halves of the data."""
    inputs, targets = (torch.cat(parts) for parts in zip(*one.halves, strict=True))
    whole = Family(one.name, one.module, one.lr, ((inputs, targets), one.halves[1]), one.test)
    seeds = (2 * number, 2 * number + 1)
    a, b = (whole.train(whole.initialize(seed), 0, seed, STEPS) for seed in seeds)
    return a, b


def measure(style: str, number: int, done: set[tuple[str, int, str, str]], only: str | None) -> Iterator[Row]:
    """Yield the missing rows of a pair, for all methods or one method."""
    ways = [("as trained", None, "never")]
    chosen = [(name, method) for name, method in methods() if only in (None, name)]
    ways += [(name, method, rotate) for name, method in chosen for rotate in ("never", "always")]
    left = [way for way in ways if (style, number, way[0], way[2]) not in done]
    if not left:
        return
    one = family(style)
    (a, b), (inputs, targets) = pair(one, number), one.halves[0]
    seen = [(x, y) for x, y in zip(inputs.split(64), targets.split(64), strict=True)][:BATCHES]
    task, test = rg.Task(one.module, seen, loss), rg.Task(one.module, [one.test], loss)
    for name, method, rotate in left:
        moved = b
        if method is not None:
            given = None if name == "weights" else task
            moved = rg.align(a, b, one.symmetry, method=method, task=given, rotate=rotate).params
        curve = rg.line(a, moved, test)
        yield Row(style, number, name, rotate, (curve.table[0]["loss"], curve.table[-1]["loss"]), curve.barrier)


def main() -> None:
    """Measure the missing rows, and print the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("styles", nargs="*", default=["ViT", "GPT", "Llama"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only", help="a single method of the table")
    parser.add_argument("--out", type=Path, default=Path("rotations.jsonl"))
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(row["style"], row["pair"], row["method"], row["rotate"]) for row in rows}
    for style in options.styles:
        for number in range(options.pairs):
            for row in measure(style, number, done, options.only):
                rows.append(asdict(row))
                with options.out.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
                print(json.dumps(asdict(row)), flush=True)
    print("| style | method | reordered | rotated | pairs |\n| --- | --- | --- | --- | --- |")
    for style, method in dict.fromkeys((row["style"], row["method"]) for row in rows):
        cells, pairs = [], 0
        for rotate in ("never", "always"):
            found = [r["barrier"] for r in rows if (r["style"], r["method"], r["rotate"]) == (style, method, rotate)]
            cells.append(f"{sum(found) / len(found):.3f}" if found else "")
            pairs = max(pairs, len(found))
        print(f"| {style} | {method} | {cells[0]} | {cells[1]} | {pairs} |")


if __name__ == "__main__":
    main()
