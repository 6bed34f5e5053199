"""Nets that velocities are learned with: equivariant ones for any symmetry, and plain ones for aligned networks."""

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regauge.flow.space import Points, Space
from regauge.weightspace.heads import Equivariant
from regauge.weightspace.layers import LAYERS, Layer, MessagePassing
from regauge.weightspace.layers.dense import Dense
from regauge.weightspace.metanet import Metanet

TOLD = 64
"""Numbers by which nets are told the time and the class."""
WAVES = 8
"""Frequencies of the time."""


class Net(Protocol):
    """Settings of a net over points."""

    def build(self, space: Space, generator: torch.Generator) -> nn.Module:
        """A net from points `[models, values]` and what it is told `[models, TOLD]` to `[models, values]`."""
        ...


@dataclass(frozen=True)
class Metanetwork:
    """An equivariant net of `weightspace`, for which the order of units means nothing, as for the priors.

    It reads networks of other widths with the same parameters.

    Attributes:
        layer: One of `weightspace.LAYERS`; `RelationalAttention` is the thesis' choice.
        width: Length of the vectors of units and pairs.
        depth: Number of layers.
    """

    layer: Layer = field(default_factory=lambda: MessagePassing())
    width: int = 32
    depth: int = 4

    def build(self, space: Space, generator: torch.Generator) -> nn.Module:
        """The net."""
        return OverNetworks(self, space, generator)


@dataclass(frozen=True)
class Perceptron:
    """A plain net over all coordinates, which is not equivariant: for networks that were aligned.

    Attributes:
        width: Of the hidden layers.
        depth: Number of hidden layers.
    """

    width: int = 512
    depth: int = 3

    def build(self, space: Space, generator: torch.Generator) -> nn.Module:
        """The net."""
        return OverCoordinates(self, space.dim, generator)


@dataclass(frozen=True)
class Tokens:
    """A transformer whose tokens are the rows of tensors, in their order: for networks that were aligned.

    Attributes:
        width: Of tokens.
        depth: Number of blocks.
        heads: Of attention.
    """

    width: int = 128
    depth: int = 4
    heads: int = 4

    def build(self, space: Space, generator: torch.Generator) -> nn.Module:
        """The net."""
        return OverRows(self, space, generator)


NETS: dict[str, type[Any]] = {"metanetwork": Metanetwork, "perceptron": Perceptron, "tokens": Tokens}
"""Kinds of nets by name; the names of `weightspace.LAYERS` mean metanetworks with these layers."""
__all__ = ["LAYERS", "NETS", "TOLD", "Clock", "Metanetwork", "Net", "Perceptron", "Tokens"]


class Clock(nn.Module):
    """What nets are told: functions of the time, and a vector for each class."""

    def __init__(self, classes: int, generator: torch.Generator) -> None:
        super().__init__()
        self.into = Dense(1 + 2 * WAVES, TOLD, generator=generator)
        self.out = Dense(TOLD, TOLD, generator=generator)
        self.classes = nn.Parameter(torch.randn(classes, TOLD, generator=generator)) if classes else None

    def forward(self, t: Float[Tensor, " models"], labels: Int[Tensor, " models"] | None) -> Tensor:
        angles = math.pi * t.unsqueeze(1) * 2.0 ** torch.arange(WAVES, device=t.device, dtype=t.dtype) / 2
        told: Tensor = self.into(torch.cat([t.unsqueeze(1), angles.sin(), angles.cos()], dim=1))
        if self.classes is not None:
            assert labels is not None
            told = told + self.classes[labels]
        made: Tensor = self.out(nn.functional.silu(told))
        return made


class OverNetworks(nn.Module):
    def __init__(self, settings: Metanetwork, space: Space, generator: torch.Generator) -> None:
        super().__init__()
        self.space = space
        self.net = Metanet(
            space.symmetry,
            layer=settings.layer,
            head=Equivariant(scale=1.0),
            width=settings.width,
            depth=settings.depth,
            parts=("permutation", *(("sign",) if "sign" in settings.layer.respects else ())),
            conditions=TOLD,
            generator=generator,
        )

    def resize(self, space: Space) -> None:
        """Work on networks with other numbers of units from now on."""
        self.net.adapt(space.symmetry)
        self.space = space

    def forward(self, z: Points, told: Tensor) -> Points:
        changes = self.net(self.space.arrange(z), told)
        blank = z.new_zeros(())
        whole = {
            name: changes.get(name, blank.expand(len(z), *self.space.symmetry.shapes[name]))
            for name in self.space.names
        }
        return self.space.collect(whole)


class OverCoordinates(nn.Module):
    def __init__(self, settings: Perceptron, dim: int, generator: torch.Generator) -> None:
        super().__init__()
        self.into = Dense(dim, settings.width, generator=generator)
        self.told = nn.ModuleList(
            Dense(TOLD, settings.width, is_biased=False, generator=generator) for _ in range(settings.depth)
        )
        self.maps = nn.ModuleList(
            Dense(settings.width, settings.width, generator=generator) for _ in range(settings.depth)
        )
        self.out = Dense(settings.width, dim, gain=0.1, generator=generator)

    def forward(self, z: Points, told: Tensor) -> Points:
        x: Tensor = self.into(z)
        for hear, dense in zip(self.told, self.maps, strict=True):
            x = x + dense(nn.functional.silu(nn.functional.layer_norm(x, x.shape[-1:]) + hear(told)))
        made: Tensor = self.out(nn.functional.silu(x))
        return made


class OverRows(nn.Module):
    def __init__(self, settings: Tokens, space: Space, generator: torch.Generator) -> None:
        super().__init__()
        self.space = space
        shapes = [space.symmetry.shapes[name] for name in space.names]
        self.rows = [(shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape)) for shape in shapes]
        width = settings.width
        self.into = nn.ModuleList(Dense(length, width, generator=generator) for _, length in self.rows)
        self.out = nn.ModuleList(Dense(width, length, gain=0.1, generator=generator) for _, length in self.rows)
        self.places = nn.Parameter(torch.randn(sum(count for count, _ in self.rows), width, generator=generator))
        self.told = nn.ModuleList(
            Dense(TOLD, width, is_biased=False, generator=generator) for _ in range(settings.depth)
        )
        with torch.random.fork_rng([]):
            torch.manual_seed(int(torch.randint(1 << 62, (), generator=generator)))
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    width, settings.heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
                )
                for _ in range(settings.depth)
            )

    def forward(self, z: Points, told: Tensor) -> Points:
        tensors = self.space.arrange(z)
        tokens = [
            dense(tensors[name].reshape(len(z), *rows))
            for name, rows, dense in zip(self.space.names, self.rows, self.into, strict=True)
        ]
        x = torch.cat(tokens, dim=1) + self.places
        for hear, block in zip(self.told, self.blocks, strict=True):
            x = block(x + hear(told).unsqueeze(1))
        parts = torch.split(x, [count for count, _ in self.rows], dim=1)
        made = {
            name: dense(part).reshape(len(z), *self.space.symmetry.shapes[name])
            for name, part, dense in zip(self.space.names, parts, self.out, strict=True)
        }
        return self.space.collect(made)
