"""A decoder from vectors to network parameters, by message passing among the units of a template network."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.unit_plans import UnitPlan, map_tensor
from regauge.weightspace.decoder import SHARE, complete
from regauge.weightspace.heads.equivariant import Equivariant
from regauge.weightspace.layers.plan import Layer
from regauge.weightspace.layers.propagation import Propagation
from regauge.weightspace.metanet import Metanet
from regauge.weightspace.shares import find_readers


@dataclass(frozen=True)
class TemplateDecoder:
    """Settings of a decoder: a learned template network, and a metanetwork that changes the template depending on the
    vector.

    Units exchange messages through the template's weights. Every weight is computed from the features of the units that
    the weight connects. The number of parameters outside of the template does not grow with the widths of the networks.

    Attributes:
        layer: The settings of the layers; see `regauge.weightspace.LAYERS`.
        width: The width of the metanetwork.
        depth: The number of layers.
        widening: Whether two copies into which a unit was split count as one unit, which `Template.widened` requires.
            See also the argument `readers` of `Metanet`.
    """

    layer: Layer = field(default_factory=Propagation)
    width: int = 32
    depth: int = 3
    widening: bool = False

    def __post_init__(self) -> None:
        if min(self.width, self.depth) < 1:
            raise ValueError(f"width={self.width} and depth={self.depth} must be positive")

    def build(self, symmetry: Symmetry, inputs: int, generator: torch.Generator | None = None) -> "Template":
        """Return a decoder for vectors of length `inputs`."""
        return Template(symmetry, self, inputs, generator)


class Template(nn.Module):
    """A template network and a metanetwork that together map vectors `[models, inputs]` to networks."""

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
            parts=("permutation",),  # other elements do not change the template
            readers=find_readers(symmetry) if settings.widening else (),
            conditions=inputs,
            generator=generator,
        )
        layout = self.net.layout
        self.made, self.read = layout.writer.parameters, layout.parameters
        self.template = nn.ParameterList(
            nn.Parameter(torch.zeros(symmetry.shapes[name]), requires_grad=name in self.made) for name in self.read
        )

    def standardize(self, population: Mapping[str, Tensor]) -> None:
        """Set the typical size of each tensor to its root mean square over some networks."""
        self.net.standardize(population)

    @torch.no_grad()
    def begin_at(self, network: Mapping[str, Tensor]) -> None:
        """Set the template to a network."""
        for name, tensor in zip(self.read, self.template, strict=True):
            tensor.copy_(network[name])

    def widened(self, symmetry: Symmetry) -> "Template":
        """Return a decoder that generates wider networks, which compute the same functions as the networks of this
        decoder.

        Every unit of the template is split into several copies, with about equal numbers for all units. The outgoing
        weights of the copies sum to the weights of the unit, and the metanetwork counts the copies as one unit. Each
        decoded network is therefore the network that the original decoder generates, but with split units. The
        parameters of the metanetwork stay the same. Further training of the new decoder can use all units.

        Args:
            symmetry: The symmetry of the wider networks, with every size known.

        Raises:
            ValueError: The decoder was made without `widening`, a group is nested, a group has fewer units than in the
                template, or the networks differ in more than numbers of units.
        """
        if not self.net.settings.readers:
            raise ValueError("this decoder counts units that are split; make one with TemplateDecoder(widening=True)")
        own = self.net.layout.symmetry
        made = copy.deepcopy(self)
        made.net.adapt(symmetry)
        plans = {}
        for old, new in zip(own.groups, symmetry.groups, strict=True):
            if new.size < old.size or old.within:
                raise ValueError(
                    f"group {old.name!r} has {old.size} units, and {new.size} in the other networks; a template can "
                    "grow only if no group loses units and none is nested in another; give such networks"
                )
            copies = torch.arange(new.size) * old.size // new.size
            mass = torch.eye(old.size, dtype=torch.float64)[copies]
            plans[old.name] = UnitPlan(mass, torch.ones(old.signs, *mass.shape, dtype=torch.int8))
        wide = []
        for name, tensor in zip(self.read, self.template, strict=True):
            pairs = list(zip(symmetry.sites.get(name, ()), own.sites.get(name, ()), strict=True))
            grown = map_tensor(tensor.detach(), pairs, symmetry.shapes[name], plans, self.net.settings.readers)
            wide.append(nn.Parameter(grown.clone(), requires_grad=tensor.requires_grad))
        made.template = nn.ParameterList(wide)
        made.tied = symmetry.tied
        return made

    def forward(self, codes: Float[Tensor, "models inputs"]) -> Params:
        """Return the networks that the decoder generates from vectors."""
        if codes.ndim != 2 or codes.shape[1] != self.inputs:
            raise ValueError(
                f"the vectors have shape {tuple(codes.shape)}, but this decoder takes [models, {self.inputs}]; give "
                "vectors of that length"
            )
        template = {n: t.expand(len(codes), *t.shape) for n, t in zip(self.read, self.template, strict=True)}
        changes = self.net(template, codes)
        return complete({name: template[name] + changes[name] for name in self.made}, self.tied, {}, len(codes))
