"""Cost of a step of fitting an INR, relative to its matrix products alone, and cost of fitting images for a minute.

A step is everything that `fit` does: sampling 10,000 of 500,000 samples, the loss, its gradient, and Adam. The matrix
products are the products of the forward pass, and of the derivatives with respect to inputs and weights. The measured
products have the same sizes, write their results into buffers, and run on the whole batch or in the blocks of `fit`.
The row "loop" is a simple implementation: a module, automatic differentiation, and `torch.optim.Adam`. Times are CPU
seconds in float32. Rounds alternate, and medians are printed.

    OMP_NUM_THREADS=1 python benchmarks/inr.py [--rounds 5] [--widths 128 512] [--images 128]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from regauge.inr.fields.signal_samples import Samples
from regauge.inr.fit_config import FitConfig
from regauge.inr.fitting import BLOCK_VALUES, IMAGES, fit, fit_images
from regauge.inr.representation import Inr

BATCH = 10_000
STEPS = {128: 20, 512: 4}
"""The number of steps of a measurement."""


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def matrix_products(inr: Inr, rows: int) -> Callable[[], None]:
    """Compute the matrix products of one step, in blocks with a given number of rows."""
    pairs = list(zip(inr.widths, inr.widths[1:], strict=False))
    weights = [torch.randn(after, before) for before, after in pairs]
    gradients = [torch.zeros_like(weight) for weight in weights]
    inputs = [torch.randn(BATCH, before) for before, _ in pairs]
    outputs = [torch.randn(BATCH, after) for _, after in pairs]
    forward = [torch.empty(rows, after) for _, after in pairs]
    backward = [torch.empty(rows, before) for before, _ in pairs]

    def step() -> None:
        for first in range(0, BATCH, rows):
            count = min(rows, BATCH - first)
            for k, weight in enumerate(weights):
                x, y = inputs[k][first : first + count], outputs[k][first : first + count]
                torch.mm(x, weight.t(), out=forward[k][:count])
                if k:
                    torch.mm(y, weight, out=backward[k][:count])
                gradients[k].addmm_(y.t(), x)

    return step


def loop(inr: Inr, samples: Samples, steps: int, start: dict[str, Tensor]) -> None:
    module = inr.module(start)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)
    for _ in range(steps):
        index = torch.randint(len(samples), (BATCH,))
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(module(samples.points[index]), samples.labels[index])
        loss.backward()
        optimizer.step()


def shapes(width: int, rounds: int) -> None:
    """Return the row of one width."""
    inr, generator = Inr(width=width), torch.Generator().manual_seed(0)
    samples = Samples(torch.rand(500_000, 3, generator=generator) * 2 - 1, torch.rand(500_000, 1, generator=generator))
    start, count = inr.start(generator), STEPS.get(width, 8)
    whole, blocked = matrix_products(inr, BATCH), matrix_products(inr, BLOCK_VALUES // width)
    # A fit of one step more and of one less differ by the steps alone, without what is made once.
    programs = {
        "fit": lambda n: fit(inr, samples, FitConfig(steps=n), start=start, generator=generator),
        "loop": lambda n: loop(inr, samples, n, start),
        "whole": lambda n: [whole() for _ in range(n)],
        "blocks": lambda n: [blocked() for _ in range(n)],
    }
    times: dict[str, list[float]] = {name: [] for name in programs}
    for round_ in range(rounds + 1):
        for name, program in programs.items():
            short = seconds(lambda program=program: program(1))
            long = seconds(lambda program=program: program(count + 1))
            if round_:  # the first one warms up
                times[name].append((long - short) / count)
    ratios = {
        name: statistics.median(a / b for a, b in zip(times["fit"], times[name], strict=True)) for name in programs
    }
    middle = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    print(
        f"| 3-{width}x4-1 | {middle['fit']:.1f} | {middle['whole']:.1f} | {ratios['whole']:.3f} | "
        f"{middle['blocks']:.1f} | {ratios['blocks']:.3f} | {middle['loop']:.1f} | {1 / ratios['loop']:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--widths", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--images", type=int, default=128)
    options = parser.parse_args()
    print("| network | step, ms | products, ms | ratio | in blocks, ms | ratio | loop, ms | loop / step |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for width in options.widths:
        shapes(width, options.rounds)
    images = torch.rand(options.images, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    fit_images(images[:8])
    spent = seconds(lambda: fit_images(images))
    print(f"\n2-32-32-1, 28 x 28 pixels, {IMAGES.steps} steps: {60 * len(images) / spent:.0f} networks per minute")


if __name__ == "__main__":
    main()
