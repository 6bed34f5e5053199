"""Alignment of many pairs at once, compared with a loop over single pairs: 1,000 pairs of MLPs and 10,000 pairs of sine
networks.

The networks are trained: 40 classifiers on MNIST from different seeds, and 400 sine networks that fit waves of random
direction, frequency and phase. A pair consists of two different networks, sampled at random. Both ways run in one
process with the same number of threads (by default one). Times are CPU seconds (`time.process_time`) and, for the ratio
that a user observes, wall-clock seconds. The loop is measured on a sample of the pairs, and its time is scaled to all
pairs. On the sample, the objective of each pair in the batch is compared with its objective in the loop.

    REGAUGE_DATA=... python benchmarks/pairs.py [--threads 1]
"""

import argparse
import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import regauge as rg
from regauge.data.images import mnist
from regauge.nets.classification import ClassifierConfig, initialize, train
from regauge.nets.mlp import mlp
from regauge.nets.siren import Siren
from regauge.training import Adam, DescentConfig, fit_signals


@dataclass(frozen=True)
class Setting:
    """Pairs of one architecture.

    Attributes:
        name: The name in the table.
        module: The module that runs the networks.
        example: An input of the module.
        networks: A population.
        pairs: The number of pairs that are sampled from the population.
        sample: The number of pairs that the loop aligns.
    """

    name: str
    module: nn.Module
    example: Tensor
    networks: rg.Params
    pairs: int
    sample: int


def trained_mlps(count: int) -> rg.Params:
    """Return classifiers of MNIST after two epochs on 20,000 images, with different initializations and orders."""
    images, module = mnist(), mlp(784, 128, 128, 128, 10)
    networks = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        start = initialize(module, generator)
        inputs, labels = images.train_images[:20000], images.train_labels[:20000]
        networks.append(train(module, start, inputs, labels, ClassifierConfig(epochs=2), generator=generator))
    return {name: torch.stack([params[name] for params in networks]) for name in networks[0]}


def fitted_sines(count: int) -> rg.Params:
    """Return sine networks, each fitted to a separate wave, all at once."""
    generator = torch.Generator().manual_seed(0)
    module = Siren(2, 32, 1)
    starts = [dict(Siren(2, 32, 1, generator=generator).state_dict()) for _ in range(count)]
    axis = torch.linspace(-1, 1, 16)
    points = torch.cartesian_prod(axis, axis)
    frequencies = math.pi * (0.5 + 2 * torch.rand(count, 2, generator=generator))
    phases = 2 * math.pi * torch.rand(count, 1, generator=generator)
    waves = torch.sin(frequencies @ points.T + phases).unsqueeze(-1)
    stacked = {name: torch.stack([params[name] for params in starts]) for name in starts[0]}
    return fit_signals(module, stacked, points, waves, DescentConfig(steps=300, batch=None, optimizer=Adam(1e-3)))


def measure(setting: Setting, method: rg.WeightMatching) -> tuple[str, ...]:
    """Return a row of the table."""
    symmetry = rg.discover(setting.module.eval(), (setting.example,))
    count = len(next(iter(setting.networks.values())))
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(count, (setting.pairs,), generator=generator)
    second = (first + torch.randint(1, count, (setting.pairs,), generator=generator)) % count
    a, b = ({name: t[rows] for name, t in setting.networks.items()} for rows in (first, second))
    rg.alignment.align_pairs(*({name: t[:8] for name, t in p.items()} for p in (a, b)), symmetry, method=method)
    start = _clocks()
    many = rg.alignment.align_pairs(a, b, symmetry, method=method)
    batch = _clocks() - start
    singles = [tuple({name: t[k] for name, t in p.items()} for p in (a, b)) for k in range(setting.sample)]
    start = _clocks()
    alone = [rg.align(x, y, symmetry, method=method).objective for x, y in singles]
    loop = (_clocks() - start) / setting.sample
    objectives = torch.tensor(alone, dtype=torch.float64)
    difference = (many.objective[: setting.sample] - objectives) / objectives.abs()
    return (
        setting.name,
        symmetry.groups[0].kind,
        method.scales if any(group.scales for group in symmetry.groups) else "none",
        f"{setting.pairs}",
        f"{1e3 * float(loop[0]):.2f}",
        f"{1e3 * float(batch[0]) / setting.pairs:.2f}",
        f"{float(batch[1]):.1f}",
        *(f"{ratio:.1f}" for ratio in (loop * setting.pairs / batch).tolist()),
        f"{float(difference.min()):.1e} to {float(difference.max()):.1e}",
    )


def _clocks() -> Tensor:
    """Return the CPU seconds of this process, and the wall-clock seconds."""
    return torch.tensor([time.process_time(), time.perf_counter()], dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    mlps = Setting(
        "MLP 784-128-128-128-10", mlp(784, 128, 128, 128, 10), torch.zeros(2, 784), trained_mlps(40), 1000, 20
    )
    sines = Setting("sine 2-32-32-1", Siren(2, 32, 1), torch.zeros(2, 2), fitted_sines(400), 10000, 200)
    columns = ("networks", "groups", "scales", "pairs", "loop, CPU ms/pair", "batch, CPU ms/pair", "batch, s")
    print("| " + " | ".join((*columns, "loop / batch, CPU", "on the clock", "objective")) + " |")
    print("| " + " | ".join(["---"] * (len(columns) + 3)) + " |")
    for setting, scales in ((mlps, "balance"), (mlps, "keep"), (sines, "balance")):
        print("| " + " | ".join(measure(setting, rg.WeightMatching(scales=scales))) + " |", flush=True)


if __name__ == "__main__":
    main()
