"""Cost of the functions that users call first, each as a ratio within one run.

Each row is a function that runs a call and a reference in turns, and takes the smallest CPU seconds of each on one
thread. With `--before FOLDER`, the sources of an earlier commit, another process also runs every row with the earlier
sources. The objectives of the two versions can then be compared. `--chains` prints the convergence of balancing on
chains of layers.

    git worktree add --detach FOLDER COMMIT
    OMP_NUM_THREADS=1 python benchmarks/front_door.py [part of a name] [--rounds 5] [--before FOLDER/src] [--chains]
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from unittest import mock

import torch
from torch import Tensor, nn

import regauge as rg
from regauge.alignment import Result
from regauge.core.balance import balance
from regauge.nets.mlp import ResidualMLP, mlp
from regauge.nets.transformer import GPT

Pair = tuple[rg.Params, rg.Params, rg.Symmetry]
CHAINS = (2, 4, 8, 16, 32, 64)
"""The numbers of layers of the chains."""


@dataclass(frozen=True)
class Row:
    """The cost of a call.

    Attributes:
        name: The name of the call and of its networks.
        seconds: CPU seconds.
        against: The CPU seconds of the reference.
        goal: The target: the largest acceptable ratio.
        reached: The objective of the call. Larger values are better.
    """

    name: str
    seconds: float
    against: float
    goal: float
    reached: float

    @property
    def ratio(self) -> float:
        """The time of the call, divided by the time of the reference."""
        return self.seconds / self.against


class SkipNet(nn.Module):
    """A network of 33 residual convolutions with 32 channels and batch normalization. The sum of skip connections goes
    to three classes.

    The network has the architecture of a published network for DNA (Jaganathan et al., 2019, SpliceAI-10k).
    """

    def __init__(self, channels: int = 32, blocks: int = 16, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv1d(4, channels, 1)
        self.norms = nn.ModuleList(nn.BatchNorm1d(channels) for _ in range(2 * blocks))
        self.convolutions = nn.ModuleList(nn.Conv1d(channels, channels, 11, padding=5) for _ in range(2 * blocks))
        self.skips = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(1 + blocks // 4))
        self.head = nn.Conv1d(channels, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skip: Tensor = self.skips[0](x)
        for k in range(0, len(self.norms), 2):
            y = x
            for j in (k, k + 1):
                y = self.convolutions[j](torch.relu(self.norms[j](y)))
            x = x + y
            if k % 8 == 6:
                skip = skip + self.skips[1 + k // 8](x)
        result: Tensor = self.head(skip)
        return result


def drawn(make: Callable[[], nn.Module], seed: int, dtype: torch.dtype = torch.float32) -> rg.Params:
    """Return a network far from its initialization: biases, gains and statistics differ between units."""
    torch.manual_seed(seed)
    state, chance = make().state_dict(), torch.Generator().manual_seed(seed)
    return {
        name: (t * (1 + torch.rand(t.shape, generator=chance) / 5) + torch.rand(t.shape, generator=chance) / 50).to(
            dtype
        )
        if t.is_floating_point()
        else t
        for name, t in state.items()
    }


def strangers(make: Callable[[], nn.Module], example: Tensor) -> Pair:
    """Return two networks from different seeds."""
    symmetry = rg.discover(make().eval(), (example,), verify=False)
    return drawn(make, 0), drawn(make, 1), symmetry


def near_copies(make: Callable[[], nn.Module], example: Tensor) -> Pair:
    """Return a network, and a copy with 1% noise that is transformed by a random element; in float64."""
    symmetry = rg.discover(make(), (example,), verify=False)
    params, chance = drawn(make, 0, torch.float64), torch.Generator().manual_seed(5)
    noisy = {n: t + t.std() / 100 * torch.randn(t.shape, generator=chance, dtype=t.dtype) for n, t in params.items()}
    symmetry = symmetry.bind(params)
    return params, symmetry.act(symmetry.random(chance), noisy), symmetry


def default_against_keep(name: str, pair: Callable[[], Pair], goal: float, rounds: int) -> Row:
    """Compare the default call of `rg.align` with alignment of networks as stored (`scales="keep"`)."""
    a, b, symmetry = pair()
    keep = rg.WeightMatching(scales="keep")
    calls = (lambda: rg.align(a, b, symmetry), lambda: rg.align(a, b, symmetry, method=keep))
    (seconds, against), (found, _) = in_turns(calls, rounds)
    left = sum(float((a[n].double() - found.params[n].double()).square().sum()) for n in symmetry.sites)
    return Row(f"align: {name}", seconds, against, goal, -left)


def in_turns(
    calls: Sequence[Callable[[], Result[rg.Params]]], rounds: int
) -> tuple[list[float], list[Result[rg.Params]]]:
    """Return the smallest CPU seconds of each call, and the last result of each call."""
    best, found = [math.inf] * len(calls), [call() for call in calls]
    for _ in range(rounds):
        for k, call in enumerate(calls):
            began = time.process_time()
            found[k] = call()
            best[k] = min(best[k], time.process_time() - began)
    return best, found


def residual(blocks: int) -> Callable[[], nn.Module]:
    """Return a residual MLP on whose stream no permutation acts, so that the stream is a linear group."""
    return lambda: ResidualMLP(64, 64, 128, blocks, 10)


def rows_of(rounds: int) -> dict[str, Callable[[], Row]]:
    """Return all rows by name."""
    wide = lambda: mlp(784, 512, 512, 512, 10)  # noqa: E731
    gpt = lambda: GPT(256, 32, width=128, layers=4)  # noqa: E731
    far = {
        "MLP 784-512x3-10": (wide, torch.zeros(2, 784)),
        "GPT, width 128": (gpt, torch.zeros(2, 8, dtype=torch.int64)),
    }
    far |= {f"residual MLP, {blocks} blocks": (residual(blocks), torch.zeros(2, 64)) for blocks in (6, 12, 24)}
    rows: dict[str, Callable[[], Row]] = {}
    for name, (make, example) in far.items():
        rows[name] = lambda n=name, m=make, x=example: default_against_keep(n, lambda: strangers(m, x), 1.5, rounds)
    for blocks in (6, 12):
        name, make = f"residual MLP, {blocks} blocks, nearly equal", residual(blocks)
        rows[name] = lambda n=name, m=make: default_against_keep(
            n, lambda: near_copies(m, torch.zeros(2, 64)), 3, rounds
        )
    name = "33 residual convolutions"
    rows[name] = lambda: default_against_keep(name, lambda: strangers(SkipNet, torch.zeros(2, 4, 32)), 2, rounds)
    return rows


def chain_rows(rounds: int) -> list[dict[str, float]]:
    """Return steps, Hessian products and seconds of balancing for ReLU chains of 64 units per layer with random scales.

    Sources from before Newton's method used rounds over all layers instead of steps.
    """
    found = []
    for layers in CHAINS:
        module = mlp(*[64] * (layers + 1)).double()
        symmetry = rg.discover(module, (torch.zeros(2, 64, dtype=torch.float64),), verify=False)
        params = drawn(lambda m=module: m, 0, torch.float64)
        moved = symmetry.act(symmetry.bind(params).random(torch.Generator().manual_seed(0), ("scale",)), params)
        counts = {"steps": count(SOLVED), "products": count(MULTIPLIED)}
        balance(moved, symmetry)
        row = {"layers": layers, **{name: float(each()) for name, each in counts.items()}, "seconds": math.inf}
        for _ in range(rounds):
            began = time.process_time()
            balance(moved, symmetry)
            row["seconds"] = min(row["seconds"], time.process_time() - began)
        found.append(row)
    return found


SOLVED = (("regauge.core.balance", "_solve"), ("regauge.core.balance", "_extrapolate"))
MULTIPLIED = (("regauge.core.squared_norm", "SquaredNorm.product"),)
"""Functions that are called in every step or round, and for every product, in these or in earlier sources."""


def count(places: Sequence[tuple[str, str]]) -> Callable[[], int]:
    """Count the calls of the first existing function among some functions, until the number is requested."""
    found = next((one for one in places if find_spec(one[0])), None)
    if found is None:
        return lambda: 0
    *owners, name = found[1].split(".")
    owner = reduce(getattr, owners, import_module(found[0]))
    spy = mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))
    calls = spy.start()

    def stop() -> int:
        spy.stop()
        return int(calls.call_count)

    return stop


def run_before(folder: str, arguments: Sequence[str]) -> list[dict[str, float]]:
    """Return the rows of this script with the sources in a folder."""
    environment = {**os.environ, "PYTHONPATH": folder}
    done = subprocess.run(
        [sys.executable, __file__, *arguments, "--json"], env=environment, capture_output=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before")
    parser.add_argument("--chains", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    arguments = [options.name, "--rounds", str(options.rounds), *(["--chains"] if options.chains else [])]
    if options.chains:
        found = chain_rows(options.rounds)
    else:
        rows = [row() for name, row in rows_of(options.rounds).items() if options.name in name]
        found = [{**asdict(row), "ratio": row.ratio} for row in rows]
    if options.json:
        for row in found:
            print(json.dumps(row))
        return
    before = run_before(options.before, arguments) if options.before else [{} for _ in found]
    if options.chains:
        print("| layers | rounds before | s | steps | products | s |\n| " + " | ".join(["---:"] * 6) + " |")
        for then, now in zip(before, found, strict=True):
            told = f"{then.get('steps', math.nan):.0f} | {then.get('seconds', math.nan):.4f}"
            print(f"| {now['layers']} | {told} | {now['steps']:.0f} | {now['products']:.0f} | {now['seconds']:.4f} |")
        return
    print("| call | before | ratio | goal | s | against, s | objective before | objective |")
    print("| " + " | ".join(["---", *["---:"] * 7]) + " |")
    for then, now in zip(before, found, strict=True):
        ratios = f"{then.get('ratio', math.nan):.2f} | **{now['ratio']:.2f}** | {now['goal']}"
        seconds = f"{now['seconds']:.3f} | {now['against']:.3f}"
        print(f"| {now['name']} | {ratios} | {seconds} | {then.get('reached', math.nan):.6g} | {now['reached']:.6g} |")


if __name__ == "__main__":
    main()
