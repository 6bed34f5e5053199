"""Every alignment method on the same pairs of trained networks: objective, barrier, AUC, seconds, and peak memory.

Each run has a separate process with one thread, in which its CPU seconds and its peak memory (above the memory at the
start) are measured. Methods with data use the first 4,000 training images in batches of 250. Barriers and areas are
measured at 25 points on the 10,000 test images. The packages `rebasin` and `sinkhorn-rebasin` run on the same pairs.
`sinkhorn-rebasin` needs a process with another import path, moves A toward B, and is evaluated after 20 to 160 steps.

    REGAUGE_DATA=... SINKHORN_REBASIN=FOLDER python benchmarks/methods.py [--pairs 3] [--only mlp] [--out methods.md]
"""

import argparse
import copy
import importlib.util
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regauge as rg
from regauge.data.images import ImageData, mnist
from regauge.nets.classification import ClassifierConfig, initialize, train
from regauge.nets.cnn import CNN
from regauge.nets.mlp import ResidualMLP, mlp
from regauge.training.optimizers import AdamW

POINTS = 25
PEER_STEPS = (20, 40, 80, 160)


@dataclass(frozen=True)
class Case:
    """One architecture, the training of its networks, and `sizes` if the other packages can run it."""

    key: str
    name: str
    make: Callable[[], nn.Module]
    training: ClassifierConfig
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Run:
    """The result of one method for one pair."""

    objective: float
    barrier: float
    auc: float
    seconds: float
    megabytes: float


CASES = (
    Case(
        "mlp",
        "MLP 784-128-128-128-10",
        lambda: mlp(784, 128, 128, 128, 10),
        ClassifierConfig(epochs=5, batch=128, optimizer=AdamW(1e-3)),
        (784, 128, 128, 128, 10),
    ),
    Case(
        "wide",
        "MLP 784-512-512-512-10",
        lambda: mlp(784, 512, 512, 512, 10),
        ClassifierConfig(epochs=3),
        (784, 512, 512, 512, 10),
    ),
    Case(
        "residual",
        "residual MLP 784-128, six blocks of 256",
        lambda: ResidualMLP(784, 128, 256, 6, 10),
        ClassifierConfig(epochs=4),
    ),
    Case(
        "cnn",
        "CNN, convolutions of 32 and 64 channels, linear 128",
        lambda: CNN((32, 64), 128, 10, image=28),
        ClassifierConfig(epochs=2),
    ),
)

METHODS: dict[str, tuple[object, bool]] = {
    "WeightMatching": (rg.WeightMatching(), False),
    'WeightMatching(start="identity"), as published': (rg.WeightMatching(start="identity"), False),
    "WeightMatching(restarts=8), chosen by the loss": (rg.WeightMatching(restarts=8), True),
    "FrankWolfe": (rg.FrankWolfe(), False),
    'Sinkhorn("l2")': (rg.Sinkhorn(loss="l2"), False),
    "ActivationMatching": (rg.ActivationMatching(), True),
    "MixedMatching": (rg.alignment.MixedMatching(), True),
    "StraightThrough": (rg.StraightThrough(), True),
    'Sinkhorn("midpoint")': (rg.Sinkhorn(loss="midpoint"), True),
    'Sinkhorn("random")': (rg.Sinkhorn(loss="random"), True),
    'Sinkhorn("midpoint", init=MixedMatching())': (
        rg.Sinkhorn(loss="midpoint", init=rg.alignment.MixedMatching()),
        True,
    ),
}

TOGETHER = {
    "WeightMatching": rg.WeightMatching(),
    "MixedMatching": rg.alignment.MixedMatching(),
    'Sinkhorn("midpoint")': rg.Sinkhorn(loss="midpoint"),
    'Sinkhorn("midpoint", init=MixedMatching(), steps=20)': rg.Sinkhorn(
        init=rg.alignment.MixedMatching(), steps=20, every=20
    ),
}


