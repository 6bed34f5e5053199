"""Nets that learn velocities: equivariant nets for any symmetry, and plain nets for aligned networks."""

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regauge.flow.manifold import Manifold, Points
from regauge.flow.space import Space
from regauge.flow.value_orbits import unit_indices
from regauge.weightspace.heads.equivariant import Equivariant
from regauge.weightspace.layers import LAYERS
from regauge.weightspace.layers.dense import Dense
from regauge.weightspace.layers.message_passing import MessagePassing
from regauge.weightspace.layers.plan import Layer
from regauge.weightspace.metanet import Metanet

TOLD = 64
"""The length of the conditioning vector, which contains functions of the time and the class."""
WAVES = 8
"""The number of frequencies in the encoding of the time."""


class Net(Protocol):
    """Settings of a net whose inputs are points that represent networks."""

    def build(self, space: Manifold, generator: torch.Generator) -> nn.Module:
        """Return a net: points `[models, values]` and conditioning vectors `[models, TOLD]` to `[models, values]`."""
        ...


@dataclass(frozen=True)
class Metanetwork:
    """An equivariant net of `weightspace`: a permutation of the input's units permutes the output in the same way.

    The parameters of the net also work for networks of other widths.

    Attributes:
        layer: The settings of the layers: an instance of a class in `weightspace.LAYERS`. The thesis uses
            `RelationalAttention`.
        width: The length of the vectors of units and pairs.
        depth: The number of layers.
    """

    layer: Layer = field(default_factory=lambda: MessagePassing())
    width: int = 32
    depth: int = 4

    def build(self, space: Manifold, generator: torch.Generator) -> nn.Module:
        """Return the net."""
        assert isinstance(space, Space)
        return OverNetworks(self, space, generator)


@dataclass(frozen=True)
class Perceptron:
    """A multilayer perceptron on all coordinates, for aligned networks. The net is not equivariant.

    Attributes:
        width: The width of the hidden layers.
        depth: The number of hidden layers.
    """

    width: int = 512
    depth: int = 3

    def build(self, space: Manifold, generator: torch.Generator) -> nn.Module:
        """Return the net."""
        return OverCoordinates(self, space.dim, generator)


@dataclass(frozen=True)
class Tokens:
    """A transformer whose tokens are units in a fixed order, for aligned networks.

    A token reads all weights of a unit: its incoming weights, its bias and its outgoing weights. All units of a group
    share the same linear maps. A weight that belongs to two units gets the mean of the outputs of their tokens. Weights
    that belong to no unit form one additional token.

    Attributes:
        width: The width of tokens.
        depth: The number of transformer blocks.
        heads: The number of attention heads.
    """

    width: int = 64
    depth: int = 3
    heads: int = 4

    def build(self, space: Manifold, generator: torch.Generator) -> nn.Module:
        """Return the net."""
        assert isinstance(space, Space)
        return OverUnits(self, space, generator)


NETS: dict[str, type[Any]] = {"metanetwork": Metanetwork, "perceptron": Perceptron, "tokens": Tokens}
"""Kinds of nets by name. A name in `weightspace.LAYERS` denotes a metanetwork with these layers."""
__all__ = ["LAYERS", "NETS", "TOLD", "Metanetwork", "Net", "Perceptron", "TimeConditioning", "Tokens"]


class TimeConditioning(nn.Module):
    """The conditioning vector of nets: functions of the time, plus a vector for each class."""

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
            parts=("permutation", *(("sign",) if "sign" in settings.layer.traits.respects else ())),
            conditions=TOLD,
            generator=generator,
        )

    def resize(self, space: Space) -> None:
        """Adapt the net to networks with other numbers of units."""
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
        self.widen, self.narrow = (
            nn.ModuleList(
                Dense(settings.width, settings.width, gain=gain, generator=generator) for _ in range(settings.depth)
            )
            for gain in (1.0, 0.5)
        )
        self.out = Dense(settings.width, dim, gain=0.1, generator=generator)

    def forward(self, z: Points, told: Tensor) -> Points:
        x: Tensor = self.into(z)
        for hear, widen, narrow in zip(self.told, self.widen, self.narrow, strict=True):
            x = x + narrow(nn.functional.silu(widen(nn.functional.layer_norm(x, x.shape[-1:])) + hear(told)))
        made: Tensor = self.out(x)
        return made


