"""The number of networks that one core trains in a minute, compared with a simple loop over networks.

The loop trains one module after the other with the default `torch.optim.Adam`. `rg.zoo.train` chooses the back end. The
loop and `rg.zoo.train` read batches of the same examples, in float32, on one thread. Times are CPU seconds between the
first and the last step, without initialization. Every round runs in a separate process, as a training does, and medians
are printed. Separate processes matter: if the allocator keeps the memory of hidden layers, the loop of a small CNN is a
quarter faster than if it returns this memory to the system in every step, and the behavior does not change within a
process.

    OMP_NUM_THREADS=1 python benchmarks/populations.py [part of a name, for some of the rows] [--rounds 5]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from torch import Tensor, nn
from torch.nn import functional

from regauge.storage.architecture import Architecture
from regauge.training import Adam, LogUniform
from regauge.training.programs import mean_loss
from regauge.zoo import Checkpoints, Examples, PopulationConfig, train
from regauge.zoo.presets import cifar10_cnns, cnn_architecture, mlp_architecture, siren_architecture

WIDTHS, TURNS = (8, 16, 32, 64), 3


class PooledCNN(nn.Module):
    """Three 3 x 3 convolutions of one width, with 2 x 2 max pooling after two of them, the mean over positions, and a
    linear layer.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(before, width, 3, padding=1) for before in (3, width, width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.convolutions
        x = functional.max_pool2d(functional.relu(first(x)), 2)
        x = functional.max_pool2d(functional.relu(second(x)), 2)
        return self.head(functional.relu(third(x)).mean((2, 3)))


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: The name of the networks.
        config: The settings of the training, with the number of steps in a measurement.
        data: Random examples, because their values do not change the cost.
        steps: The number of steps of a whole training, for the number of networks per minute.
        alone: The number of networks that the loop trains in a round.
        flops: The floating-point operations of the matrix products of a step, if they dominate the cost; otherwise
            None.
    """

    name: str
    config: PopulationConfig
    data: Examples
    steps: int
    alone: int = 1
    flops: float | None = None


def examples(*shape: int, classes: int, count: int = 4096) -> Examples:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, *shape, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    return Examples("random", inputs, labels, inputs[:1], labels[:1])


def pixels(side: int, channels: int, signals: int) -> Examples:
    line = torch.linspace(-1, 1, side)
    points = torch.cartesian_prod(line, line)
    values = torch.rand(signals, side * side, channels, generator=torch.Generator().manual_seed(0))
    return Examples("random images", points, values, points[:1], values[:, :1], is_signals=True)


def cases() -> list[Case]:
    mlp, one = mlp_architecture, Adam(lr=1e-3)
    each = Adam(lr=LogUniform(5e-4, 2e-3))
    start = Checkpoints(every=10**9)

    def population(architecture, count: int, steps: int, optimizer: Adam = one, **changes) -> PopulationConfig:
        return PopulationConfig(
            architecture, "random", count, steps=steps, optimizer=optimizer, checkpoints=start, **changes
        )

    siren, deep = siren_architecture(2, 32, 1, depth=2), siren_architecture(2, 32, 3, depth=4)
    strided = {width: cnn_architecture("relu", 1, width, width, width) for width in WIDTHS}
    pooled = {width: Architecture("pooled CNN", f"{__name__}:PooledCNN", {"width": width}) for width in WIDTHS}
    color, curved = cnn_architecture("relu", 3, 16, 16, 16), cnn_architecture("tanh", 1, 16, 16, 16)
    tiny, small, large = mlp(30, 16, 16, 2), mlp(784, 10, 10), mlp(784, 128, 128, 128, 10)
    digits = examples(1, 28, 28, classes=10)
    grays, colors = examples(1, 32, 32, classes=10), examples(3, 32, 32, classes=10)
    # The first layer has no gradient for its inputs.
    products = 2 * 128 * (2 * 784 * 128 + 3 * (2 * 128 * 128 + 128 * 10))
    return [
        Case("30-16-16-2", population(tiny, 256, 40), examples(30, classes=2, count=455), 640, 4),
        Case("30-16-16-2, own settings", population(tiny, 256, 40, each), examples(30, classes=2, count=455), 640, 4),
        Case("784-10-10", population(small, 256, 20), digits, 2345, 4),
        Case("784-10-10, own settings", population(small, 256, 20, each), digits, 2345, 4),
        Case("784-10-10, own batches", population(small, 128, 20, group=1), digits, 2345, 4),
        Case("784-128-128-128-10", population(large, 32, 240), digits, 2345, 2, products),
        Case("784-128-128-128-10, own settings", population(large, 32, 240, each), digits, 2345, 2, products),
        Case("SIREN 2-32-32-1", population(siren, 20, 20, batch=None), pixels(28, 1, 20), 1000, 4),
        Case("SIREN 2-32-32-32-32-3", population(deep, 8, 20, batch=None), pixels(32, 3, 8), 10_000, 2),
        *(
            Case(f"CNN of width {width}, stride 2, 28 x 28 gray", population(net, 16, 10), digits, 2345, 2)
            for width, net in strided.items()
        ),
        Case(
            "the same of width 16, own settings, batches of 64",
            population(strided[16], 16, 10, each, batch=64),
            digits,
            2345,
            2,
        ),
        Case("the same of width 16, tanh", population(curved, 16, 10), digits, 2345, 2),
        Case("small CNN, stride 2, 32 x 32 gray (the preset)", population(strided[16], 16, 10), grays, 1955, 2),
        Case("small CNN, stride 2, 32 x 32 color", population(color, 16, 10), colors, 1955, 2),
        *(
            Case(f"CNN of width {width}, max pooling, 32 x 32 color", population(net, 4, 4), colors, 1955, 1)
            for width, net in pooled.items()
        ),
        Case("CNN of table 4", population(cifar10_cnns().architecture, 2, 4), colors, 7030, 1),
    ]


def seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def by_loop(case: Case) -> float:
    """Return the CPU seconds of a step of one network in the loop."""
    config, data = case.config, case.data
    total = 0.0
    for network in range(case.alone):
        module = config.architecture.module()
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
        order = torch.randperm(len(data.inputs))

        def steps(module: nn.Module = module, optimizer=optimizer, order=order, network: int = network) -> None:
            for step in range(config.steps):
                if data.is_signals:
                    inputs, targets = data.inputs, data.targets[network]
                else:
                    first = step * config.batch % (len(order) - config.batch)
                    index = order[first : first + config.batch]
                    inputs, targets = data.inputs[index], data.targets[index]
                optimizer.zero_grad()
                mean_loss(module(inputs), targets).backward()
                optimizer.step()

        total += seconds(steps)
    return total / case.alone / config.steps


def by_population(case: Case) -> float:
    """Return the CPU seconds of a step of one network, in stacks as the library makes them, after one block of
    warm-up.
    """
    total = 0.0
    blocks = train(case.config, data=case.data)
    while next(blocks, None) is not None:
        total += seconds(lambda: next(blocks))
    return total / case.config.count / case.config.steps


def matrix_throughput() -> float:
    """Return the floating-point operations per CPU second of a large matrix product."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    c = torch.empty(1024, 1024)
    times = [seconds(lambda: torch.mm(a, b, out=c)) for _ in range(15)]
    return 2 * 1024**3 / statistics.median(times)


def measured(name: str) -> tuple[float, float, float, float | None]:
    """Return the CPU seconds of a step in the loop and in the population, their ratio, and the share of the matrix
    throughput.

    Both times are minima of three runs in turns, because other processes on the machine only increase them.
    """
    torch.set_num_threads(1)
    case = next(case for case in cases() if case.name == name)
    by_population(case)
    peak = matrix_throughput() if case.flops else None
    turns = [(by_loop(case), by_population(case)) for _ in range(TURNS)]
    loop, population = (min(times) for times in zip(*turns, strict=True))
    return loop, population, loop / population, case.flops / population / peak if case.flops and peak else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("| networks | loop, ms per step | population, ms per step | ratio | networks per minute | matrix products |")
    print("| --- | --- | --- | --- | --- | --- |")
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for case in cases():
            if options.name not in case.name:
                continue
            rounds = list(pool.map(measured, [case.name] * options.rounds))
            loops = [1e3 * loop for loop, *_ in rounds]
            loop, population, ratio, share = (
                None if column[0] is None else statistics.median(column) for column in zip(*rounds, strict=True)
            )
            print(
                f"| {case.name} | {loop * 1e3:.3f} ({min(loops):.3f} to {max(loops):.3f}) | {population * 1e3:.4f} | "
                f"{ratio:.2f} | {60 / population / case.steps:.3g} | {'' if share is None else f'{share:.0%}'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
