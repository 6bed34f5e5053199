"""Networks with a known history, for `benchmarks/lineage.py`: trained, fine-tuned, pruned, merged, distilled, or
transformed.

Every network is written once to a folder, so an interrupted run continues where it stopped.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import regauge as rg
from regauge.data.images import digits
from regauge.data.packaged import help_topics, windows
from regauge.nets.mlp import mlp
from regauge.nets.transformer import GPT, Llama, ViT, initialize_transformer

Params = rg.Params
Examples = tuple[Tensor, Tensor]
"""Inputs and targets."""

STEPS = 200
"""The number of steps of a whole training."""
BATCH = 32


@dataclass(frozen=True)
class Family:
    """An architecture with its data, which are divided into two halves.

    Attributes:
        name: The name in the table.
        module: The module that runs the networks.
        lr: Learning rate of Adam.
        halves: Inputs and targets of two halves of the training data.
        test: Inputs and targets for accuracies.
    """

    name: str
    module: nn.Module
    lr: float
    halves: tuple[Examples, Examples]
    test: Examples

    @cached_property
    def symmetry(self) -> rg.Symmetry:
        """The symmetry that `discover` finds."""
        return rg.discover(self.module, (self.test[0][:2],))

    def initialize(self, seed: int) -> Params:
        """Return a randomly initialized network."""
        generator = torch.Generator().manual_seed(seed)
        if isinstance(self.module, GPT | Llama | ViT):
            return initialize_transformer(self.module, generator)
        torch.manual_seed(seed)
        for part in self.module.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}

    def train(self, start: Params, half: int, seed: int, steps: int, teacher: Params | None = None) -> Params:
        """Train on one half of the data, or on the outputs of a teacher for this half."""
        generator = torch.Generator().manual_seed(seed)
        inputs, targets = self.halves[half]
        self.module.load_state_dict(start)
        self.module.train()
        optimizer = torch.optim.Adam(self.module.parameters(), lr=self.lr)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = self.lr * (1 - step / steps)
            rows = torch.randint(len(inputs), (BATCH,), generator=generator)
            outputs = self.module(inputs[rows])
            if teacher is None:
                loss = functional.cross_entropy(outputs.flatten(0, -2), targets[rows].flatten())
            else:
                with torch.no_grad():
                    wanted = functional_call(self.module, teacher, (inputs[rows],)).softmax(-1)
                loss = functional.cross_entropy(outputs.flatten(0, -2), wanted.flatten(0, -2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.module.eval()
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}


def halves(inputs: Tensor, targets: Tensor) -> tuple[Examples, Examples]:
    """Return two halves of the training data."""
    (a, b), (x, y) = inputs.tensor_split(2), targets.tensor_split(2)
    return (a, x), (b, y)


def convolutional() -> nn.Sequential:
    """Return a network of three 3 x 3 convolutions with batch normalization, the mean over positions, and a linear
    layer.
    """
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


@cache
def families() -> dict[str, "Family"]:
    """Return all architectures."""
    images, text = digits(), help_topics()
    pictures = [(images.train_images, images.train_labels), (images.test_images, images.test_labels)]
    flat = [(inputs.flatten(1), labels) for inputs, labels in pictures]
    pieces = [windows(text.train, 32), windows(text.validation, 32)]
    symbols = len(text.symbols)
    made: dict[str, tuple[nn.Module, float, list[Examples]]] = {
        "MLP": (mlp(64, 96, 96, 10), 2e-3, flat),
        "CNN": (convolutional(), 3e-3, pictures),
        "ViT": (ViT(8, 2, width=32, layers=2, heads=4), 2e-3, pictures),
        "GPT": (GPT(symbols, 32, width=32, layers=2, heads=4), 3e-3, pieces),
        "Llama": (Llama(symbols, width=32, layers=2, heads=4, kv_heads=2), 3e-3, pieces),
    }
    return {
        name: Family(name, module.eval(), lr, halves(*train), test)
        for name, (module, lr, (train, test)) in made.items()
    }


def prune(params: Params, share: float) -> Params:
    """Return a network in which the smallest entries of each matrix are zero."""
    result = dict(params)
    for name, tensor in params.items():
        if tensor.ndim > 1:
            result[name] = torch.where(tensor.abs() > tensor.abs().flatten().quantile(share), tensor, 0.0)
    return result


def move(family: Family, params: Params, seed: int) -> Params:
    """Return a copy, transformed by a random element of the whole group and rounded to bfloat16."""
    element = family.symmetry.random(torch.Generator().manual_seed(seed))
    moved = family.symmetry.act(element, params)
    return {name: t.bfloat16() if t.is_floating_point() else t for name, t in moved.items()}


def mean(a: Params, b: Params) -> Params:
    """Return the network halfway between two networks."""
    return {name: (t + b[name]) / 2 if t.is_floating_point() else t for name, t in a.items()}


@dataclass(frozen=True)
class Shelf:
    """Networks of one family, made on first request and stored in a folder."""

    family: Family
    folder: Path

    def __call__(self, kind: str, seed: int, amount: float = 0.0) -> Params:
        """Return a network by its kind, its seed and, for fine-tuning, the share of a training."""
        path = self.folder / f"{self.family.name} {kind} {seed} {amount}.safetensors"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            save_file({n: t.contiguous() for n, t in self._make(kind, seed, amount).items()}, partial)
            partial.rename(path)
        return load_file(path)

    def _make(self, kind: str, seed: int, amount: float) -> Params:
        family = self.family
        if kind == "base":
            return family.train(family.initialize(seed), 0, seed, STEPS)
        if kind == "same start, other data":
            return family.train(family.initialize(seed), 1, seed + 50, STEPS)
        if kind == "fine-tuned":
            return family.train(self("base", seed), 1, seed + 1000, max(1, round(amount * STEPS)))
        if kind == "distilled":
            return family.train(family.initialize(seed + 5000), 1, seed, STEPS, teacher=self("base", seed))
        raise ValueError(f"no network is called {kind!r}")
