"""From a vector to the parameters of a network, by message passing among the units of a template."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.weightspace.decoder import SHARE, complete
from regauge.weightspace.heads import Equivariant
from regauge.weightspace.layers import Layer
from regauge.weightspace.layers.propagation import Propagation
from regauge.weightspace.metanet import Metanet


@dataclass(frozen=True)
class TemplateDecoder:
    """A learned template network, and a net over networks that changes it as the vector says.

    Units hear from each other through the template's weights, and every weight is made from the features of the units
    that it connects. But for the template itself, the number of parameters does not grow with the networks' widths.

    Attributes:
        layer: Settings of the layers; see `regauge.weightspace.LAYERS`.
        width: Of the net.
        depth: Number of layers.
    """

    layer: Layer = field(default_factory=Propagation)
    width: int = 32
    depth: int = 3

    def __post_init__(self) -> None:
        if min(self.width, self.depth) < 1:
            raise ValueError(f"width={self.width} and depth={self.depth} must be positive")

    def build(self, symmetry: Symmetry, inputs: int, generator: torch.Generator | None = None) -> "Template":
        """A decoder of vectors of some length."""
        return Template(symmetry, self, inputs, generator)


class Template(nn.Module):
    """A template and its net: `[models, inputs]` to parameters with a model axis; see `TemplateDecoder`."""

    def __init__(
        self, symmetry: Symmetry, settings: TemplateDecoder, inputs: int, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.inputs, self.tied = inputs, symmetry.tied
        self.net = Metanet(
            symmetry,
            layer=settings.layer,
            head=Equivariant(scale=SHARE),
            width=settings.width,
            depth=settings.depth,
            parts=("permutation",),  # no other element moves the template
            conditions=inputs,
            generator=generator,
        )
        layout = self.net.layout
        self.made, self.read = layout.writer.parameters, layout.parameters
        self.template = nn.ParameterList(
            nn.Parameter(torch.zeros(symmetry.shapes[name]), requires_grad=name in self.made) for name in self.read
        )

    def standardize(self, population: Mapping[str, Tensor]) -> None:
        """Take the sizes of tensors from some networks."""
        self.net.standardize(population)

    @torch.no_grad()
    def begin_at(self, network: Mapping[str, Tensor]) -> None:
        """Take a network as the template."""
        for name, tensor in zip(self.read, self.template, strict=True):
            tensor.copy_(network[name])

    def forward(self, codes: Float[Tensor, "models inputs"]) -> Params:
        """The networks of vectors."""
        if codes.ndim != 2 or codes.shape[1] != self.inputs:
            raise ValueError(
                f"the vectors have shape {tuple(codes.shape)}, but this decoder takes [models, {self.inputs}]"
            )
        template = {n: t.expand(len(codes), *t.shape) for n, t in zip(self.read, self.template, strict=True)}
        changes = self.net(template, codes)
        return complete({name: template[name] + changes[name] for name in self.made}, self.tied, {}, len(codes))
