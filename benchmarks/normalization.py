"""Filter response normalization compared with timm's implementation and with batch normalization: the layer alone, and
training steps.

    python benchmarks/normalization.py [--timm FOLDER] [--width 2]

FOLDER is a checkout of huggingface/pytorch-image-models, of which one file is loaded. A step consists of a forward pass
and a backward pass to the parameters; for the layer alone, the backward pass also reaches its input. The programs run
in turns on one thread, and the fastest of several rounds is reported.
"""

import argparse
import importlib
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regauge.nets.norm import FilterResponseNorm
from regauge.nets.resnet import resnet20

BATCH, ROUNDS = 125, 5
Make = Callable[[int], nn.Module]


class Direct(nn.Module):
    """The four equations of the paper, without changes."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.gamma, self.beta, self.tau = (nn.Parameter(torch.full((channels, 1, 1), x)) for x in (1.0, 0.0, 0.0))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        power = x.square().mean((-2, -1), keepdim=True)
        return torch.maximum(self.gamma * (x * torch.rsqrt(power + self.eps)) + self.beta, self.tau)


def timm_layer(folder: Path) -> Make:
    """Return the layer of a checkout, without importing the remaining package."""
    for name, path in (("timm", folder / "timm"), ("timm.layers", folder / "timm" / "layers")):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    make: Make = importlib.import_module("timm.layers.filter_response_norm").FilterResponseNormTlu2d
    return make


def replaced(network: nn.Module, make: Make) -> nn.Module:
    """Return the network with other normalization layers instead of its own."""
    for module in network.modules():
        for name, child in module.named_children():
            if isinstance(child, FilterResponseNorm):
                setattr(module, name, make(len(child.weight)))
    return network


def step(module: nn.Module, x: Tensor, labels: Tensor | None, *, is_bfloat16: bool) -> Callable[[], object]:
    """Run one forward and one backward pass; without labels, of the layer alone."""
    params = [*module.parameters()]

    def run() -> object:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16, cache_enabled=False):
            outputs = module(x)
            loss = outputs.float().sum() if labels is None else cross_entropy(outputs.float(), labels)
        return torch.autograd.grad(loss, params if labels is not None else [x, *params])

    return run


def best(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the smallest number of milliseconds per image."""
    found = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            began = time.process_time()
            run()
            found[name] = min(found[name], (time.process_time() - began) / BATCH * 1e3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timm", type=Path)
    parser.add_argument("--width", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    makes: dict[str, Make] = {"regauge": FilterResponseNorm, "the equations as they stand": Direct}
    if args.timm is not None:
        makes["timm"] = timm_layer(args.timm)
    probe = torch.randn(2, 8, 5, 5)
    for make in makes.values():
        torch.testing.assert_close(make(8)(probe), Direct(8)(probe), rtol=1e-4, atol=1e-4)  # the values of eps differ
    layers: dict[str, Make] = {
        **makes,
        "batch normalization and ReLU": lambda n: nn.Sequential(nn.BatchNorm2d(n), nn.ReLU()),
    }
    images = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (BATCH,))
    columns: dict[str, dict[str, float]] = {}
    for is_bfloat16 in (False, True):
        dtype, kind = (torch.bfloat16, "bfloat16") if is_bfloat16 else (torch.float32, "float32")
        hidden = torch.randn(BATCH, 16 * args.width, 32, 32).to(dtype).contiguous(memory_format=torch.channels_last)
        alone = {
            name: step(make(16 * args.width), hidden.clone().requires_grad_(), None, is_bfloat16=is_bfloat16)
            for name, make in layers.items()
        }
        columns[f"layer, {kind}"] = best(alone)
        networks = {
            name: replaced(resnet20(width=args.width, in_channels=3, norm="filter"), make)
            for name, make in makes.items()
        }
        networks["batch normalization and ReLU"] = resnet20(width=args.width, in_channels=3, norm="batch")
        columns[f"ResNet20 x{args.width}, {kind}"] = best(
            {name: step(network, images, labels, is_bfloat16=is_bfloat16) for name, network in networks.items()}
        )
    print(f"| ms per image | {' | '.join(columns)} |")
    print("| --- |" + " ---: |" * len(columns))
    for name in layers:
        cells = (f"{column[name]:.2f} ({column[name] / column['regauge']:.1f})" for column in columns.values())
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
