"""A decoder from vectors to network parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.weightspace.layers.dense import Dense
from regauge.weightspace.layout.compile import compile_layout

SHARE = 0.1
"""The initial size of the differences between decoded networks, relative to each tensor (root mean squares)."""


@dataclass(frozen=True)
class MLPDecoder:
    """Settings of an MLP from vectors to all parameters of a network; see `Decoder`.

    Attributes:
        widths: The widths of the hidden layers.
    """

    widths: tuple[int, ...] = (256, 512)

    def __post_init__(self) -> None:
        if min(self.widths, default=1) < 1:
            raise ValueError(f"widths={self.widths} must be positive")

    def build(self, symmetry: Symmetry, inputs: int, generator: torch.Generator | None = None) -> "Decoder":
        """Return a decoder for vectors of length `inputs`."""
        return Decoder(symmetry, inputs=inputs, widths=self.widths, generator=generator)


class Decoder(nn.Module):
    """An MLP from vectors `[models, inputs]` to the parameters of networks of one architecture, with a model axis.

    The decoder generates one network for each vector. All networks of an orbit compute the same function, and the
    decoder may learn to generate any of them. An invariant encoder and a decoder together are an autoencoder of orbits.
    The autoencoder is trained by comparing the functions of networks, not their weights. Each tensor is multiplied by
    its typical size, which `standardize` measures on networks. `begin_at` initializes the decoder such that it
    generates almost the same network from every vector. Buffers, and parameters without influence, are not generated
    but copied from `like`.

    Args:
        symmetry: The symmetry of the networks, with every size known.
        inputs: The length of the vectors.
        widths: The widths of the hidden layers.
        generator: The random number generator for the initial weights.

    References:
        Paper 002, appendix: 128, 256 and 512 units with SiLU for sine networks of 1185 parameters.
    """

    sizes: Tensor

    def __init__(
        self,
        symmetry: Symmetry,
        *,
        inputs: int,
        widths: tuple[int, ...] = (256, 512),
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if min(inputs, *widths, 1) < 1:
            raise ValueError(f"inputs={inputs} and widths={widths} must be positive")
        layout = compile_layout(symmetry)
        self.shapes = {name: symmetry.shapes[name] for name in layout.writer.parameters}
        self.tied, self.inputs = symmetry.tied, inputs
        counts = [torch.Size(shape).numel() for shape in self.shapes.values()]
        self.counts = counts
        sizes = (inputs, *widths, sum(counts))
        self.layers = nn.ModuleList(Dense(before, after, generator=generator) for before, after in pairwise(sizes))
        self.register_buffer("sizes", torch.ones(len(counts)))

    @torch.no_grad()
    def standardize(self, population: Mapping[str, Tensor]) -> None:
        """Set the size of each tensor to its root mean square over some networks."""
        sizes = [float(population[name].double().square().mean().sqrt()) or 1.0 for name in self.shapes]
        self.sizes.copy_(torch.tensor(sizes))

    @torch.no_grad()
    def begin_at(self, network: Mapping[str, Tensor]) -> None:
        """Initialize the decoder such that every vector gives the network `network`, up to changes of relative size
        `SHARE`.
        """
        last = self.layers[-1]
        assert isinstance(last, Dense)
        assert last.bias is not None
        last.weight.mul_(SHARE)
        flat = [
            network[name].to(last.bias).flatten() / size for name, size in zip(self.shapes, self.sizes, strict=True)
        ]
        last.bias.copy_(torch.cat(flat))

    def forward(self, codes: Float[Tensor, "models inputs"], like: Mapping[str, Tensor] | None = None) -> Params:
        """Return the networks that the decoder generates from vectors.

        Tensors that the decoder does not generate are copied from the network `like`.
        """
        if codes.ndim != 2 or codes.shape[1] != self.inputs:
            raise ValueError(
                f"the vectors have shape {tuple(codes.shape)}, but this decoder takes [models, {self.inputs}]; give "
                "vectors of that length"
            )
        x = codes
        for k, layer in enumerate(self.layers):
            x = layer(nn.functional.silu(x) if k else x)
        made: Params = {}
        for (name, shape), part, size in zip(
            self.shapes.items(), torch.split(x, self.counts, -1), self.sizes, strict=True
        ):
            made[name] = (part * size).reshape(len(codes), *shape)
        return complete(made, self.tied, like or {}, len(codes))


def complete(made: Params, tied: tuple[tuple[str, ...], ...], like: Mapping[str, Tensor], count: int) -> Params:
    """Add tied tensors under all their names, and the tensors that the decoder does not generate."""
    result = dict(made)
    for names in tied:
        known = next((made[name] for name in names if name in made), None)
        if known is not None:
            result.update(dict.fromkeys(names, known))
    for name, tensor in like.items():
        if name not in result:
            result[name] = tensor.expand(count, *tensor.shape)
    return result
