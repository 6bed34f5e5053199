"""Three Transolvers from different seeds, averaged: as trained, aligned, and trained further.

A public report averaged three seeds of a Transolver: each network had an error of 13.2, and the average had an error of
3,618. In this benchmark, three Transolvers solve Poisson's equation on the unit square at scattered points. The input
of a point is its position and the right-hand side at the point, a random sum of nine sines. The target is the solution
at the point, in units of its standard deviation. The network has physics attention: points are distributed to slices by
soft weights, slices attend to one another, and points read their slices (Wu et al. 2024, section 3.2). The heads share
slices, keys and values, as published.

Methods use half of the training examples, and learned methods use a quarter of this half for validation. Rows with
"trained on" take steps of Adam from the average on the same examples, with and without alignment. Errors are relative
L2 errors on test examples, averaged over examples. Training is short: each network still has an error of about one
half.

    OMP_NUM_THREADS=1 python benchmarks/physics_attention.py docs/records/physics-attention.jsonl

Each line of the record is one group of three networks.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import regauge as rg
from regauge.alignment import ContinuousDescent, DataMatching, MergeMany, Method
from regauge.core.interpolation import mean

Params = dict[str, Tensor]
WIDTH, LAYERS, HEADS, SLICES = 32, 2, 4, 8
POINTS, TRAIN, TEST, WAVES = 48, 1024, 256, 3
STEPS, BATCH, RATE = 600, 64, 4e-3
FURTHER = (100, 400)
"""The number of training steps from an average."""


class PhysicsAttention(nn.Module):
    """Attention of soft slices of the points: `[example, point, width]` to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.slice_source, self.value_source = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slices = nn.Linear(size, SLICES)
        self.temperature = nn.Parameter(torch.full((HEADS, 1, 1), 0.5))
        self.query, self.key, self.value = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        sources, values = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.slice_source, self.value_source)
        )
        weights = (self.slices(sources) / self.temperature).softmax(-1)
        tokens = weights.transpose(-1, -2) @ values / (weights.sum(-2).unsqueeze(-1) + 1e-5)
        scores = self.query(tokens) @ self.key(tokens).transpose(-1, -2) / math.sqrt(tokens.shape[-1])
        mixed = weights @ (scores.softmax(-1) @ self.value(tokens))
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Physics attention and a layer of GELU units, each behind a LayerNorm and next to a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.attention = nn.LayerNorm(WIDTH), PhysicsAttention()
        self.second_norm = nn.LayerNorm(WIDTH)
        self.units = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x))
        return x + self.units(self.second_norm(x))


