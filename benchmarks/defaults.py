"""Flows with default settings on populations, each beside its control: a shrunk normal distribution.

The defaults were chosen on the populations of `TUNING`; those of `HELD_OUT` were run once, afterwards. A population has
500 networks from starts of their own. Each row is written as soon as it is known, and a run goes on where it ended.

    OMP_NUM_THREADS=1 python benchmarks/defaults.py --out docs/records/defaults.jsonl [--seconds 180] [--only NAME]
    python benchmarks/defaults.py --out docs/records/defaults.jsonl --table
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

import regauge as rg
from regauge import flow
from regauge.core.params import Params, select
from regauge.data import digits

NETWORKS = 500
DRAWN = 200
"""Networks of each kind that are judged."""


@dataclass(frozen=True)
class Population:
    """A way to train a population.

    Attributes:
        make: One network with random weights.
        data: Examples for training and for testing.
        steps: Steps of Adam.
        lr: Its learning rate, which falls as a cosine.
    """

    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]
    steps: int = 600
    lr: float = 1e-2


class Recurrent(nn.Module):
    """A recurrent network with tanh units that reads digits row by row."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.read, self.repeat = nn.Linear(8, width), nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(self.read(x[..., 0, :]))
        for row in range(8):
            state = torch.tanh(self.read(x[..., row, :]) + self.repeat(state))
        result: Tensor = self.out(state)
        return result


def mlp(activation: Callable[[], nn.Module], *widths: int) -> nn.Module:
    """A multilayer perceptron."""
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    """Two convolutions on digits of 8 x 8 pixels."""
    first, second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 10, 3, padding=1)
    return nn.Sequential(
        first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 10)
    )


