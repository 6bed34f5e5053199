"""A demo that trains small networks on handwritten digits, and then aligns, compares and merges the networks."""

import copy
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regauge.alignment import Result, align
from regauge.checkpoints import Alignment
from regauge.checkpoints.writing import save
from regauge.connect import line
from regauge.core.interpolation import distance, mean
from regauge.core.params import Params
from regauge.core.progress import Advance, Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.data import ImageData, digits, mnist
from regauge.data.images import has_mnist
from regauge.discovery import discover
from regauge.merging import merge
from regauge.names import VERSION
from regauge.nets import CNN, ClassifierConfig, initialize, mlp, split_batches, train
from regauge.training import AdamW, one_thread

NETWORKS = 3
DEMO_POINTS = 17
UNITS = 12
"""The number of units of the first layer that the report displays."""


@dataclass(frozen=True)
class Case:
    """One architecture of the demo, with a key for file names and a function that trains it on some images.

    `first` is the name of the first layer's weight, which the report displays.
    """

    key: str
    name: str
    description: str
    module: nn.Module
    first: str
    training: ClassifierConfig
    examples: int


def fit(case: Case, data: ImageData, seed: int, progress: Progress) -> Params:
    """Train one network. Several threads may call this function at once."""
    generator = torch.Generator().manual_seed(seed)
    module = copy.deepcopy(case.module)  # a module must not run with two sets of parameters at the same time
    images, labels = data.train_images[: case.examples], data.train_labels[: case.examples]
    start, label = initialize(module, generator), f"{case.name}: training from seed {seed}"

    def begin(_: str, total: float, /) -> Advance:
        return progress(label, total)

    return train(module, start, images, labels, case.training, generator=generator, progress=begin)


