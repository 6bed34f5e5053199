"""Positive scales and signs in weight matching: results and costs of several treatments.

The networks are ReLU networks (MLP 784-128-128-128-10 on MNIST) and a residual network with batch normalization
(digits). They are compared as trained, with the second network transformed by random scales of its units in [1/4, 4],
and with both networks transformed:

- keep: networks are compared as stored;
- balance: both networks are replaced by the networks of smallest norm in their orbits, and the element is transformed
  back (the default);
- match: from the result of "balance", permutation and scales are chosen jointly to minimize the distance. For every
  pair of units, the factor s minimizes `|a_in - s b_in|^2 + |a_out - b_out / s|^2`, and the minimum is the profit in an
  exact assignment, layer after layer. Only this benchmark contains the method, and only for plain networks.

Tanh networks of the same shape have signs instead of scales. Signs and permutations are chosen jointly (assignment on
|C|), the permutations alone, or first the permutations and then the signs.

Distances are measured between the balanced networks, so they can be compared between rows. Barriers are measured on
test data at 25 points, with recomputed statistics of batch normalization. Times are CPU seconds with one thread.

    REGAUGE_DATA=... python benchmarks/scales.py
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

import torch
from torch import Tensor, nn

import regauge as rg
from regauge.connect.repair import reset_batchnorm
from regauge.core.assignment import assign
from regauge.core.balance import balance
from regauge.data.images import ImageData, digits, mnist
from regauge.nets.classification import ClassifierConfig, split_batches, train
from regauge.nets.mlp import mlp
from regauge.nets.resnet import resnet20
from regauge.training.optimizers import AdamW

PAIRS = 3
LAYERS = 4
Align = Callable[[rg.Params, rg.Params], rg.Params]


@dataclass(frozen=True)
class Study:
    """Trained networks of one architecture, with the data for their evaluation."""

    module: nn.Module
    symmetry: rg.Symmetry
    pairs: list[tuple[rg.Params, rg.Params]]
    evaluate: Callable[[rg.Params], dict[str, float]]
    prepare: Callable[[rg.Params], rg.Params] | None


def study(make: Callable[[], nn.Module], data: ImageData, training: ClassifierConfig) -> Study:
    """Train `PAIRS` pairs of networks."""
    networks = []
    for seed in range(2 * PAIRS):
        torch.manual_seed(seed)
        module = make()
        start = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        chance = torch.Generator().manual_seed(seed)
        networks.append(train(module, start, data.train_images, data.train_labels, training, generator=chance))
    module = make().eval()
    symmetry = rg.discover(module, (data.test_images[:2],), verify=False)
    batches = list(torch.split(data.train_images[:1280], 256))
    prepare = (lambda p: reset_batchnorm(p, module, batches)) if symmetry.buffers else None
    size = len(data.test_labels) // 10
    evaluate = rg.Task(module, split_batches(data.test_images, data.test_labels, size)).evaluate
    return Study(module, symmetry, list(zip(networks[::2], networks[1::2], strict=True)), evaluate, prepare)


def aligner(symmetry: rg.Symmetry, method: rg.WeightMatching) -> Align:
    """Return weight matching as a function of two networks."""
    return lambda a, b: rg.align(a, b, symmetry, method=method).params


def matched(symmetry: rg.Symmetry) -> Align:
    """Return permutations and scales that jointly minimize the distance, starting from the result of "balance"."""

    def climb(a: rg.Params, b: rg.Params) -> rg.Params:
        left = {name: tensor.double() for name, tensor in a.items()}
        moved = {name: t.double() for name, t in rg.align(a, b, symmetry).params.items()}
        reached = _distance(left, moved)
        for _ in range(40):
            for k in range(LAYERS - 1):
                w, bias, out = f"layers.{k}.weight", f"layers.{k}.bias", f"layers.{k + 1}.weight"
                x = torch.cat([left[w], left[bias].unsqueeze(1)], 1), left[out].T
                y = torch.cat([moved[w], moved[bias].unsqueeze(1)], 1), moved[out].T
                factors, profits = best_factors(*(u @ v.T for u, v in zip(x, y, strict=True)), *y)
                order = torch.from_numpy(assign(profits.numpy()))
                factor = factors.gather(1, order.unsqueeze(1))
                moved[w], moved[bias] = moved[w][order] * factor, moved[bias][order] * factor[:, 0]
                moved[out] = moved[out][:, order] / factor[:, 0]
            before, reached = reached, _distance(left, moved)
            if reached > before * (1 - 1e-9):
                break
        return {name: tensor.float() for name, tensor in moved.items()}

    return climb


def best_factors(inner: Tensor, outer: Tensor, incoming: Tensor, outgoing: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best factor for every pair of units, and the profit at this factor, by a grid of logarithms and
    Newton's method.
    """
    q, t = incoming.square().sum(1), outgoing.square().sum(1)

    def worth(log: Tensor) -> Tensor:
        s = log.exp()
        return s * inner - s.square() * q / 2 + outer / s - t / s.square() / 2

    grid = torch.linspace(-3, 3, 31, dtype=torch.float64)
    log = grid[torch.stack([worth(u.expand_as(inner)) for u in grid]).argmax(0)]
    for _ in range(8):
        s = log.exp()
        slope = s * inner - s.square() * q - outer / s + t / s.square()
        curvature = s * inner - 2 * s.square() * q + outer / s - 2 * t / s.square()
        step = torch.where(curvature < 0, -slope / curvature, 0.0).clamp(-0.2, 0.2)
        log = torch.where(worth(log + step) >= worth(log), log + step, log)
    return log.exp(), worth(log)


