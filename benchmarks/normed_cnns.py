"""What the coordinates of gains do to averages of CNNs with batch normalization: methods and coordinates, pair by pair.

Two populations of networks from starts of their own make disjoint pairs. The second network of each pair is aligned,
and the barrier of the linear path is measured on test images. Statistics are recomputed in every network on the path.
"rise" is the excess halfway, "rise, kept" the same with averaged statistics.

    OMP_NUM_THREADS=1 python benchmarks/normed_cnns.py --out docs/records/normed-cnns.jsonl --cache FOLDER
    python benchmarks/normed_cnns.py --out docs/records/normed-cnns.jsonl --table
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from defaults import HELD_OUT, Data, Population, train
from torch import nn

import regauge as rg
from regauge.core.params import select
from regauge.data import fashion_mnist

PAIRS = 24
IMAGES = 2000
"""Training images by which statistics are recomputed."""
POINTS = 9
DEFAULT = "weights, default"
Moves = Mapping[str, Callable[[rg.Params, rg.Params], rg.Params]]


def deeper() -> nn.Module:
    """Three convolutions with batch normalization."""
    layers: list[nn.Module] = []
    for before, after in ((1, 12), (12, 24), (24, 24)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if after > before else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))


def clothes() -> Data:
    """Fashion-MNIST of 14 x 14 pixels, a part of it."""
    data = fashion_mnist().pooled(2)
    return data.train_images[:10000], data.train_labels[:10000], data.test_images[:5000], data.test_labels[:5000]


POPULATIONS = {
    "digits, channels 6-10": HELD_OUT["digits, CNN with batch normalization, ReLU"],
    "Fashion-MNIST, channels 12-24-24": Population(deeper, clothes, 800),
}


def networks(name: str, cache: Path) -> rg.Params:
    """The trained networks of a population, from the cache if it has them."""
    path = cache / f"{name.replace(' ', '_')}.safetensors"
    if not path.exists():
        population = POPULATIONS[name]
        x, y, *_ = population.data()
        cache.mkdir(parents=True, exist_ok=True)
        rg.save(train(population, x, y, count=2 * PAIRS), path)
    return rg.load(path)


def moves(symmetry: rg.Symmetry, task: rg.Task) -> Moves:
    """What makes the second network of a pair more similar to the first one."""
    given = replace(symmetry, translations=(), gains=())  # Matched without representatives.

    def align(a: rg.Params, b: rg.Params, sym: rg.Symmetry, method: Any, **options: Any) -> rg.Params:
        return rg.align(a, b, sym, method=method, **options).params

    def only_permute(a: rg.Params, b: rg.Params, sym: rg.Symmetry, method: Any, **options: Any) -> rg.Params:
        element, blank = rg.align(a, b, sym, method=method, **options).element.translated({}), symmetry.identity()
        for group in symmetry.groups:
            element = element.replace(group.name, replace(element[group.name], scale=blank[group.name].scale))
        return symmetry.act(element, b)

    weights, descent = rg.WeightMatching(), rg.ContinuousDescent("midpoint", init=rg.WeightMatching(), steps=100)
    return {
        "no alignment": lambda a, b: b,
        DEFAULT: partial(align, sym=symmetry, method=weights),
        "weights, without representatives": partial(align, sym=given, method=weights),
        "weights, `scales='recompute'`": partial(align, sym=symmetry, method=replace(weights, scales="recompute")),
        "weights, `scales='keep'`": partial(align, sym=symmetry, method=replace(weights, scales="keep")),
        "order of the default, own scales": partial(only_permute, sym=symmetry, method=weights),
        "order without representatives, own scales": partial(only_permute, sym=given, method=weights),
        "activations": partial(align, sym=symmetry, method=rg.ActivationMatching(), task=task),
        "order of activations, own scales": partial(
            only_permute, sym=symmetry, method=rg.ActivationMatching(), task=task
        ),
        "weights, then scales by the loss": partial(align, sym=symmetry, method=descent, task=task),
    }


def measure(name: str, cache: Path, done: set[tuple[str, int, str]], out: Path) -> None:
    """Append a row for each pair and kind that the record lacks."""
    population = POPULATIONS[name]
    x, y, test_x, test_y = population.data()
    x, y, module = x[:IMAGES], y[:IMAGES], population.make().eval()
    prepare = partial(rg.connect.reset_batchnorm, module=module, batches=[x])
    task, test = rg.Task(module, [(x, y)], prepare=prepare), rg.Task(module, [(test_x, test_y)])
    symmetry = rg.discover(module, (x[:4],), verify=False)
    known = networks(name, cache)
    for pair in range(PAIRS):
        a, b = (select(known, 2 * pair + k) for k in (0, 1))
        for kind, move in moves(symmetry, task).items():
            if (name, pair, kind) in done:
                continue
            moved = move(a, b)
            curve = rg.line(a, moved, test, POINTS, prepare=prepare)
            ends = [test.evaluate(one)["loss"] for one in (a, moved)]
            row = {"population": name, "pair": pair, "kind": kind, "barrier": curve.barrier}
            row["rise"] = curve.excess[POINTS // 2]
            row["rise, kept"] = test.midpoint_loss(a, moved) - sum(ends) / 2
            row["accuracy"] = curve.table[POINTS // 2]["accuracy"]
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def table(path: Path) -> str:
    """Means over pairs with standard errors, and the paired difference of the barrier to the default."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    lines = ["| population | kind | n | barrier | more than the default | rise, kept | accuracy halfway |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for name in dict.fromkeys(row["population"] for row in rows):
        own = [row for row in rows if row["population"] == name]
        default = {row["pair"]: row["barrier"] for row in own if row["kind"] == DEFAULT}
        for kind in dict.fromkeys(row["kind"] for row in own):
            some = [row for row in own if row["kind"] == kind]
            differences = [row["barrier"] - default[row["pair"]] for row in some]
            cells = [_mean([row["barrier"] for row in some]), "" if kind == DEFAULT else _mean(differences, "+")]
            cells += [_mean([row["rise, kept"] for row in some])]
            accuracy = sum(row["accuracy"] for row in some) / len(some)
            lines.append(f"| {name} | {kind} | {len(some)} | {' | '.join(cells)} | {accuracy:.3f} |")
    return "\n".join(lines)


def _mean(values: list[float], sign: str = "") -> str:
    """A mean with its standard error."""
    found = torch.tensor(values, dtype=torch.float64)
    return f"{found.mean():{sign}.3f} ± {found.std() / len(found) ** 0.5:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="folder of the trained networks, which a later run reads")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(options.out))
        return
    torch.set_num_threads(1)
    lines = options.out.read_text("utf-8").splitlines() if options.out.exists() else []
    done = {(row["population"], row["pair"], row["kind"]) for row in map(json.loads, lines)}
    for name in POPULATIONS:
        measure(name, options.cache, done, options.out)


if __name__ == "__main__":
    main()
