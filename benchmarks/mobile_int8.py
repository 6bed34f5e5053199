"""Inverted residual blocks at 8 bits per tensor, as in MobileNetV2, as a Markdown table.

    REGAUGE_DATA=... .venv/bin/python benchmarks/mobile_int8.py FOLDER [relu relu6]

The benchmark trains networks on Fashion-MNIST, about three CPU minutes each, and stores them in FOLDER. An interrupted
run continues after its last epoch. Normalization is folded into the convolutions before the weights are rounded.

ReLU6 clips its inputs, so its channels cannot be scaled. Nagel et al. (2019) first replace ReLU6 by ReLU, which is not
a symmetry but changes the function; these rows are marked.
"""

import json
import math
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

import regauge as rg
from regauge.checkpoints.writing import save_text
from regauge.core.params import Params
from regauge.core.scales import directions
from regauge.data.images import fashion_mnist
from regauge.gauging import RoundToNearest, round_network, rounded_activations
from regauge.gauging.methods.equalize import diagonal, scaled_element
from regauge.gauging.result import describe_fixed

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from mobilenet import MobileNetV2

SEEDS = 3
EPOCHS, BATCH, LR, WEIGHT_DECAY = 2, 64, 0.2, 4e-3
TENSOR = RoundToNearest(8, is_per_tensor=True)
TESTED = 2000
DECADES = 0.5
"""The standard deviation of the log10 of the factors in the constructed case."""
SETTINGS = ((1, 32, 1, 1), (4, 48, 2, 1), (4, 64, 2, 2), (4, 96, 2, 2))
"""Expansion, channels, repetitions and stride of each stage. Channels are halved by the width."""
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "relu6": nn.ReLU6}


def make(activation: str) -> nn.Module:
    """Return a MobileNetV2 for 28 x 28 pixels, with an activation."""
    module = with_activation(MobileNetV2(10, width=0.5, in_channels=1, settings=SETTINGS, last=128), activation)
    return module.to(memory_format=torch.channels_last)


def with_activation(module: nn.Module, activation: str) -> nn.Module:
    """Return the module with another activation instead of every ReLU6."""
    for part in [one for one in module.modules() if isinstance(one, nn.Sequential)]:
        for name, one in part.named_children():
            if isinstance(one, nn.ReLU6):
                part[int(name)] = ACTIVATIONS[activation]()
    return module


