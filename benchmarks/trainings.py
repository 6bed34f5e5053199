"""Cost of whole trainings on real data on one core: populations from initialization to the end, with validation.

The configs are presets, if a paper states their length. MLPs 784-10-10 and small CNNs are trained for five epochs, like
the larger MLPs. The table shows CPU seconds, and the time for 1,000, 10,000 and ten million networks on one core.

    REGAUGE_DATA=... OMP_NUM_THREADS=1 python benchmarks/trainings.py [part of a name, for some of the rows]
"""

import sys
import time
from dataclasses import replace

import torch

from regauge.training import Adam
from regauge.zoo import PopulationConfig, load_examples, train
from regauge.zoo.presets import fashion_mlps, mnist_inrs, mnist_mlps, mnist_tiny_mlps, small_cnns_relu, uci_mlps

EPOCHS = 5


def configs() -> dict[str, PopulationConfig]:
    """Return the trainings, which store only the final networks."""
    each = {
        "MLP 30-16-16-2, UCI, 50 epochs": uci_mlps(count=2048),
        "MLP 784-10-10, MNIST, 5 epochs": replace(mnist_tiny_mlps(count=512), epochs=EPOCHS, optimizer=Adam(lr=1e-3)),
        "SIREN 2-32-32-1, MNIST, 1,000 steps": mnist_inrs(count=128),
        "MLP 784-128-128-128-10, MNIST, 5 epochs": mnist_mlps(count=32),
        "MLP 784-128-128-128-10, Fashion-MNIST, 5 epochs": fashion_mlps(count=32),
        "small CNN, gray CIFAR-10, 5 epochs": replace(small_cnns_relu(count=8), steps=None, epochs=EPOCHS, subset=None),
    }
    return {name: replace(config, checkpoints=None) for name, config in each.items()}


def span(seconds: float) -> str:
    """Return a time in a suitable unit."""
    for unit, length in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} seconds"


def main(part: str) -> None:
    torch.set_num_threads(1)
    print("| networks | trained | CPU s each | validation | 1,000 | 10,000 | ten million, core hours |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, config in configs().items():
        if part not in name:
            continue
        data = load_examples(config.data)
        began = time.process_time()
        rows = [row for block in train(config, data=data) for row in block.rows]
        seconds = (time.process_time() - began) / len(rows)
        metric = "validation_accuracy" if "validation_accuracy" in rows[0] else "validation_loss"
        values = [row[metric] for row in rows if not row["is_diverged"]]
        mean = sum(values) / max(1, len(values))
        kind = metric.removeprefix("validation_")
        print(
            f"| {name} | {len(rows)} | {seconds:.3g} | {kind} {mean:.3g} | {span(1e3 * seconds)} | "
            f"{span(1e4 * seconds)} | {1e7 * seconds / 3600:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
