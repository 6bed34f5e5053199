"""Learned components with default settings on populations, each next to its controls.

Defaults and bounds were chosen on the populations of `TUNING`. The populations of `HELD_OUT` were run once, afterwards.
A population has 500 networks with separate initializations. Flows and matchers learn from networks that were trained
for the same number of steps. Predictors and autoencoders learn from networks that were trained for different numbers of
steps, from 10 to all. Each row is written as soon as it is measured, and an interrupted run continues.

    OMP_NUM_THREADS=1 python benchmarks/defaults.py --out docs/records/defaults.jsonl [--seconds 180] [--only NAME]
    python benchmarks/defaults.py --out docs/records/defaults.jsonl --table
"""

import argparse
import itertools
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

import regauge as rg
from regauge import flow, learn
from regauge.core.params import Params, select
from regauge.data import digits
from regauge.flow.judging import KnownNetworks

NETWORKS = 500
DRAWN = 200
"""The number of networks of each kind that are evaluated."""
PAIRS = 16
"""The number of pairs of test networks that are aligned."""
LEAST_STEPS = 10
"""The smallest number of training steps of a network."""
Data = tuple[Tensor, Tensor, Tensor, Tensor]
"""Examples and targets for training and for testing."""


@dataclass(frozen=True)
class Population:
    """The training of a population.

    Attributes:
        make: A function that returns one network with random weights.
        data: Examples for training and for testing.
        steps: The number of steps of Adam.
        lr: The learning rate of Adam, which falls as a cosine.
    """

    make: Callable[[], nn.Module]
    data: Callable[[], Data]
    steps: int = 600
    lr: float = 1e-2


class LSTM(nn.Module):
    """A long short-term memory that reads digits row by row, like torch's LSTM, but with operators that `vmap`
    supports.
    """

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.read, self.repeat = nn.Linear(8, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.out, self.width = nn.Linear(width, 10), width

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(*x.shape[:-2], self.width)
        cell = state
        for row in range(8):
            let_in, forget, new, out = (self.read(x[..., row, :]) + self.repeat(state)).chunk(4, -1)
            cell = forget.sigmoid() * cell + let_in.sigmoid() * new.tanh()
            state = out.sigmoid() * cell.tanh()
        result: Tensor = self.out(state)
        return result


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
    """Return a multilayer perceptron."""
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    """Return a network with two convolutions, for digits of 8 x 8 pixels."""
    first, second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 10, 3, padding=1)
    return nn.Sequential(
        first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 10)
    )


def normed() -> nn.Module:
    """Return a network with two convolutions and batch normalization."""
    first, second = nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.Conv2d(6, 10, 3, padding=1, bias=False)
    return nn.Sequential(
        *(first, nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), second, nn.BatchNorm2d(10), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 10)),
    )


