"""`regauge demo`: train small networks on real digits, align and merge them, and write a report."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.table import Table

import regauge as rg
from regauge.cli.demo_study import Case, fit, study
from regauge.cli.options import Demo
from regauge.cli.output import show
from regauge.cli.progress import show_progress
from regauge.data.images import ImageData, digits, has_mnist, mnist
from regauge.nets.classification import Training
from regauge.nets.cnn import CNN
from regauge.nets.mlp import mlp
from regauge.report.demo_page import PAGE, PICTURES, RESULTS, demo_page
from regauge.storage.checkpoints.writing import save
from regauge.training.optimizers import AdamW
from regauge.zoo.jobs.executors import one_thread

NETWORKS = 3


def run(options: Demo) -> None:
    """Train, align, merge, write the folder and print the table."""
    began = time.perf_counter()
    data = choose_data(options.data)
    options.out.mkdir(parents=True, exist_ok=True)
    plan = cases(data, is_quick=options.quick)
    seeds = range(options.seed, options.seed + NETWORKS)
    with one_thread(), show_progress() as progress:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            waiting = {case.key: [pool.submit(fit, case, data, seed, progress) for seed in seeds] for case in plan}
        networks = {key: [future.result() for future in futures] for key, futures in waiting.items()}
        studies = [study(case, networks[case.key], data, options.seed, options.out, progress) for case in plan]
    results = {
        "version": rg.__version__,
        "seed": options.seed,
        "seconds": time.perf_counter() - began,
        "data": {"name": data.name, "train": plan[0].examples, "test": len(data.test_labels)},
        "models": [numbers for numbers, _ in studies],
    }
    pictures = {name: tensor for _, drawn in studies for name, tensor in drawn.items()}
    save(pictures, options.out / PICTURES, overwrite=True)
    (options.out / RESULTS).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.out / PAGE).write_text(demo_page(options.out), encoding="utf-8")
    show(summary(results))
    print(f"report: {options.out / PAGE}")


def choose_data(name: str) -> ImageData:
    """The data set that was asked for; MNIST where it is there and nothing else was said."""
    return mnist() if name == "mnist" or (name == "auto" and has_mnist()) else digits()


def cases(data: ImageData, *, is_quick: bool) -> tuple[Case, ...]:
    """The two architectures, trained in a way that suits the size of the data.

    Wide enough that aligned networks are connected, narrow enough that others are not.
    """
    size = data.train_images.shape[-1]
    is_small = len(data.train_labels) < 10_000
    hidden, channels, wide = (256, (64, 128), 256) if is_small else (256, (32, 64), 128)
    examples = len(data.train_labels) if is_small else 15_000
    epochs, batch = (40, 32) if is_small else (3, 64)
    if is_quick:
        hidden, channels, wide, epochs, examples = 24, (4, 8), 16, 2, 1000
    training = Training(epochs=epochs, batch=batch, optimizer=AdamW(5e-3, weight_decay=0.3))
    pixels, flat = size * size, channels[1] * (size // 4) ** 2
    return (
        Case(
            key="mlp",
            name="MLP",
            description=f"linear layers {pixels}-{hidden}-{hidden}-{data.classes} with ReLU",
            module=mlp(pixels, hidden, hidden, data.classes),
            first="layers.0.weight",
            training=training,
            examples=examples,
        ),
        Case(
            key="cnn",
            name="CNN",
            description=f"two convolutions with {channels[0]} and {channels[1]} channels, then linear layers "
            f"{flat}-{wide}-{data.classes}, with ReLU",
            module=CNN(channels, wide, data.classes, image=size),
            first="conv1.weight",
            training=training,
            examples=examples,
        ),
    )


def summary(results: dict[str, Any]) -> Table:
    """The numbers of the report for the terminal."""
    data = results["data"]
    table = Table(title=f"{data['name']}: loss and accuracy on {data['test']:,} test images", title_justify="left")
    for title in ("network", "loss", "accuracy", "barrier"):
        table.add_column(title, justify="left" if title == "network" else "right")
    for model in results["models"]:
        ways, barriers = {"naive": "as trained", "aligned": "aligned"}, model["barriers"]
        rows = [
            *((f"{model['name']} {a}, seed {n['seed']}", n, "") for a, n in zip("ABC", model["networks"], strict=True)),
            *((f"mean of A and B, {ways[w]}", model["midpoints"][w], f"{barriers[w]:.3f}") for w in ways),
            *((f"all {len(model['networks'])} merged, {ways[w]}", model["merged"][w], "") for w in ways),
        ]
        for label, values, barrier in rows:
            table.add_row(label, f"{values['loss']:.3f}", f"{values['accuracy']:.1%}", barrier)
        table.add_section()
    return table
