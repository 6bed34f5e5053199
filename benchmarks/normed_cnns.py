"""Averages of CNNs with batch normalization, by method and by the coordinates of gains, pair by pair.

Two populations of networks with separate initializations form disjoint pairs. The second network of each pair is
aligned, and the barrier of the linear path is measured on test images. Statistics are recomputed in every network on
the path. "rise" is the excess halfway. "rise, kept" is the excess halfway with averaged statistics.

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
from regauge.core.element import Element
from regauge.core.params import select
from regauge.data import fashion_mnist

PAIRS = 24
"""The number of pairs of trained networks in each population."""
IMAGES = 2000
"""The number of training images from which statistics are recomputed."""
POINTS = 9
DEFAULT = "weights, default"
Moves = Mapping[str, Callable[[rg.Params, rg.Params], rg.Params]]


def deeper() -> nn.Module:
    """Return a network of three convolutions with batch normalization."""
    layers: list[nn.Module] = []
    for before, after in ((1, 8), (8, 12), (12, 12)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if before == 1 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10))


def clothes() -> Data:
    """Return a part of Fashion-MNIST with images of 7 x 7 pixels."""
    data = fashion_mnist().pooled(4)
    return data.train_images[:10000], data.train_labels[:10000], data.test_images[:2000], data.test_labels[:2000]


POPULATIONS = {
    "digits, channels 6-10": HELD_OUT["digits, CNN with batch normalization, ReLU"],
    "Fashion-MNIST, channels 8-12-12": Population(deeper, clothes, 400),
}


def networks(name: str, cache: Path) -> rg.Params:
    """Return the trained networks of a population, from the cache if it contains them."""
    path = cache / f"{name.replace(' ', '_')}.safetensors"
    if not path.exists():
        population = POPULATIONS[name]
        x, y, *_ = population.data()
        cache.mkdir(parents=True, exist_ok=True)
        rg.save(train(population, x, y, count=2 * PAIRS), path)
    return rg.load(path)


def moves(symmetry: rg.Symmetry, task: rg.Task) -> Moves:
    """Return a transformation that makes the second network of a pair more similar to the first network."""
    weights, activations = rg.WeightMatching(), rg.ActivationMatching()

    def align(a: rg.Params, b: rg.Params, method: Any, **options: Any) -> rg.Params:
        return rg.align(a, b, symmetry, method=method, **options).params

    def permute(b: rg.Params, found: Element) -> rg.Params:
        """Apply only the permutations of an element."""
        element = symmetry.identity()
        for group in symmetry.groups:
            element = element.replace(group.name, replace(element[group.name], perm=found[group.name].perm))
        return symmetry.act(element, b)

    def permute_ones(a: rg.Params, b: rg.Params) -> rg.Params:
        first, second = (symmetry.on_data.split(one)[0] for one in (a, b))
        return permute(b, rg.align(first, second, symmetry.on_data.on_representatives()).element)

    def normalized(params: rg.Params) -> rg.Params:
        """Return filters of norm one. The norms have no effect, because batch normalization follows."""
        norms = {n: t.flatten(1).norm(dim=1) for n, t in params.items() if t.ndim == 4}
        return {n: t / norms[n].view(-1, 1, 1, 1) if n in norms else t for n, t in params.items()}

    return {
        "no alignment": lambda a, b: b,
        DEFAULT: partial(align, method=weights),
        "weights, `scales='recompute'`": partial(align, method=replace(weights, scales="recompute")),
        "weights, `scales='keep'`": partial(align, method=replace(weights, scales="keep")),
        "default with data": partial(align, method=None, task=task),
        "activations": partial(align, method=activations, task=task),
        "order of the default, own scales": lambda a, b: permute(b, rg.align(a, b, symmetry).element),
        "order with gains of one, own scales": permute_ones,
        "order with filters of norm one, own scales": lambda a, b: permute(
            b, rg.align(normalized(a), normalized(b), symmetry).element
        ),
        "order of activations, own scales": lambda a, b: permute(
            b, rg.align(a, b, symmetry, method=activations, task=task).element
        ),
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
    """Return means over pairs with standard errors, and the paired difference of the barrier from the default."""
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
    """Return a mean with its standard error."""
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