def trained(activation: str, seed: int, folder: Path) -> nn.Module:
    """Return a network trained from a seed. Training continues from the last stored epoch."""
    torch.manual_seed(seed)
    module = make(activation)
    data = fashion_mnist()
    images, labels = data.train_images, data.train_labels
    each = len(images) // BATCH
    optimizer = torch.optim.SGD(module.parameters(), LR, momentum=0.9, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=each * EPOCHS, pct_start=0.2)
    parts = {"module": module, "optimizer": optimizer, "schedule": schedule}
    path, first, start = folder / f"{activation}-{seed}.pt", 0, time.process_time()
    if path.exists():
        saved = torch.load(path, weights_only=True)
        first, start = saved["epochs"], start - saved["seconds"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for epoch in range(first, EPOCHS):
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        order = torch.randperm(len(images), generator=generator)
        for k in range(each):
            chosen = order[k * BATCH : (k + 1) * BATCH]
            flips = torch.rand(BATCH, 1, 1, 1, generator=generator) < 0.5
            x = torch.where(flips, images[chosen].flip(-1), images[chosen])
            loss = functional.cross_entropy(module(x.contiguous(memory_format=torch.channels_last)), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        seconds = time.process_time() - start
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "epochs": epoch + 1, "seconds": seconds}, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        print(f"{activation} {seed}: epoch {epoch}, loss {loss.item():.3f}, {seconds:.0f} CPU s", file=sys.stderr)
    return module.eval()


def folded(module: nn.Module) -> nn.Module:
    """Return the network without normalization, which is folded into the preceding convolutions."""
    for part in [one for one in module.modules() if isinstance(one, nn.Sequential)]:
        for k, one in enumerate(part):
            if isinstance(one, nn.BatchNorm2d):
                convolution = part[k - 1]
                assert isinstance(convolution, nn.Conv2d)
                part[k - 1], part[k] = fuse_conv_bn_eval(convolution, one), nn.Identity()
    return module


def spread_out(params: Params, symmetry: rg.Symmetry, seed: int) -> Params:
    """Return a copy of the network with a random scale for every unit that can be scaled: a constructed case."""
    generator = torch.Generator().manual_seed(seed)
    logs = [
        (one, DECADES * math.log(10) * torch.randn(one.count, generator=generator, dtype=torch.float64))
        for one in directions(diagonal(symmetry), "move")
    ]
    return symmetry.act(scaled_element(diagonal(symmetry).identity(), logs), params)


def ranges_of(params: Params) -> float:
    """Return the largest log10 ratio of the ranges of two channels of a depthwise convolution, without channels of
    zeros.
    """
    found = []
    for tensor in params.values():
        if tensor.ndim == 4 and tensor.shape[1] == 1 and len(tensor) > 1:
            ranges = tensor.abs().amax((1, 2, 3))
            ranges = ranges[ranges > 1e-6 * ranges.max()]
            found.append(float((ranges.max() / ranges.min()).log10()))
    return max(found)


METHODS: dict[str, rg.gauging.GaugeMethod | None] = {
    "as it is": None,
    "equalized": rg.Equalize(),
    "equalized, smoothed": rg.gauging.Chain((rg.Equalize(), rg.gauging.Smooth(TENSOR, activations=TENSOR, grid=5))),
}


def accuracies(activation: str, seed: int, folder: Path) -> tuple[dict[str, float], list[str]]:
    """Return the accuracies of a network, and the groups that equalization did not change."""
    module = folded(trained(activation, seed, folder))
    found, left = _rounded(module, seed, "")
    if activation == "relu6":
        others, _ = _rounded(with_activation(module, "relu"), seed, "ReLU in its place: ")
        found |= others
    return found, left


def _rounded(module: nn.Module, seed: int, prefix: str) -> tuple[dict[str, float], list[str]]:
    data = fashion_mnist()
    task = rg.Task(module, [(data.test_images[:TESTED], data.test_labels[:TESTED])])
    calibration = rg.Task(module, [(data.train_images[:32], data.train_labels[:32])])
    params = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    symmetry = rg.discover(module, (data.train_images[:2],))
    found, left = {f"{prefix}not rounded": task.evaluate(params)["accuracy"]}, list[str]()
    for label, start in {"as trained": params, "spread": spread_out(params, symmetry, seed)}.items():
        found[f"{prefix}{label}: decades between channels"] = ranges_of(start)
        for name, method in METHODS.items():
            moved = start
            if method is not None:
                result = rg.gauge(start, symmetry, method=method, task=calibration)
                assert result.certificate is not None
                assert result.certificate.ok, result.certificate
                moved, left = result.params, describe_fixed(result.fixed)
            for scheme, weights in {"": TENSOR, ", a scale per channel": RoundToNearest(8)}.items():
                if scheme and name != "as it is":
                    continue
                with rounded_activations(TENSOR):
                    reached = task.evaluate(round_network(moved, symmetry, weights))["accuracy"]
                found[f"{prefix}{label}: {name}{scheme}"] = reached
    return found, left


def main(arguments: list[str]) -> None:
    warnings.simplefilter("ignore")
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for activation in arguments[1:] or list(ACTIVATIONS):
        rows = []
        for seed in range(SEEDS):
            measured = folder / f"{activation}-{seed}.json"
            if measured.exists():
                found, left = json.loads(measured.read_text())
            else:
                found, left = accuracies(activation, seed, folder)
                save_text(json.dumps([found, left]), measured)
            rows.append(found)
            print(f"{activation} {seed}: {found}", *left, sep="\n", file=sys.stderr, flush=True)
        print(f"\n| {activation} | {' | '.join(f'seed {seed}' for seed in range(SEEDS))} |\n| --- |{' --- |' * SEEDS}")
        for label in rows[0]:
            print(f"| {label} | {' | '.join(f'{row[label]:.4f}' for row in rows)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