class OverUnits(nn.Module):
    counts: Tensor

    def __init__(self, settings: Tokens, space: Space, generator: torch.Generator) -> None:
        super().__init__()
        self.tokens = find_tokens(space)
        width, count = settings.width, sum(len(index) for index in self.tokens)
        self.into = nn.ModuleList(Dense(index.shape[1], width, generator=generator) for index in self.tokens)
        self.out = nn.ModuleList(Dense(width, index.shape[1], gain=0.02, generator=generator) for index in self.tokens)
        self.places = nn.Parameter(0.5 * torch.randn(count, width, generator=generator))
        self.blocks = nn.ModuleList(TokenBlock(width, settings.heads, generator) for _ in range(settings.depth))
        counts = torch.bincount(torch.cat([index.flatten() for index in self.tokens]), minlength=space.dim)
        self.register_buffer("counts", counts.float(), persistent=False)

    def forward(self, z: Points, told: Tensor) -> Points:
        read = [dense(z[:, index.to(z.device)]) for dense, index in zip(self.into, self.tokens, strict=True)]
        x = torch.cat(read, dim=1) + self.places
        for block in self.blocks:
            x = block(x, told)
        x = nn.functional.layer_norm(x, x.shape[-1:])
        made, parts = torch.zeros_like(z), torch.split(x, [len(index) for index in self.tokens], dim=1)
        for dense, index, part in zip(self.out, self.tokens, parts, strict=True):
            made = made.index_add(1, index.flatten().to(z.device), dense(part).flatten(1))
        return made / self.counts


class TokenBlock(nn.Module):
    """Attention among tokens, followed by an MLP on each token. Functions of the time scale and shift the inputs."""

    def __init__(self, width: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.hear = Dense(TOLD, 2 * width, gain=0.1, generator=generator)
        self.attend = Dense(width, 3 * width, generator=generator)
        self.join = Dense(width, width, gain=0.5, generator=generator)
        self.widen = Dense(width, 2 * width, generator=generator)
        self.narrow = Dense(2 * width, width, gain=0.5, generator=generator)

    def forward(self, x: Float[Tensor, "models tokens width"], told: Tensor) -> Tensor:
        models, tokens, width = x.shape
        scale, shift = self.hear(told).unsqueeze(1).chunk(2, dim=-1)
        y = nn.functional.layer_norm(x, (width,)) * (1 + scale) + shift
        q, k, v = self.attend(y).reshape(models, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(models, tokens, width)
        x = x + self.join(mixed)
        made: Tensor = x + self.narrow(nn.functional.gelu(self.widen(nn.functional.layer_norm(x, (width,)))))
        return made


def find_tokens(space: Space) -> list[Int[Tensor, "units values"]]:
    """Return the coordinates of each unit of each permuted group. Coordinates without a unit come last."""
    place = torch.argsort(space.order)
    starts = torch.tensor([0, *(torch.Size(space.symmetry.shapes[name]).numel() for name in space.names)]).cumsum(0)
    numbers = {
        name: place[start : start + torch.Size(space.symmetry.shapes[name]).numel()].reshape(
            space.symmetry.shapes[name]
        )
        for name, start in zip(space.names, starts.tolist(), strict=False)
    }
    is_free = torch.ones(space.dim, dtype=torch.bool)
    tokens = []
    for group in space.symmetry.groups:
        read = []
        for one in group.placements if group.is_permuted else ():
            if one.parameter not in numbers:
                continue
            index = unit_indices(one, group.size)
            of_units = numbers[one.parameter].movedim(one.axis, 0)[index]
            read.append(of_units.reshape(group.size, -1))
        if read:
            tokens.append(torch.cat(read, dim=1))
            is_free[tokens[-1]] = False
    if bool(is_free.any()):
        tokens.append(is_free.nonzero().T)
    return tokens
