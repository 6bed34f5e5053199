"""Networks of several architectures with a fine-tune and a copy in another gauge, for tests of transferred changes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import regauge as rg
from regauge.nets.transformer import GPT, Llama, ViT

Make = tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]


def chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randn(shape, generator=g, dtype=torch.float64)


def words(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randint(0, 11, shape, generator=g)


class Own(nn.Module):
    """Parameters outside of layers, and a mask that is structure."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 9)), nn.Parameter(torch.randn(9, 3))
        self.register_buffer("mask", torch.tensor([1.0, 1, 0, 1, 1, 1]))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.mask @ self.first).relu() @ self.second


class TiedGPT(GPT):
    """A language model whose head has the rows of the embedding."""

    def __init__(self) -> None:
        super().__init__(11, 6, width=12, layers=1, heads=2)
        self.head.weight = self.embedding.weight


def mlp(activation: type[nn.Module], width: int = 9) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, width), activation(), nn.Linear(width, 7), activation(), nn.Linear(7, 3))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3, bias=False), nn.GroupNorm(5, 5), nn.ReLU(),
        nn.Flatten(), nn.Linear(80, 3),
    )  # fmt: skip


CASES: dict[str, Make] = {
    "relu": (lambda: mlp(nn.ReLU), noise(60, 12)),
    "tanh": (lambda: mlp(nn.Tanh), noise(60, 12)),
    "batch norm": (cnn, noise(20, 2, 8, 8)),
    "own parameters": (Own, noise(40, 6)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), noise(10, 5, 8)),
    "gpt": (lambda: GPT(11, 6, width=12, layers=1, heads=2), words(8, 6)),
    "tied gpt": (TiedGPT, words(8, 6)),
    "llama": (lambda: Llama(11, width=12, layers=1, heads=2, kv_heads=1), words(8, 6)),
    "vit": (lambda: ViT(8, 4, width=8, heads=2, layers=1), noise(6, 1, 8, 8)),
}


SYMMETRIES: dict[tuple[str, int], rg.Symmetry] = {}
"""The symmetry of each case and seed, which is discovered once in a process."""


class Networks:
    """A base, a fine-tune of it, a copy of the base in another gauge, and the fine-tune in this gauge."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.name = name
        make, inputs = CASES[name]
        torch.manual_seed(seed)
        self.module = make().double().eval()
        g = chance(seed)
        self.x = inputs(g)
        if (name, seed) not in SYMMETRIES:
            SYMMETRIES[name, seed] = rg.discover(self.module, (self.x[:2],))
        self.symmetry = SYMMETRIES[name, seed]
        tied = {n: names[0] for names in self.symmetry.tied for n in names}
        fixed = {*self.symmetry.structure}

        def near(params: Mapping[str, Tensor], size: float) -> rg.Params:
            made = {
                n: t + size * torch.randn(t.shape, dtype=t.dtype, generator=g).abs()
                if t.is_floating_point() and n not in fixed
                else t.clone()
                for n, t in params.items()
            }
            return {n: made[tied.get(n, n)] for n in made}

        self.base = near(self.module.state_dict(), 0.3)
        self.tuned = near(self.base, 0.05)
        self.element = self.symmetry.random(g)
        self.copy, self.wanted = (self.symmetry.act(self.element, one) for one in (self.base, self.tuned))

    def run(self, params: Mapping[str, Tensor]) -> Tensor:
        return torch.func.functional_call(self.module, dict(params), (self.x,), tie_weights=False).detach()

    def ways(self) -> dict[str, dict[str, Any]]:
        """Return the keywords of each mode, with a task for which the fine-tune itself is the best network."""
        task = rg.Task(self.module, [(self.x, self.run(self.tuned))], criterion=functional.mse_loss)
        return {"weights": {}, "inputs": {"inputs": self.x, "module": self.module}, "task": {"task": task}}


def labels(nets: Networks, count: int = 40) -> rg.Task:
    targets = nets.run(nets.tuned).flatten(0, -2).argmax(-1).reshape(nets.run(nets.tuned).shape[:-1])
    return rg.Task(nets.module, [(nets.x[k : k + 1], targets[k : k + 1]) for k in range(min(count, len(nets.x)))])