def moons(count: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two half circles with noise."""
    angle, kind = math.pi * torch.rand(count, generator=chance), torch.randint(0, 2, (count,), generator=chance)
    upper, lower = torch.stack([angle.cos(), angle.sin()], 1), torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    return torch.where(kind[:, None] == 0, upper, lower) + 0.15 * torch.randn(count, 2, generator=chance), kind


def spirals(count: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Three arms of a spiral with noise."""
    radius, kind = torch.rand(count, generator=chance).sqrt(), torch.randint(0, 3, (count,), generator=chance)
    angle = 4 * radius + 2 * math.pi / 3 * kind
    points = 2 * torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return points + 0.08 * torch.randn(count, 2, generator=chance), kind


def in_plane(draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,000 examples for training and 2,000 for testing."""
    chance = torch.Generator().manual_seed(0)
    return (*draw(1000, chance), *draw(2000, chance))


def images(*shape: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Digits of 8 x 8 pixels."""
    data = digits()
    x, y = (one.reshape(len(one), *shape) for one in (data.train_images, data.test_images))
    return x, data.train_labels, y, data.test_labels


TUNING = {
    "two moons, 2-12-12-2, ReLU": Population(lambda: mlp(nn.ReLU, 2, 12, 12, 2), lambda: in_plane(moons)),
    "two moons, 2-12-12-2, tanh": Population(lambda: mlp(nn.Tanh, 2, 12, 12, 2), lambda: in_plane(moons)),
    "digits, 64-16-10, ReLU": Population(lambda: mlp(nn.ReLU, 64, 16, 10), lambda: images(64)),
}
HELD_OUT = {
    "spirals, 2-16-8-3, GELU": Population(lambda: mlp(nn.GELU, 2, 16, 8, 3), lambda: in_plane(spirals), 1500),
    "digits, two convolutions, ReLU": Population(cnn, lambda: images(1, 8, 8), 1000),
    "digits by rows, recurrent, tanh": Population(Recurrent, lambda: images(8, 8), 1000),
}


def train(population: Population, x: Tensor, y: Tensor) -> Params:
    """Train networks from starts of their own, each with batches of its own."""
    torch.manual_seed(0)
    modules = [population.make() for _ in range(NETWORKS)]
    params = {
        name: torch.stack([one.get_parameter(name).detach() for one in modules])
        for name, _ in modules[0].named_parameters()
    }
    base, chance = modules[0], torch.Generator().manual_seed(1)
    gradient = vmap(grad(lambda p, a, b: functional.cross_entropy(functional_call(base, p, (a,)), b)))
    first, second = ({name: torch.zeros_like(t) for name, t in params.items()} for _ in range(2))
    for step in range(1, population.steps + 1):
        chosen = torch.randint(len(x), (NETWORKS, 64), generator=chance)
        slopes = gradient(params, x[chosen], y[chosen])
        rate = population.lr * (1 + math.cos(math.pi * step / population.steps)) / 2
        for name, slope in slopes.items():
            first[name].lerp_(slope, 0.1)
            second[name].lerp_(slope.square(), 0.001)
            size = (second[name] / (1 - 0.999**step)).sqrt() + 1e-8
            params[name] = params[name] - rate * first[name] / (1 - 0.9**step) / size
    return params


def rows_of(name: str, population: Population, seconds: float) -> list[dict[str, Any]]:
    """Rows of a flow and of what stands beside it, on one population."""
    x, y, test_x, test_y = population.data()
    params = train(population, x, y)
    module = population.make().eval()
    symmetry = rg.discover(module, (x[:4],), verify=False)
    seen, test = rg.Task(module, [(x, y)]), rg.Task(module, [(test_x, test_y)])
    parts = flow.divide(params)
    held_out, known = (select(params, torch.from_numpy(parts[part])) for part in ("test", "train"))
    config = flow.FlowConfig(seconds=seconds, is_cpu_time=True, epochs=100_000)
    began = time.process_time()
    plain = flow.fit(params, symmetry, config)
    told = flow.fit(params, symmetry, config, task=seen)
    spent = (time.process_time() - began) / 2
    chance = lambda: torch.Generator().manual_seed(0)  # noqa: E731
    drawn = {
        "normal distribution, shrunk": plain.draw_starts(DRAWN, chance()),
        "flow": plain.sample(DRAWN, generator=chance()),
        "flow, fitted with a task": told.sample(DRAWN, generator=chance()),
        "flow, a tenth kept by training loss": told.sample(DRAWN, generator=chance(), task=seen),
    }
    outlook = plain.about["outlook"]
    facts = {
        "population": name,
        "is_held_out": name in HELD_OUT,
        "values": outlook["values"],
        "seconds": seconds,
        "cpu_seconds": spent,
        "aligned_spread": outlook["spread"],
        "kept": told.about["outlook"]["kept"],
    }
    scored = {kind: flow.judge(networks, known, held_out, symmetry, test) for kind, networks in drawn.items()}
    scores = {"held-out networks": scored["flow"]["held-out"]} | {
        kind: found["generated"] for kind, found in scored.items()
    }
    names = ("networks", "loss", "accuracy", "distance", "spread", "copied")
    return [{**facts, "kind": kind, **{name: getattr(one, name) for name in names}} for kind, one in scores.items()]


def table(path: Path) -> str:
    """The rows of a record as a table."""
    lines = [
        "| population | kind | n | accuracy | loss | nearest | spread | copied |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in map(json.loads, path.read_text().splitlines()):
        numbers = [f"{row[name]:.3f}" for name in ("accuracy", "loss", "distance", "spread", "copied")]
        place = row["population"] + (" (held out)" if row["is_held_out"] else "")
        lines.append(f"| {place} | {row['kind']} | {row['networks']} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(options.out))
        return
    torch.set_num_threads(1)
    done = set()
    if options.out.exists():
        done = {json.loads(line)["population"] for line in options.out.read_text().splitlines()}
    for name, population in (TUNING | HELD_OUT).items():
        if name not in done and options.only in name:
            rows = rows_of(name, population, options.seconds)
            with options.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            print(*(f"{name}: {row['kind']}: {row['accuracy']:.3f}" for row in rows), sep="\n", flush=True)


if __name__ == "__main__":
    main()
