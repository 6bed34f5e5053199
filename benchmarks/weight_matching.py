"""Weight matching compared with the `rebasin` package: time, objective, and distance to a lower bound of the time.

There are three pairs of trained networks: an MLP 784-512-512-512-10 on MNIST, a ResNet20 of width x4 on digits, and a
VGG16 on some images of CIFAR-10. Both programs match the same pairs in one process with one thread. Times are CPU
seconds (`time.process_time`), as medians of several runs without tracing. One function computes all objectives: the
inner product of all parameters of the first network and the transformed second network. The lower bound (floor) is the
time of the computed matrix products plus the time of the solved exact assignments. The floor is computed in two ways.
The first floor uses, for every product, the GFLOP/s that this machine reaches on the shape of the product. The second,
stricter floor uses, for all products, the GFLOP/s of the dominant shape, which small and thin products cannot reach.

    REGAUGE_DATA=... python benchmarks/weight_matching.py [part of a name] [--git-re-basin FOLDER]

FOLDER is a checkout of `themrzmaster/git-re-basin-pytorch`, which is then also measured. The permutation specification
for git-re-basin is written from the groups that regauge discovers. The last row of each architecture is `rg.align`
without settings: it first balances positive scales and therefore compares other weights, so its objective is different.
"""

import argparse
import contextlib
import copy
import importlib.util
import io
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import regauge as rg
from regauge.alignment.engine import family_costs, neighbor_terms
from regauge.core import closest
from regauge.core.assignment import Assignments
from regauge.core.products import matmul
from regauge.data.images import cifar10, digits, mnist
from regauge.nets.classification import ClassifierConfig, train
from regauge.nets.mlp import mlp
from regauge.nets.resnet import resnet20
from regauge.nets.vgg import VGG
from regauge.training.optimizers import AdamW

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from vgg16 import VGG16

RUNS = 5


@dataclass(frozen=True)
class Pair:
    """Two trained networks of one architecture."""

    name: str
    module: nn.Module
    inputs: Tensor
    a: rg.Params
    b: rg.Params


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    program: str
    objective: float
    seconds: float
    floor: tuple[float, float] | None = None
    sweeps: int | None = None


def trained_pair(
    name: str, make: Callable[[], nn.Module], images: Tensor, labels: Tensor, training: ClassifierConfig
) -> Pair:
    """Return two networks with different initializations and orders of the data."""
    networks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        module = make()
        start = {key: tensor.detach().clone() for key, tensor in module.state_dict().items()}
        networks.append(train(module, start, images, labels, training, generator=torch.Generator().manual_seed(seed)))
    return Pair(name, make().eval(), images[:2], networks[0], networks[1])


def permutations_only(symmetry: rg.Symmetry) -> rg.Symmetry:
    """Return the same groups without scales and signs, which `rebasin` does not have."""
    groups = tuple(
        replace(g, scales=0, signs=0, placements=tuple(replace(p, scale=(), sign=()) for p in g.placements))
        for g in symmetry.groups
    )
    return replace(symmetry, groups=groups)


def inner_product(module: nn.Module, a: rg.Params, b: rg.Params) -> float:
    """Return the objective of both programs, in float64."""
    return sum(float((a[name].double() * b[name].double()).sum()) for name, _ in module.named_parameters())


def measure_ours(label: str, pair: Pair, symmetry: rg.Symmetry, **settings: Any) -> Row:
    """Return the median time of `align`, and its floor. Scales are kept, because the objective is computed on the
    stored weights.
    """
    method = rg.WeightMatching(**{"scales": "keep", **settings})
    seconds = []
    for _ in range(RUNS):
        start = time.process_time()
        result = rg.align(pair.a, pair.b, symmetry, method=method)
        seconds.append(time.process_time() - start)
    objective = inner_product(pair.module, pair.a, result.params)
    return Row(label, objective, statistics.median(seconds), floor(pair, symmetry, method), len(result.history) - 1)


def floor(pair: Pair, symmetry: rg.Symmetry, method: rg.WeightMatching) -> tuple[float, float]:
    """Return the seconds for only the products and the exact assignments of one `align`.

    The first number uses, for each product, the rate of its own shape, and the second number uses the rate of the
    dominant shape for all products.
    """
    shapes: Counter[tuple[int, int, int]] = Counter()
    solving = 0.0
    products, assign = family_costs.inner_products, closest.assign_many

    def counted_products(group: rg.Group, a: Tensor, b: Tensor) -> Tensor:
        shapes[a.shape[-2], a.shape[-1], b.shape[-2]] += 1
        return products(group, a, b)

    def timed_assign(*args: object, **kwargs: object) -> Assignments:
        nonlocal solving
        start = time.process_time()
        solved = assign(*args, **kwargs)
        solving += time.process_time() - start
        return solved

    family_costs.inner_products = neighbor_terms.inner_products = counted_products
    closest.assign_many = timed_assign
    try:
        rg.align(pair.a, pair.b, symmetry, method=method)
    finally:
        family_costs.inner_products = neighbor_terms.inner_products = products
        closest.assign_many = assign
    operations = {shape: 2 * math.prod(shape) * count for shape, count in shapes.items()}
    dominant = max(operations, key=lambda shape: operations[shape])
    own = sum(total / flops_per_second(*shape) for shape, total in operations.items())
    return own + solving, sum(operations.values()) / flops_per_second(*dominant) + solving