def moons(count: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return points on two half circles with noise."""
    angle, kind = math.pi * torch.rand(count, generator=chance), torch.randint(0, 2, (count,), generator=chance)
    upper, lower = torch.stack([angle.cos(), angle.sin()], 1), torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    return torch.where(kind[:, None] == 0, upper, lower) + 0.15 * torch.randn(count, 2, generator=chance), kind


def spirals(count: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return points on three arms of a spiral with noise."""
    radius, kind = torch.rand(count, generator=chance).sqrt(), torch.randint(0, 3, (count,), generator=chance)
    angle = 4 * radius + 2 * math.pi / 3 * kind
    points = 2 * torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return points + 0.08 * torch.randn(count, 2, generator=chance), kind


def shells(count: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return points on three nested spheres with noise."""
    kind = torch.randint(0, 3, (count,), generator=chance)
    points = functional.normalize(torch.randn(count, 3, generator=chance)) * (kind[:, None] + 1) * 0.6
    return points + 0.12 * torch.randn(count, 3, generator=chance), kind


def sampled(draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]) -> Data:
    """Return 1,000 examples for training and 2,000 for testing."""
    chance = torch.Generator().manual_seed(0)
    return (*draw(1000, chance), *draw(2000, chance))


def images(*shape: int) -> Data:
    """Return digits of 8 x 8 pixels."""
    data = digits()
    x, y = (one.reshape(len(one), *shape) for one in (data.train_images, data.test_images))
    return x, data.train_labels, y, data.test_labels


TUNING = {
    "two moons, 2-12-12-2, ReLU": Population(lambda: mlp(nn.ReLU, 2, 12, 12, 2), lambda: sampled(moons)),
    "two moons, 2-12-12-2, tanh": Population(lambda: mlp(nn.Tanh, 2, 12, 12, 2), lambda: sampled(moons)),
    "digits, 64-16-10, ReLU": Population(lambda: mlp(nn.ReLU, 64, 16, 10), lambda: images(64)),
    "spirals, 2-16-8-3, GELU": Population(lambda: mlp(nn.GELU, 2, 16, 8, 3), lambda: sampled(spirals), 1500),
    "digits, two convolutions, ReLU": Population(cnn, lambda: images(1, 8, 8), 1000),
}
HELD_OUT = {
    "digits, CNN with batch normalization, ReLU": Population(normed, lambda: images(1, 8, 8), 400),
    "digits by rows, LSTM": Population(LSTM, lambda: images(8, 8), 800),
    "shells, 3-16-8-3, SiLU": Population(lambda: mlp(nn.SiLU, 3, 16, 8, 3), lambda: sampled(shells), 800),
    "digits by rows, recurrent, tanh": Population(Recurrent, lambda: images(8, 8), 1000),
}


def train(population: Population, x: Tensor, y: Tensor, *, count: int = NETWORKS, varied: bool = False) -> Params:
    """Train networks with separate initializations and batches. If `varied`, the networks are trained for different
    numbers of steps.
    """
    torch.manual_seed(0)
    modules = [population.make() for _ in range(count)]
    params = {
        name: torch.stack([one.get_parameter(name).detach() for one in modules])
        for name, _ in modules[0].named_parameters()
    }
    base, chance = modules[0], torch.Generator().manual_seed(1)
    for part in base.modules():
        if isinstance(part, nn.BatchNorm2d):  # Statistics of batches, until the training is over.
            part.track_running_stats = False
            part.running_mean = part.running_var = part.num_batches_tracked = None
    lengths = torch.full((count,), float(population.steps))
    if varied:
        shares = torch.rand(count, generator=chance)
        lengths = (LEAST_STEPS * (population.steps / LEAST_STEPS) ** shares).round()
    gradient = vmap(grad(lambda p, a, b: functional.cross_entropy(functional_call(base, p, (a,)), b)))
    first, second = ({name: torch.zeros_like(t) for name, t in params.items()} for _ in range(2))
    for step in range(1, int(lengths.max()) + 1):
        chosen = torch.randint(len(x), (count, 64), generator=chance)
        slopes = gradient(params, x[chosen], y[chosen])
        rates = population.lr * (1 + (math.pi * (step / lengths).clamp_max(1)).cos()) / 2
        for name, slope in slopes.items():
            first[name].lerp_(slope, 0.1)
            second[name].lerp_(slope.square(), 0.001)
            size = (second[name] / (1 - 0.999**step)).sqrt() + 1e-8
            rate = rates.view(-1, *[1] * (slope.ndim - 1))
            params[name] = params[name] - rate * first[name] / (1 - 0.9**step) / size
    whole = population.make()
    buffers = {name: tensor.expand(count, *tensor.shape) for name, tensor in whole.named_buffers()}
    if not buffers:
        return params
    each = [rg.connect.reset_batchnorm(select(params | buffers, k), whole, [(x, y)]) for k in range(count)]
    return {name: torch.stack([one[name] for one in each]) for name in each[0]}


@dataclass(frozen=True)
class Case:
    """A population with everything that its components need.

    Attributes:
        population: The training of the networks.
        module: The module that runs the networks.
        symmetry: The symmetry of the networks.
        seen: The examples on which networks were trained.
        test: Examples that were not used for training.
        seconds: CPU seconds of each training.
    """

    population: Population
    module: nn.Module
    symmetry: rg.Symmetry
    seen: rg.Task
    test: rg.Task
    seconds: float

    @classmethod
    def of(cls, population: Population, seconds: float) -> "Case":
        """Load the examples, and find the symmetry."""
        x, y, test_x, test_y = population.data()
        module = population.make().eval()
        tasks = rg.Task(module, [(x, y)]), rg.Task(module, [(test_x, test_y)])
        return cls(population, module, rg.discover(module, (x[:4],), verify=False), *tasks, seconds)

    @cached_property
    def alike(self) -> Params:
        """Networks that were trained for all steps."""
        return train(self.population, *next(iter(self.seen.batches)))

    @cached_property
    def varied(self) -> Params:
        """Networks that were trained for different numbers of steps."""
        return train(self.population, *next(iter(self.seen.batches)), varied=True)

    @property
    def budget(self) -> dict[str, Any]:
        """The time budget, the only setting without its default value."""
        return {"seconds": self.seconds, "is_cpu_time": True, "epochs": 100_000}

    def accuracies(self, params: Params) -> Tensor:
        """Return the accuracy of each network on the test examples."""
        return self.test.evaluate_each(params)["accuracy"]


Row = dict[str, Any]


def fit_flows(case: Case) -> list[Row]:
    """Evaluate a flow next to held-out networks and to the normal distribution from which the flow starts."""
    parts = flow.divide(case.alike)
    held_out, known = (select(case.alike, torch.from_numpy(parts[part])) for part in ("test", "train"))
    config = flow.FlowConfig(**case.budget)
    plain = flow.fit(case.alike, case.symmetry, config)
    told = flow.fit(case.alike, case.symmetry, config, task=case.seen)
    chance = lambda: torch.Generator().manual_seed(0)  # noqa: E731
    drawn = {
        "normal distribution, shrunk": plain.draw_starts(DRAWN, chance()),
        "flow": plain.sample(DRAWN, generator=chance()),
        "flow, fitted with a task": told.sample(DRAWN, generator=chance()),
        "flow, a tenth kept by training loss": told.sample(DRAWN, generator=chance(), task=case.seen, moves=0),
        "flow, kept and moved by training loss": told.sample(DRAWN, generator=chance(), task=case.seen),
    }
    judges = KnownNetworks.of(known, held_out, case.symmetry, case.test, DRAWN)
    scored = {kind: judges.judge(networks) for kind, networks in drawn.items()}
    scores = {"held-out networks": scored["flow"]["held-out"]} | {
        kind: found["generated"] for kind, found in scored.items()
    }
    names = ("networks", "loss", "accuracy", "distance", "spread", "copied")
    outlook = {f"outlook_{name}": value for name, value in told.about["outlook"].items()}
    return [{"kind": kind, **{name: getattr(one, name) for name in names}, **outlook} for kind, one in scores.items()]


def fit_predictors(case: Case) -> list[Row]:
    """Return R2 for the accuracy of networks that were trained for different numbers of steps."""
    accuracies = case.accuracies(case.varied)
    config = learn.PredictorConfig(kind="numbers", **case.budget)
    made = learn.fit_predictor(case.varied, accuracies, case.symmetry, config)
    count = made.about["networks"]["test"]
    return [
        {"kind": kind, "networks": count, "R2": one["R2"], "tau": one["tau"], "verdict": made.verdict}
        for kind, one in made.about["scores"].items()
    ]


def fit_matchers(case: Case) -> list[Row]:
    """Return the increase of the loss halfway between test networks, on test examples."""
    config = learn.MatchingConfig(**case.budget)
    made = learn.fit_matching(case.alike, case.symmetry, config, task=case.seen)
    test = torch.from_numpy(flow.divide(case.alike)["test"])[: PAIRS + 1]
    pairs = [tuple(select(case.alike, int(k)) for k in pair) for pair in itertools.pairwise(test)]
    plain = rg.WeightMatching()
    scaled = rg.ContinuousDescent("midpoint", init=plain, steps=made.steps)
    methods: dict[str, tuple[rg.alignment.Method | None, rg.Task | None]] = {
        "no alignment": (None, None),
        "weight matching": (plain, None),
        "learned": (made, None),
        "weight matching, then scales": (scaled, case.seen),
        "learned, with a task": (made, case.seen),
    }
    rows = []
    for kind, (method, task) in methods.items():
        found = []
        for a, b in pairs:
            moved = b if method is None else rg.align(a, b, case.symmetry, method=method, task=task).params
            ends = [case.test.evaluate(one)["loss"] for one in (a, moved)]
            found.append(case.test.midpoint_loss(a, moved) - sum(ends) / 2)
        error = np.std(found, ddof=1) / len(found) ** 0.5
        measured = {"networks": len(found), "rise": float(np.mean(found)), "error": float(error)}
        rows.append({"kind": kind, **measured, "verdict": made.about["verdict"]})
    return rows


def fit_autoencoders(case: Case) -> list[Row]:
    """Return the mean difference between the accuracies of networks and of their decoded networks."""
    config = learn.AutoencoderConfig(loss=learn.SquaredError(), **case.budget)
    made = learn.fit_autoencoder(case.varied, case.symmetry, config, task=case.seen)
    parts = flow.divide(case.varied)
    known, test = (select(case.varied, torch.from_numpy(parts[part])) for part in ("train", "test"))
    own, twins = case.accuracies(test), case.accuracies(made.canonicalize(test))
    best = case.accuracies(known).median()
    found = {"autoencoder": (own - twins).abs().mean(), "one accuracy, for all": (own - best).abs().mean()}
    verdict = made.about["verdict"]
    return [
        {"kind": kind, "networks": len(own), "L1": float(value), "verdict": verdict} for kind, value in found.items()
    ]


PARTS: dict[str, Callable[[Case], list[Row]]] = {
    "flow": fit_flows,
    "predictor": fit_predictors,
    "matcher": fit_matchers,
    "autoencoder": fit_autoencoders,
}
COLUMNS = {
    "flow": {"accuracy": "accuracy", "loss": "loss", "nearest": "distance", "spread": "spread", "copied": "copied"},
    "predictor": {"R2": "R2", "tau": "tau"},
    "matcher": {"rise": "rise", "±": "error"},
    "autoencoder": {"L1": "L1"},
}


def table(path: Path, part: str) -> str:
    """Return the rows of a component in a record as a table."""
    columns = COLUMNS[part]
    lines = [f"| population | kind | n | {' | '.join(columns)} |", f"| --- | --- | ---: |{' ---: |' * len(columns)}"]
    for row in map(json.loads, path.read_text().splitlines()):
        if row["part"] == part:
            numbers = [f"{row[name]:.3f}" for name in columns.values()]
            place = row["population"] + (" (held out)" if row["is_held_out"] else "")
            lines.append(f"| {place} | {row['kind']} | {row['networks']} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--only", default="", help="populations whose name contains this")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print("\n\n".join(table(options.out, part) for part in options.parts))
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)  # What a flow warns of is in its rows.
    done = set()
    if options.out.exists():
        done = {(row["population"], row["part"]) for row in map(json.loads, options.out.read_text().splitlines())}
    for name, population in (TUNING | HELD_OUT).items():
        parts = [part for part in options.parts if (name, part) not in done]
        if not parts or options.only not in name:
            continue
        case = Case.of(population, options.seconds)
        for part in parts:
            facts = {"part": part, "population": name, "is_held_out": name in HELD_OUT, "seconds": options.seconds}
            rows = [{**facts, **row} for row in PARTS[part](case)]
            with options.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            print(*rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