def pair(case: Case, seeds: tuple[int, int], data: ImageData) -> tuple[rg.Params, rg.Params]:
    """Return two networks with different initializations and orders of the data."""
    networks = []
    for seed in seeds:
        generator, module = torch.Generator().manual_seed(seed), case.make()
        torch.manual_seed(seed)
        start = initialize(module, generator)
        networks.append(train(module, start, data.train_images, data.train_labels, case.training, generator=generator))
    return networks[0], networks[1]


def judged(
    evaluate: Callable[[rg.Params], Mapping[str, float]], a: rg.Params, b: rg.Params
) -> tuple[float, float, float]:
    """Return the inner product, the barrier and the area of a line."""
    curve = rg.line(a, b, evaluate, points=POINTS)
    objective = sum(float((a[name].double() * b[name].double()).sum()) for name in a)
    return objective, curve.barrier, curve.auc


def alone(work: Callable[[], rg.Params]) -> tuple[rg.Params, float, float]:
    """Run `work` in a separate process. Return its result, its CPU seconds, and its peak memory in megabytes."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        params = work()
        seconds = time.process_time() - start
        sender.send((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))
        save_file({name: tensor.contiguous() for name, tensor in params.items()}, path)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "moved.safetensors"
        process = context.Process(target=run)
        process.start()
        sender.close()
        seconds, megabytes = receiver.recv()
        process.join()
        return load_file(path), seconds, megabytes


def ours(
    method: object, task: rg.Task | None, a: rg.Params, b: rg.Params, symmetry: rg.Symmetry
) -> Callable[[], rg.Params]:
    """Return one of this library's methods as a function without arguments."""
    return lambda: rg.align(a, b, symmetry, method=method, task=task, generator=torch.Generator().manual_seed(0)).params


def rebasin_moved(case: Case, inputs: Tensor, a: rg.Params, b: rg.Params) -> rg.Params:
    """Return B, transformed by the package `rebasin`."""
    from rebasin import PermutationCoordinateDescent

    left, right = case.make().eval(), case.make().eval()
    left.load_state_dict(a)
    right.load_state_dict(b)
    descent = PermutationCoordinateDescent(left, right, inputs)
    torch.manual_seed(0)
    descent.rebasin()
    return {name: tensor.detach().clone() for name, tensor in right.state_dict().items()}


def sinkhorn_rebasin(
    case: Case, folder: Path, a: rg.Params, b: rg.Params, data: ImageData
) -> dict[int, tuple[rg.Params, float]]:
    """Return, for each number of steps, the network A after the package `sinkhorn-rebasin`, and its CPU seconds."""
    with tempfile.TemporaryDirectory() as scratch:
        source, result = Path(scratch) / "pair.safetensors", Path(scratch) / "moved.safetensors"
        tensors = {f"{key}/{name}": t.contiguous() for key, net in (("a", a), ("b", b)) for name, t in net.items()}
        inputs = data.train_images[:10_000].flatten(1).contiguous()
        save_file(tensors | {"inputs": inputs, "targets": data.train_labels[:10_000].contiguous()}, source)
        worker = Path(__file__).parent / "peers" / "sinkhorn_rebasin.py"
        command = [sys.executable, str(worker), str(source), str(result), "--sizes", ",".join(map(str, case.sizes))]
        command += ["--at", ",".join(map(str, PEER_STEPS))]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"})
        with safe_open(result, "pt") as file:
            seconds = json.loads(file.metadata()["seconds"])
        kept = load_file(result)
    moved = {}
    for step in PEER_STEPS:
        params = {name.split("/", 1)[1]: t for name, t in kept.items() if name.startswith(f"{step}/")}
        moved[step] = (params, float(seconds[str(step)]))
    return moved