class Transolver(nn.Module):
    """Points with the right-hand side, `[example, point, 3]`, to solutions `[example, point, 1]`."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(3, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.read = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.norm(self.blocks(self.enter(x))))


def solutions(examples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of examples of Poisson's equation with zero values on the boundary, in closed form."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(examples, POINTS, 2, generator=generator)
    amounts = torch.randn(examples, WAVES, WAVES, generator=generator)
    waves = torch.arange(1, WAVES + 1.0)
    x, y = ((math.pi * points[..., axis, None] * waves).sin() for axis in (0, 1))
    squares = waves[:, None].square() + waves.square()
    right = torch.einsum("epm,epn,emn->ep", x, y, amounts) / 2
    solution = torch.einsum("epm,epn,emn->ep", x, y, amounts / squares)
    scale = ((1 / squares).square().sum() / 4).sqrt()  # the mean square of a product of sines is a quarter
    return torch.cat([points, right.unsqueeze(-1)], -1), (solution / scale).unsqueeze(-1)


def train(module: nn.Module, start: Params, data: tuple[Tensor, Tensor], steps: int, rate: float, seed: int) -> Params:
    """Train from an initialization with Adam, whose learning rate falls as a cosine."""
    generator = torch.Generator().manual_seed(seed)
    module.load_state_dict(start)
    optimizer = torch.optim.Adam(module.parameters(), rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        rows = torch.randint(len(data[0]), (BATCH,), generator=generator)
        optimizer.zero_grad()
        functional.mse_loss(module(data[0][rows]), data[1][rows]).backward()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def measure(group: int, steps: int = STEPS) -> dict[str, Any]:
    """Return the errors of three networks and of their averages."""
    train_data, (inputs, targets) = solutions(TRAIN, 0), solutions(TEST, 1)
    module = Transolver()
    networks: list[Params] = []
    for seed in range(3 * group, 3 * group + 3):
        torch.manual_seed(seed)
        networks.append(train(module, dict(Transolver().state_dict()), train_data, steps, RATE, seed))

    def error(params: Params) -> float:
        with torch.no_grad():
            gap = torch.func.functional_call(module, params, (inputs,)) - targets
        return float((gap.flatten(1).norm(dim=1) / targets.flatten(1).norm(dim=1)).mean())

    symmetry = rg.discover(module, (inputs[:2],))
    seen = tuple(part[: TRAIN // 2] for part in train_data)
    task = rg.Task(module, list(zip(*(part.split(64) for part in seen), strict=True)), functional.mse_loss)
    rows: dict[str, Any] = {}

    def add(name: str, make: Callable[[], Sequence[Params]], further: Sequence[int] = ()) -> None:
        begun = time.process_time()
        average = mean(make())
        rows[name] = {"error": error(average), "cpu_seconds": time.process_time() - begun}
        for more in further:
            began = time.process_time()
            trained = train(module, average, seen, more, RATE / 4, group)
            rows[f"{name}, trained on for {more} steps"] = {
                "error": error(trained),
                "cpu_seconds": rows[name]["cpu_seconds"] + time.process_time() - began,
            }

    def aligned(method: Method, rotate: Any = "auto") -> Callable[[], Sequence[Params]]:
        given = None if isinstance(method, MergeMany) else task
        return lambda: rg.align_many(networks, symmetry, method=method, task=given, rotate=rotate).params

    add("as trained", lambda: networks, FURTHER)
    add("by weights, reordered", aligned(MergeMany(), "never"))
    add("by weights", aligned(MergeMany()))
    add("by data", aligned(DataMatching()))
    add("learned", aligned(ContinuousDescent()), FURTHER[:1])
    return {
        "group": group,
        "parameters": sum(tensor.numel() for tensor in networks[0].values()),
        "groups": len(symmetry.groups),
        "errors": [error(one) for one in networks],
        "rows": rows,
    }


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return, for each row, the mean over groups of networks of the errors and of their ratios to the best of three
    networks.
    """
    found = [
        "| average of three | n | error | times the best of three | CPU s |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]

    def row(name: str, errors: list[float], seconds: str) -> str:
        ratios = [one / min(line["errors"]) for one, line in zip(errors, lines, strict=True)]
        return f"| {name} | {len(lines)} | {_mean(errors):.4f} | {_mean(ratios):.2f} | {seconds} |"

    found.append(row("best of three", [min(line["errors"]) for line in lines], ""))
    found.append(row("worst of three", [max(line["errors"]) for line in lines], ""))
    for name in lines[0]["rows"]:
        given = [line["rows"][name] for line in lines]
        found.append(row(name, [one["error"] for one in given], f"{_mean([one['cpu_seconds'] for one in given]):.0f}"))
    return "\n".join(found)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--groups", type=int, default=1, help="groups of three networks; those of the record are kept")
    options = parser.parse_args()
    done = options.record.read_text(encoding="utf-8").splitlines() if options.record.exists() else []
    for group in range(len(done), options.groups):
        done.append(json.dumps(measure(group)))
        with options.record.open("a", encoding="utf-8") as file:
            file.write(done[-1] + "\n")
    print(table([json.loads(line) for line in done]))


if __name__ == "__main__":
    main()