def study(
    case: Case, networks: Sequence[Params], data: ImageData, seed: int, folder: Path, progress: Progress
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Align the second of several networks to the first, measure losses on linear paths, and merge all networks.

    First, the symmetry is found and verified. The networks were trained from the seeds `seed`, `seed + 1` and so on.
    The networks, the alignment and the symmetry are written to the folder, and earlier files are replaced. The function
    returns the values in the report, ready for JSON, and the tensors that the report displays.
    """
    advance = progress(f"{case.name}: symmetry, alignment, barriers", 2 * DEMO_POINTS + len(networks) + 2)
    generator = torch.Generator().manual_seed(seed)
    a, b = networks[:2]
    module, example = copy.deepcopy(case.module), (data.test_images[:8],)
    module.load_state_dict(a)
    symmetry = discover(module, example, verify=False)

    result = align(a, b, symmetry)
    merged = {"naive": mean(networks), "aligned": merge(networks, symmetry).params}
    judge = Task(case.module, split_batches(data.test_images, data.test_labels))

    def evaluate(params: Params) -> dict[str, float]:
        values = judge.evaluate(params)
        advance()
        return values

    ends = {"naive": b, "aligned": result.params}
    lines = {name: line(a, end, evaluate, points=DEMO_POINTS) for name, end in ends.items()}
    numbers = {
        "key": case.key,
        "name": case.name,
        "description": case.description,
        "parameters": sum(tensor.numel() for tensor in a.values()),
        "networks": [{"seed": seed + k, **evaluate(params)} for k, params in enumerate(networks)],
        "curves": {"as trained": lines["naive"].table, "aligned": lines["aligned"].table},
        "barriers": {name: curve.barrier for name, curve in lines.items()},
        "midpoints": {name: curve.table[DEMO_POINTS // 2] for name, curve in lines.items()},
        "merged": {name: evaluate(params) for name, params in merged.items()},
        "distance": {
            when: distance(a, end, symmetry.buffers)
            for when, end in zip(("before", "after"), ends.values(), strict=True)
        },
        "units": min(UNITS, len(a[case.first])),
        "symmetry": describe(symmetry, module, example, generator),
    }
    kept = dict(zip("abc", networks, strict=True)) | {"b-aligned": result.params, "merged": merged["aligned"]}
    for name, params in kept.items():
        save(params, folder / f"{case.key}-{name}.safetensors", overwrite=True)
    beside = folder / f"{case.key}-b-aligned.alignment.safetensors"
    Alignment(symmetry, result.element).save(beside, overwrite=True)
    (folder / f"{case.key}-symmetry.json").write_text(symmetry.to_json() + "\n", encoding="utf-8")
    return numbers, draw(case, a, b, result)


def draw(case: Case, a: Params, b: Params, result: Result[Params]) -> dict[str, Tensor]:
    """Return tensors to display: permutations, and the incoming weights with the largest norm in A's first layer."""
    drawn = {f"{case.key}/perm/{name}": value.perm for name, value in result.element.items() if value.perm is not None}
    chosen = a[case.first].flatten(1).norm(dim=1).argsort(descending=True)[:UNITS]
    for label, params in {"a": a, "before": b, "after": result.params}.items():
        weights = params[case.first][chosen].flatten(1)
        side = int(weights.shape[1] ** 0.5)
        drawn[f"{case.key}/units/{label}"] = weights.reshape(-1, side, side)
    return drawn


def describe(
    symmetry: Symmetry, module: nn.Module, example: tuple[Tensor, ...], generator: torch.Generator
) -> dict[str, Any]:
    """Describe the symmetry for the report, and verify it."""
    check = symmetry.verify(module, example, generator=generator)
    groups = [
        {
            "name": group.name,
            "kind": group.kind,
            "size": group.size,
            "places": list(dict.fromkeys(f"{p.parameter}[{p.axis}]" for p in group.placements)),
        }
        for group in symmetry.groups
    ]
    text = str(check)
    return {
        "groups": groups,
        "log10_order": symmetry.log10_order,
        "dimension": symmetry.dimension,
        "check": text[0].upper() + text[1:],
        "is_verified": check.ok,
    }


def run_demo(
    folder: Path,
    *,
    data: Literal["auto", "digits", "mnist"] = "auto",
    seed: int = 0,
    quick: bool = False,
    progress: Progress = no_progress,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Train small networks on handwritten digits, align and merge the networks, and write them to a folder.

    Args:
        folder: The folder for checkpoints, alignments and symmetries. Files of an earlier demo are replaced.
        data: The data set: the digits of scikit-learn, or MNIST. "auto" means MNIST if MNIST is in the data folder.
        seed: The seed of the first network. Further networks have the seeds `seed + 1`, `seed + 2` and so on.
        quick: Whether to train narrow networks for only a few steps.
        progress: Displays the progress of each training run and of each evaluation.

    Returns:
        The values in the report, ready for JSON, and the tensors that the report displays.
    """
    began = time.perf_counter()
    images = mnist() if data == "mnist" or (data == "auto" and has_mnist()) else digits()
    folder.mkdir(parents=True, exist_ok=True)
    plan = cases(images, is_quick=quick)
    seeds = range(seed, seed + NETWORKS)
    with one_thread():
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            waiting = {case.key: [pool.submit(fit, case, images, one, progress) for one in seeds] for case in plan}
        networks = {key: [future.result() for future in futures] for key, futures in waiting.items()}
        studies = [study(case, networks[case.key], images, seed, folder, progress) for case in plan]
    results = {
        "version": VERSION,
        "seed": seed,
        "seconds": time.perf_counter() - began,
        "data": {"name": images.name, "train": plan[0].examples, "test": len(images.test_labels)},
        "models": [numbers for numbers, _ in studies],
    }
    return results, {name: tensor for _, drawn in studies for name, tensor in drawn.items()}


def cases(data: ImageData, *, is_quick: bool) -> tuple[Case, ...]:
    """Return the two architectures, with training that suits the size of the data.

    The widths are chosen such that alignment clearly lowers the loss on the linear paths between networks.
    """
    size = data.train_images.shape[-1]
    is_small = len(data.train_labels) < 10_000
    hidden, channels, wide = (256, (64, 128), 256) if is_small else (256, (32, 64), 128)
    examples = len(data.train_labels) if is_small else 15_000
    epochs, batch = (40, 32) if is_small else (3, 64)
    if is_quick:
        hidden, channels, wide, epochs, examples = 24, (4, 8), 16, 2, 1000
    training = ClassifierConfig(epochs=epochs, batch=batch, optimizer=AdamW(5e-3, weight_decay=0.3))
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
