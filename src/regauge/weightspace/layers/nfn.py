"""Neural functional networks: linear maps between all tensors that respect permutations."""

from dataclasses import dataclass

from torch import nn

from regauge.weightspace.layers.exchange import Exchange, ExchangeLayer
from regauge.weightspace.layers.plan import Layer, LayerPlan, Traits


@dataclass(frozen=True)
class NFN(Layer):
    """A layer of linear maps as in neural functional networks for permuted hidden units (HNP), for any architecture.

    Each pair of tensors has separate linear maps. The new features of a weight between units i and j are linear in the
    weight's own features. The new features are also linear in the features of the units i and j, and in pooled
    features. The pooled features are means of all tensors over axes that the weight lacks, and means over all axes:

        W'[i, j] = A W[i, j] + B [means over other axes, b at i] + C [the same at j] + D [means of everything]

    If two tensors have the same unit sets, such as the two weight matrices of a gated layer, the tensors are mapped to
    each other entry by entry. If a weight tensor connects a unit set with itself, its transpose and its diagonal also
    have separate maps. The linear maps are combined with layer normalization, SiLU and a residual connection.

    No group permutes inputs and classes. Therefore the encoder maps inputs and classes to features once, and layers
    have no channels for them. The number of parameters grows with the square of the number of tensors that have units
    in common.

    References:
        Zhou et al. (2023), "Permutation equivariant neural functionals", section 2 and equation 3; Zhou et al. (2024),
        "Universal neural functionals", for other architectures.
    """

    @property
    def traits(self) -> Traits:
        """Return the properties of the layer that determine how a net is built.

        In an NFN layer, every tensor has separate maps.
        """
        return Traits(is_shared=False)

    def build(self, plan: LayerPlan) -> nn.Module:
        """Return the torch module of one layer; see `weightspace.layers`."""
        return ExchangeLayer(Exchange(), plan)
