"""Cost of aligning one small pair, relative to a plain loop over layers.

The loop is weight matching as published. For each layer, it computes the product of both networks' weights, with the
second network permuted by all other layers, and calls `scipy.optimize.linear_sum_assignment`, until no layer changes.
The loop begins at the identity, only permutes, and checks nothing. The loop runs to its end, or for as many sweeps as
`rg.align` needs, including the first choice of all layers. `rg.align` runs with the permutations alone, and with all
groups as by default. `rg.alignment.align_pairs` aligns many pairs at once. Networks are random, because weights change
only the number of sweeps.

Times are CPU milliseconds of one thread for a pair, as the minimum over several rounds in which the methods alternate,
because other processes can disturb such short times.

    OMP_NUM_THREADS=1 python benchmarks/small_pairs.py [part of a name] [--rounds 8]

With `--matchers`, the command prints the number of pairs that weight matching and learned matchers with nets of several
widths align in one second on one thread, in one call. The nets are hardly trained, which changes their results but
hardly the time.

    OMP_NUM_THREADS=1 python benchmarks/small_pairs.py --matchers
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import regauge as rg
from regauge import learn
from regauge.nets.mlp import mlp
from regauge.nets.siren import Siren

PAIRS = 20
BATCH = 200
WIDTHS = (64, 32, 16)
"""The widths of the nets of learned matchers."""


@dataclass(frozen=True)
class Matched:
    """Networks that matchers align."""

    name: str
    make: Callable[[], nn.Module]
    example: tuple[int, ...]  # the shape of an input
    pairs: int
    probes: tuple[int, ...]  # of the nets of each width


MATCHED = (
    Matched("sine 2-32-32-1", lambda: Siren(2, 32, 1), (2,), 1024, (0, 0, 0)),
    Matched("ReLU MLP 784-128-128-128-10", lambda: mlp(784, 128, 128, 128, 10), (784,), 64, (128, 64, 32)),
)


def small_cnn() -> nn.Module:
    """Return a network of three 3 x 3 convolutions with batch normalization, the mean over positions, and a linear
    layer.
    """
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


@dataclass(frozen=True)
class Case:
    """One row: pairs of random networks, their symmetry, and its permutations."""

    name: str
    symmetry: rg.Symmetry
    permutations: rg.Symmetry
    pairs: Sequence[tuple[rg.Params, rg.Params]]

    @classmethod
    def of(cls, name: str, module: nn.Module, example: Tensor) -> "Case":
        """Return random pairs of an architecture."""
        symmetry = rg.discover(module.eval(), (example,))
        generator = torch.Generator().manual_seed(0)
        pairs = [(_random(module, generator), _random(module, generator)) for _ in range(PAIRS)]
        return cls(name, symmetry, _permutations_of(symmetry), pairs)


def _random(module: nn.Module, generator: torch.Generator) -> rg.Params:
    """Return normal weights of the usual size, with gains and variances around one."""
    params = {}
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            params[name] = tensor.clone()
        elif tensor.ndim > 1:
            params[name] = torch.randn(tensor.shape, generator=generator) / math.sqrt(tensor[0].numel())
        elif bool((tensor == 1).all()):
            params[name] = 0.5 + torch.rand(tensor.shape, generator=generator)
        else:
            params[name] = torch.randn(tensor.shape, generator=generator) / 10
    return params


def _permutations_of(symmetry: rg.Symmetry) -> rg.Symmetry:
    groups = [
        replace(
            group,
            scales=0,
            signs=0,
            shifts=0,
            placements=tuple(replace(p, scale=(), sign=(), parity=(), shift=()) for p in group.placements),
        )
        for group in symmetry.groups
    ]
    return replace(symmetry, groups=tuple(groups))


class Loop:
    """The plain loop for one architecture."""

    def __init__(self, symmetry: rg.Symmetry) -> None:
        self._sizes = {group.name: group.size for group in symmetry.groups}
        self._places = {
            group.name: [(p.parameter, p.axis) for p in group.placements if p.parameter not in symmetry.buffers]
            for group in symmetry.groups
        }
        self._axes: dict[str, dict[int, str]] = {}
        for group in symmetry.groups:
            for place in group.placements:
                self._axes.setdefault(place.parameter, {})[place.axis] = group.name

    def __call__(self, a: rg.Params, b: rg.Params, sweeps: int = 100) -> tuple[rg.Params, int]:
        """Return the transformed second network, and the number of sweeps."""
        perms = {name: torch.arange(size) for name, size in self._sizes.items()}
        done, is_changed = 0, True
        while is_changed and done < sweeps:
            done, is_changed = done + 1, False
            for group, places in self._places.items():
                size = self._sizes[group]
                profit = torch.zeros(size, size)
                for name, axis in places:
                    moved = b[name]
                    for other, theirs in self._axes[name].items():
                        if other != axis:
                            moved = moved.index_select(other, perms[theirs])
                    left, right = (t.movedim(axis, 0).reshape(size, -1) for t in (a[name], moved))
                    profit += left @ right.T
                found = torch.from_numpy(linear_sum_assignment(profit.numpy(), maximize=True)[1])
                old, new = (float(profit.gather(1, p[:, None]).sum()) for p in (perms[group], found))
                if new > old + 1e-6:
                    perms[group], is_changed = found, True
        result = dict(b)
        for name, row in self._axes.items():
            for axis, group in row.items():
                result[name] = result[name].index_select(axis, perms[group])
        return result, done


def measure(case: Case, rounds: int) -> tuple[str, ...]:
    """Return a row of the table."""
    loop = Loop(case.permutations)
    ours = [len(rg.align(a, b, case.permutations).history) for a, b in case.pairs]
    theirs = [loop(a, b)[1] for a, b in case.pairs]
    many = [{n: torch.stack([pair[k][n] for pair in case.pairs]) for n in case.pairs[0][0]} for k in (0, 1)]
    first, second = ({n: t.repeat(BATCH // PAIRS, *[1] * (t.ndim - 1)) for n, t in p.items()} for p in many)

    def each(align: Callable[[rg.Params, rg.Params, int], object]) -> Callable[[], int]:
        def run() -> int:
            for (a, b), sweeps in zip(case.pairs, ours, strict=True):
                align(a, b, sweeps)
            return PAIRS

        return run

    def batch(symmetry: rg.Symmetry) -> Callable[[], int]:
        def run() -> int:
            rg.alignment.align_pairs(first, second, symmetry)
            return BATCH

        return run

    ways = [
        each(loop),
        each(lambda a, b, _: loop(a, b)),
        each(lambda a, b, _: rg.align(a, b, case.permutations)),
        each(lambda a, b, _: rg.align(a, b, case.symmetry)),
        batch(case.permutations),
        batch(case.symmetry),
    ]
    best = [math.inf] * len(ways)
    for _ in range(rounds):
        for k, run in enumerate(ways):
            began = time.process_time()
            count = run()
            best[k] = min(best[k], 1e3 * (time.process_time() - began) / count)
    alike, alone, permutations, everything, many_permutations, many_everything = best
    return (
        case.name,
        f"{alone:.2f} ({sum(theirs) / PAIRS:.1f})",
        f"{alike:.2f} ({sum(ours) / PAIRS:.1f})",
        f"{permutations:.2f}",
        f"{permutations / alone:.1f}",
        f"{everything:.2f}",
        f"{everything / permutations:.1f}",
        f"{many_permutations:.2f}",
        f"{many_everything:.2f}",
    )


def measure_matchers(rounds: int) -> None:
    """Print the number of aligned pairs per second, as the best of several rounds."""
    print("| networks | pairs | method | pairs a second | ms a pair | ms, all to one network |")
    print("| --- | ---: | --- | ---: | ---: | ---: |")
    for case in MATCHED:
        module, chance = case.make(), torch.Generator().manual_seed(0)
        inputs = torch.randn(max(2, *case.probes), *case.example, generator=chance)
        symmetry = rg.discover(module.eval(), inputs[:2])
        networks = [_random(module, chance) for _ in range(2 * case.pairs)]
        stacked = {name: torch.stack([one[name] for one in networks]) for name in networks[0]}
        first, second = ({n: t[k::2] for n, t in stacked.items()} for k in range(2))
        methods: dict[str, rg.alignment.Method] = {"weight matching": rg.WeightMatching()}
        for width, probes in zip(WIDTHS, case.probes, strict=True):
            settings = learn.MatchingConfig(
                width=width, depth=2, vectors=2 * width, probes=probes, line=0.0, distance=1.0, seconds=1
            )
            matcher = learn.fit_matching(
                stacked,
                symmetry,
                settings,
                generator=torch.Generator().manual_seed(0),
                indices=range(64),
                module=module,
                inputs=inputs,
            )
            name = f"learned, two layers of width {width}" + (f", {probes} probes" if probes else "")
            methods |= {name: replace(matcher, sweeps=0), f"{name}, a sweep": replace(matcher, sweeps=1)}
        for name, method in methods.items():
            best = [math.inf, math.inf]
            for _ in range(rounds):
                for k, left in enumerate((first, networks[0])):
                    began = time.process_time()
                    rg.alignment.align_pairs(left, second, symmetry, method=method)
                    best[k] = min(best[k], (time.process_time() - began) / case.pairs)
            cells = (case.name, case.pairs, name, f"{1 / best[0]:.0f}", *(f"{1e3 * one:.2f}" for one in best))
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--matchers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.matchers:
        measure_matchers(options.rounds)
        return
    columns = (
        "networks",
        "loop (sweeps)",
        "loop, our sweeps",
        "permutations",
        "/ loop",
        "all groups",
        "/ permutations",
    )
    print("| " + " | ".join((*columns, "many pairs, permutations", "many pairs, all groups")) + " |")
    print("| " + " | ".join(["---"] * (len(columns) + 2)) + " |")
    settings: list[tuple[str, nn.Module, Tensor]] = [
        ("ReLU MLP 64-64-64-10", mlp(64, 64, 64, 10), torch.zeros(2, 64)),
        ("CNN with batch normalization, 16-32-32 channels", small_cnn(), torch.zeros(2, 3, 8, 8)),
        ("sine 2-32-32-1", Siren(2, 32, 1), torch.zeros(2, 2)),
    ]
    for name, module, example in settings:
        if options.name in name:
            print("| " + " | ".join(measure(Case.of(name, module, example), options.rounds)) + " |", flush=True)


if __name__ == "__main__":
    main()
