"""The autoencoders that are compared: encoders with different parts of the symmetry, and two decoders."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import regauge as rg
from regauge import learn
from regauge import weightspace as ws
from regauge.core.params import Params
from regauge.storage import Store
from regauge_papers import chains
from regauge_papers.experiment import Run, make_once


@dataclass(frozen=True)
class Coder:
    """A row of a table: an autoencoder and its training."""

    label: str
    config: learn.AutoencoderConfig
    chain: chains.ChainScaleConfig | None = None  # the encoder, where it is the published one
    is_plain: bool = False  # whether the encoder is an MLP on all weights
    paper: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def fit(self, store: Store, generator: torch.Generator, inputs: Any, split: Any = None) -> learn.Autoencoder:
        """Train the autoencoder."""
        encoder: nn.Module | None = None
        if self.chain is not None:
            head = ws.Invariant(self.config.latent)
            encoder = chains.ChainScaleGMN(store.require_symmetry(), self.chain, head=head, generator=generator)
        if self.is_plain:
            encoder = Plain(store.read(range(min(256, len(store)))), self.config.latent, generator)
        return learn.fit_autoencoder(
            store,
            config=self.config,
            inputs=inputs,
            generator=generator,
            encoder=encoder,
            split=split,
            checkpoints="all",
        )

    def trained(self, store: Store, inputs: Any, run: Run, settings: object, split: Any = None) -> learn.Autoencoder:
        """Return the autoencoder, trained now or by an earlier run with the same settings."""
        path = run.place("autoencoders", settings)
        chance = run.generator("autoencoder", self.label)
        make_once(path, lambda: self.fit(store, chance, inputs, split).save(path))
        return learn.load_autoencoder(path)


class Plain(nn.Module):
    """An MLP on all standardized weights. The MLP can learn the symmetry only from networks that group elements have
    transformed.
    """

    def __init__(
        self, sample: Params, latent: int, generator: torch.Generator, widths: Sequence[int] = (512, 256)
    ) -> None:
        super().__init__()
        self.names = [name for name, tensor in sample.items() if tensor.is_floating_point()]
        flat = self._flatten(sample)
        self.register_buffer("mean", flat.mean(0))
        self.register_buffer("deviation", flat.std(0).clamp_min(1e-6))
        sizes = [flat.shape[1], *widths, latent]
        layers: list[nn.Module] = []
        for k, (before, after) in enumerate(pairwise(sizes)):
            linear = nn.Linear(before, after)
            nn.init.normal_(linear.weight, 0.0, (2 / before) ** 0.5, generator=generator)
            nn.init.zeros_(linear.bias)
            layers += [linear] if k == len(sizes) - 2 else [linear, nn.LayerNorm(after), nn.SiLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, population: Params) -> Tensor:
        """Return latent vectors `[models, latent]`."""
        x = (self._flatten(population) - self.get_buffer("mean")) / self.get_buffer("deviation")
        made: Tensor = self.layers(x)
        return made

    def _flatten(self, population: Params) -> Tensor:
        return torch.cat([population[name].flatten(1) for name in self.names], 1)


def sine_coders(seconds: float, width: int = 64, latent: int = 128) -> dict[str, Coder]:
    """Return autoencoders of sine networks with the same budget of CPU seconds, by short names."""
    whole = learn.AutoencoderConfig(
        layer=ws.Propagation(channels=1, expansion=1),
        width=width,
        depth=1,
        hidden=4 * width,
        latent=latent,
        examples=256,
        lr=3e-3,
        epochs=300,
        seconds=seconds,
        is_cpu_time=True,
    )
    permutations = replace(whole, parts=("permutation",), depth=3)
    graph = replace(permutations, layer=ws.MessagePassing(), width=max(8, width // 2), values=ws.Fourier())
    # At the learning rate of the others this decoder diverged with one of four seeds.
    template = replace(whole, decoder=ws.TemplateDecoder(), lr=1e-3)
    moves = ("permutation", "sign", "shift")
    small = chains.ChainScaleConfig(hidden=max(8, width // 2), reads="everything")
    return {
        "whole": Coder("whole group", whole),
        "signs": Coder("permutations and signs", replace(whole, parts=("permutation", "sign"))),
        "permutations": Coder("permutations", permutations),
        "moved": Coder("permutations, moved at random", replace(permutations, augment=("sign", "shift"))),
        "graph": Coder("permutations, message passing", graph),
        "chain": Coder("ScaleGMN as published, half as wide" if width == 64 else "ScaleGMN", whole, chain=small),
        "plain": Coder("MLP on weights, moved at random", replace(whole, augment=moves), is_plain=True),
        "template": Coder("whole group, decoder with a template", template),
    }


def spread(auto: learn.Autoencoder, networks: Params, symmetry: rg.Symmetry, generator: torch.Generator) -> list[float]:
    """Return how far random elements of the group move latent vectors, relative to typical distances of the vectors."""
    count = len(next(iter(networks.values())))
    moved = symmetry.act(symmetry.random(generator, batch=(count,)), networks)
    latents, others = auto.encode(networks).double(), auto.encode(moved).double()
    typical = torch.pdist(latents).mean()
    found: list[float] = ((others - latents).norm(dim=1) / typical).tolist()
    return found
