"""Two 784-512-512-512-10 MLPs trained on MNIST from different seeds: the barrier between them before and after
alignment.

    REGAUGE_DATA=folder/with/mnist .venv/bin/python examples/mnist_mlp_barrier.py

The example trains both networks (a few minutes on two cores), finds the symmetry, and aligns the second network to the
first. The example then evaluates 25 networks on the line between both networks, and prints a table in Markdown. Without
MNIST, `--data digits` uses scikit-learn's digits.
"""

import time
from dataclasses import dataclass
from typing import Literal

import tyro


@dataclass(frozen=True)
class Barrier:
    """Loss barriers between two MLPs with three hidden layers of 512 units."""

    data: Literal["mnist", "digits"] = "mnist"
    """MNIST from the folder in the environment variable REGAUGE_DATA, or scikit-learn's digits."""
    epochs: int = 5
    """Number of passes over the training images."""
    batch: int = 128
    """Number of images per step."""
    lr: float = 2e-3
    """Largest learning rate."""
    weight_decay: float = 0.1
    """Weight decay of AdamW."""
    seeds: tuple[int, int] = (0, 1)
    """Seeds of the two networks."""
    points: int = 25
    """Number of networks on the line, including both ends."""


def main(options: Barrier) -> None:
    import torch

    import regauge as rg
    from regauge.cli.output import show_progress
    from regauge.data import digits, mnist
    from regauge.nets import ClassifierConfig, initialize, mlp, split_batches, train
    from regauge.training import AdamW

    data = mnist() if options.data == "mnist" else digits()
    pixels = data.train_images[0].numel()
    module = mlp(pixels, 512, 512, 512, data.classes)
    optimizer = AdamW(options.lr, weight_decay=options.weight_decay)
    training = ClassifierConfig(epochs=options.epochs, batch=options.batch, optimizer=optimizer)

    with show_progress() as progress:
        networks = []
        for seed in options.seeds:
            generator = torch.Generator().manual_seed(seed)
            networks.append(
                train(
                    module,
                    initialize(module, generator),
                    data.train_images,
                    data.train_labels,
                    training,
                    generator=generator,
                    progress=lambda _, total, seed=seed: progress(f"training from seed {seed}", total),
                )
            )
        a, b = networks

        symmetry = rg.discover(module, (data.test_images[:4],))
        began = time.perf_counter()
        result = rg.align(a, b, symmetry, method=rg.WeightMatching())
        seconds = time.perf_counter() - began

        curves = {}
        sets = {"test": (data.test_images, data.test_labels), "train": (data.train_images, data.train_labels)}
        for name, (images, labels) in sets.items():
            evaluate = rg.Task(module, split_batches(images[:10_000], labels[:10_000])).evaluate
            for label, end in (("as trained", b), ("aligned", result.params)):
                advance = progress(f"{name} loss on the line, {label}", options.points)

                def counted(params, evaluate=evaluate, advance=advance):
                    advance()
                    return evaluate(params)

                curves[label, name] = rg.line(a, end, counted, points=options.points)

    test = curves["as trained", "test"].table
    print(f"{data.name}, MLP {pixels}-512-512-512-{data.classes}, seeds {options.seeds[0]} and {options.seeds[1]}; ")
    print(f"matched in {seconds:.2f} s. Losses are cross entropies in nats.\n")
    print("| network | test loss | test accuracy | test barrier | train barrier |")
    print("| --- | ---: | ---: | ---: | ---: |")
    print(f"| A | {test[0]['loss']:.4f} | {test[0]['accuracy']:.2%} | | |")
    print(f"| B | {test[-1]['loss']:.4f} | {test[-1]['accuracy']:.2%} | | |")
    for label in ("as trained", "aligned"):
        curve = curves[label, "test"]
        middle = min(curve.table, key=lambda row: abs(row["t"] - 0.5))
        barriers = f"{curve.barrier:.4f} | {curves[label, 'train'].barrier:.4f}"
        print(f"| mean of A and B, {label} | {middle['loss']:.4f} | {middle['accuracy']:.2%} | {barriers} |")


if __name__ == "__main__":
    main(tyro.cli(Barrier))