def moved_by_scales(symmetry: rg.Symmetry, params: rg.Params, chance: torch.Generator) -> rg.Params:
    """Return random scales that do not change the statistics of batch normalization.

    The scales balance a network of random weights, and keep the statistics. The logarithms of the scales are then
    scaled to the range of the logarithms of [1/4, 4].
    """
    noise = {
        name: t
        if name in symmetry.buffers
        else torch.exp2(8 * torch.rand(t.shape[:1] or (1,), generator=chance) - 4)
        .reshape(-1, *[1] * (t.ndim - 1))
        .expand(t.shape)
        for name, t in params.items()
    }
    element = balance(noise, symmetry, buffers="keep")
    for group in symmetry.groups:
        value = element[group.name]
        if value.scale is not None:
            log = value.scale.log()
            log = log - log.mean(-1, keepdim=True)
            element = element.replace(group.name, replace(value, scale=(log / log.abs().max() * math.log(4)).exp()))
    return symmetry.act(element, params)


def without_signs(symmetry: rg.Symmetry) -> rg.Symmetry:
    """Match permutations alone."""
    groups = tuple(
        replace(g, signs=0, placements=tuple(replace(p, sign=()) for p in g.placements)) for g in symmetry.groups
    )
    return replace(symmetry, groups=groups)


def without_order(symmetry: rg.Symmetry) -> rg.Symmetry:
    """Match signs alone."""
    return replace(symmetry, groups=tuple(replace(g, is_permuted=False) for g in symmetry.groups))


def one_after_the_other(symmetry: rg.Symmetry) -> Align:
    """Match first the permutations, then the signs."""
    order, signs = (aligner(s, rg.WeightMatching()) for s in (without_signs(symmetry), without_order(symmetry)))
    return lambda a, b: signs(a, order(a, b))


def table(title: str, case: Study, pairs: Sequence[tuple[rg.Params, rg.Params]], methods: dict[str, Align]) -> None:
    """Print the mean barrier and the barrier of every pair, for all methods."""
    print(f"\n{title}\n{'method':22s} {'distance':>9s} {'objective':>9s} {'seconds':>8s} {'barrier':>8s}  of each pair")
    for name, align in methods.items():
        distances, objectives, seconds, barriers = [], [], [], []
        for a, b in pairs:
            start = time.process_time()
            found = align(a, b)
            seconds.append(time.process_time() - start)
            frame = balance(a, case.symmetry, buffers="keep")
            left, right = case.symmetry.act(frame, a), case.symmetry.act(frame, found)
            counted = [n for n in case.symmetry.sites if n not in case.symmetry.buffers]
            distances.append(_distance({n: left[n] for n in counted}, right))
            objectives.append(sum(float((left[n].double() * right[n]).sum()) for n in counted))
            barriers.append(rg.line(a, found, case.evaluate, 25, prepare=case.prepare).barrier)
        each = " ".join(f"{barrier:.3f}" for barrier in barriers)
        reached = f"{mean(distances):9.2f} {mean(objectives):9.2f} {mean(seconds):8.3f} {mean(barriers):8.4f}"
        print(f"{name:22s} {reached}  {each}", flush=True)


def _distance(a: rg.Params, b: rg.Params) -> float:
    return sum(float((a[name].double() - b[name]).square().sum()) for name in a)


def scale_tables(title: str, case: Study, has_match: bool) -> None:
    """Print the tables for networks as trained, with the second network transformed, and with both transformed."""
    methods = {name: aligner(case.symmetry, rg.WeightMatching(scales=name)) for name in ("keep", "balance")}  # type: ignore[arg-type]
    if has_match:
        methods["match"] = matched(case.symmetry)
    chance = torch.Generator().manual_seed(0)
    second = [(a, moved_by_scales(case.symmetry, b, chance)) for a, b in case.pairs]
    both = [(moved_by_scales(case.symmetry, a, chance), b) for a, b in second]
    for label, pairs in (("as trained", case.pairs), ("second moved", second), ("both moved", both)):
        table(f"{title}, {label}", case, pairs, methods)


def main() -> int:
    """Print the tables."""
    torch.set_num_threads(1)
    images = mnist()
    relu = study(lambda: mlp(784, 128, 128, 128, 10), images, ClassifierConfig(epochs=4))
    scale_tables("ReLU MLP 784-128x3-10, MNIST", relu, has_match=True)
    residual = study(
        lambda: resnet20(in_channels=1, blocks=1),
        digits(),
        ClassifierConfig(epochs=20, batch=128, optimizer=AdamW(4e-3)),
    )
    scale_tables("ResNet8, batch normalization, digits", residual, has_match=False)
    tanh = study(lambda: mlp(784, 128, 128, 128, 10, activation=torch.tanh), images, ClassifierConfig(epochs=4))
    signed = {
        "naive": lambda a, b: b,
        "permutation alone": aligner(without_signs(tanh.symmetry), rg.WeightMatching()),
        "one after the other": one_after_the_other(tanh.symmetry),
        "jointly": aligner(tanh.symmetry, rg.WeightMatching()),
    }
    table("Tanh MLP 784-128x3-10, MNIST", tanh, tanh.pairs, signed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
