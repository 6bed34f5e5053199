"""From a vector to the parameters of a network."""

from collections.abc import Mapping
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.weightspace.layers.dense import Dense
from regauge.weightspace.layout import compile_layout


class Decoder(nn.Module):
    """An MLP from vectors to networks of one architecture: `[models, inputs]` to parameters with a model axis.

    It makes one network for each vector, some point of the orbit that training is free to choose: behind an invariant
    reader this is an autoencoder of orbits, to be trained by what the networks compute. Each tensor is made in units of
    its own size, which `standardize` takes from networks. Buffers and what has no influence are not made: `like` gives
    them.

    Args:
        symmetry: Of the networks, with every size known.
        inputs: Length of the vectors.
        widths: Of the hidden layers.
        generator: Source of the initial weights.

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
        """Take the root mean square of each tensor from some networks."""
        sizes = [float(population[name].double().square().mean().sqrt()) or 1.0 for name in self.shapes]
        self.sizes.copy_(torch.tensor(sizes))

    def forward(self, codes: Float[Tensor, "models inputs"], like: Mapping[str, Tensor] | None = None) -> Params:
        """The networks of vectors; tensors of `like` that are not made (one network's) are repeated for each."""
        if codes.ndim != 2 or codes.shape[1] != self.inputs:
            raise ValueError(
                f"the vectors have shape {tuple(codes.shape)}, but this decoder takes [models, {self.inputs}]"
            )
        x = codes
        for k, layer in enumerate(self.layers):
            x = layer(nn.functional.silu(x) if k else x)
        made: Params = {}
        for (name, shape), part, size in zip(
            self.shapes.items(), torch.split(x, self.counts, -1), self.sizes, strict=True
        ):
            made[name] = (part * size).reshape(len(codes), *shape)
        for names in self.tied:
            known = next((made[name] for name in names if name in made), None)
            if known is not None:
                made.update(dict.fromkeys(names, known))
        for name, tensor in (like or {}).items():
            if name not in made:
                made[name] = tensor.expand(len(codes), *tensor.shape)
        return made