def flops_per_second(rows: int, inner: int, columns: int) -> float:
    """Return the rate that a float32 product of one shape, rows against rows, reaches with one thread."""
    x, y = torch.randn(rows, inner), torch.randn(columns, inner).T
    best = 0.0
    for _ in range(20):
        start = time.process_time()
        matmul(x, y)
        best = max(best, 2 * rows * inner * columns / (time.process_time() - start))
    return best


def measure_rebasin(pair: Pair) -> Row:
    """Return the median time and the median objective of `rebasin` over its random orders."""
    from rebasin import PermutationCoordinateDescent

    seconds, objectives = [], []
    for seed in range(RUNS):
        a, b = copy.deepcopy(pair.module), copy.deepcopy(pair.module)
        a.load_state_dict(pair.a)
        b.load_state_dict(pair.b)
        descent = PermutationCoordinateDescent(a, b, pair.inputs)
        torch.manual_seed(seed)
        start = time.process_time()
        descent.rebasin()
        seconds.append(time.process_time() - start)
        objectives.append(inner_product(pair.module, pair.a, b.state_dict()))
    return Row("rebasin", statistics.median(objectives), statistics.median(seconds))


def measure_git_re_basin(pair: Pair, symmetry: rg.Symmetry, folder: Path) -> Row:
    """Return the median time and the median objective of `git-re-basin-pytorch` over its random orders."""
    sys.path.insert(0, str(folder))
    matching = importlib.import_module("utils.weight_matching")
    names = [name for name, _ in pair.module.named_parameters()]
    axes: dict[str, list[str | None]] = {name: [None] * pair.a[name].ndim for name in names}
    for group in symmetry.groups:
        for place in group.placements:
            if place.parameter in axes:
                axes[place.parameter][place.axis] = group.name
    spec = matching.permutation_spec_from_axes_to_perm({name: tuple(groups) for name, groups in axes.items()})
    a, b = ({name: params[name] for name in names} for params in (pair.a, pair.b))
    seconds, objectives = [], []
    for seed in range(RUNS):
        torch.manual_seed(seed)
        start = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            found = matching.weight_matching(spec, a, b)
        seconds.append(time.process_time() - start)
        moved = dict(b)
        for name, groups in axes.items():
            for axis, group in enumerate(groups):
                if group is not None:
                    moved[name] = moved[name].index_select(axis, found[group].long())
        objectives.append(inner_product(pair.module, a, moved))
    return Row("git-re-basin-pytorch", statistics.median(objectives), statistics.median(seconds))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("chosen", nargs="?", default="")
    parser.add_argument("--git-re-basin", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if importlib.util.find_spec("rebasin") is None:
        sys.exit("the package rebasin is not installed; see benchmarks/README.md for how to add it")
    images, small, colors = mnist(), digits(), cifar10()
    settings: list[tuple[str, Callable[[], nn.Module], Tensor, Tensor, ClassifierConfig]] = [
        (
            "MLP 784-512-512-512-10, MNIST",
            lambda: mlp(784, 512, 512, 512, 10),
            images.train_images,
            images.train_labels,
            ClassifierConfig(epochs=3),
        ),
        (
            "ResNet20 x4, digits",
            lambda: resnet20(width=4, in_channels=1),
            small.train_images,
            small.train_labels,
            ClassifierConfig(epochs=4, batch=64),
        ),
        (
            "VGG16, CIFAR-10",
            lambda: VGG(VGG16, (512, 512), 10, image=32, in_channels=3, norm="none"),
            colors.train_images[:2048],
            colors.train_labels[:2048],
            ClassifierConfig(epochs=2, batch=64, optimizer=AdamW(1e-3)),
        ),
    ]
    pairs = [trained_pair(*setting) for setting in settings if options.chosen in setting[0]]
    print("| networks | program | objective | CPU s | floor, s | / floor | / strict floor | sweeps | rebasin / time |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for pair in pairs:
        discovered = rg.discover(pair.module, (pair.inputs,))
        theirs = measure_rebasin(pair)
        permutations = permutations_only(discovered)
        rows = [
            theirs,
            measure_ours("regauge, permutations", pair, permutations),
            measure_ours("the same, at most 3 sweeps", pair, permutations, max_sweeps=3),
        ]
        if options.git_re_basin is not None:
            rows.insert(1, measure_git_re_basin(pair, permutations, options.git_re_basin))
        if any(group.signs for group in discovered.groups):
            rows.append(measure_ours("regauge, all groups", pair, discovered))
        rows.append(measure_ours("regauge, as it is called by default", pair, discovered, scales="balance"))
        naive = inner_product(pair.module, pair.a, pair.b)
        print(f"| {pair.name} | unaligned | {naive:.2f} | | | | | | |")
        for row in rows:
            above = " | | "
            if row.floor is not None:
                own, strict = row.floor
                above = f"{own:.3f} | {row.seconds / own:.2f} | {row.seconds / strict:.2f}"
            sweeps = "" if row.sweeps is None else str(row.sweeps)
            ratio = theirs.seconds / row.seconds
            cells = (pair.name, row.program, f"{row.objective:.2f}", f"{row.seconds:.3f}", above, sweeps)
            print("| " + " | ".join(cells) + f" | {ratio:.1f} |")


if __name__ == "__main__":
    main()