def table(results: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return a Markdown table with means over the pairs."""
    lines = ["| method | weight objective | barrier | AUC | CPU s | peak MB |", "| --- | --- | --- | --- | --- | --- |"]
    for label, runs in results.items():
        cells = (
            f"{mean(r.objective for r in runs):.1f}",
            f"{mean(r.barrier for r in runs):.4f}",
            f"{mean(r.auc for r in runs):.4f}",
            f"{mean(r.seconds for r in runs):.3f}",
            f"{mean(r.megabytes for r in runs):.0f}",
        )
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def measure(case: Case, pairs: int, data: ImageData, peer: Path | None, progress: Progress) -> dict[str, list[Run]]:
    """Run every method on every pair of one architecture."""
    module = case.make().eval()
    symmetry = rg.discover(module, (data.test_images[:4],), verify=False)
    batches = list(zip(data.train_images[:4_000].split(250), data.train_labels[:4_000].split(250), strict=True))
    test = list(zip(data.test_images.split(1000), data.test_labels.split(1000), strict=True))
    evaluate = rg.Task(module, test).evaluate
    results: dict[str, list[Run]] = {}
    has_rebasin = bool(case.sizes) and importlib.util.find_spec("rebasin") is not None
    bar = progress.add_task(
        case.name,
        total=pairs * (len(METHODS) + 2 + has_rebasin + (peer is not None and bool(case.sizes))) + len(TOGETHER),
    )

    def note(label: str, a: rg.Params, b: rg.Params, seconds: float, megabytes: float) -> None:
        results.setdefault(label, []).append(Run(*judged(evaluate, a, b), seconds, megabytes))

    networks = []
    for k in range(pairs):
        a, b = pair(case, (2 * k, 2 * k + 1), data)
        networks.append((a, b))
        progress.advance(bar)
        note("unaligned", a, b, 0.0, 0.0)
        progress.advance(bar)
        for label, (method, needs_task) in METHODS.items():
            task = rg.Task(copy.deepcopy(module), batches) if needs_task else None
            moved, seconds, megabytes = alone(ours(method, task, a, b, symmetry))
            note(label, a, moved, seconds, megabytes)
            progress.advance(bar)
        if has_rebasin:
            moved, seconds, megabytes = alone(lambda a=a, b=b: rebasin_moved(case, data.test_images[:4], a, b))
            note("PyPI rebasin", a, moved, seconds, megabytes)
            progress.advance(bar)
        if peer is not None and case.sizes:
            for step, (params, seconds) in sinkhorn_rebasin(case, peer, a, b, data).items():
                note(f"PyPI sinkhorn-rebasin, {step} steps", b, params, seconds, float("nan"))
            progress.advance(bar)
    # All pairs in one program, for the methods that have one.
    a, b = ({name: torch.stack([pair[k][name] for pair in networks]) for name in networks[0][k]} for k in (0, 1))
    task = rg.Task(copy.deepcopy(module), batches)
    for label, method in TOGETHER.items():
        moved, seconds, megabytes = alone(
            lambda method=method: (
                rg.alignment.align_pairs(
                    a, b, symmetry, method=method, task=task, generator=torch.Generator().manual_seed(0)
                ).params
            )
        )
        for k in range(pairs):
            params = {name: tensor[k] for name, tensor in moved.items()}
            note(
                f"{label}, {pairs} pairs at once, per pair", networks[k][0], params, seconds / pairs, megabytes / pairs
            )
        progress.advance(bar)
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only", choices=[case.key for case in CASES])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = mnist()
    peer = Path(os.environ["SINKHORN_REBASIN"]) if "SINKHORN_REBASIN" in os.environ else None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    lines: list[str] = []
    with Progress(*columns) as progress:
        for case in CASES:
            if options.only in (None, case.key):
                found = measure(case, options.pairs, data, peer, progress)
                lines += [f"### {case.name}, MNIST, mean of {options.pairs} pairs", "", *table(found), ""]
                if options.out is not None:
                    options.out.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
