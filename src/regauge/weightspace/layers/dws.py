"""Deep weight space networks: maps between all tensors, in which the units of each set exchange features."""

from dataclasses import dataclass

from torch import nn

from regauge.weightspace.layers.exchange import Exchange, ExchangeLayer, Sets
from regauge.weightspace.layers.plan import Layer, LayerPlan, Traits
from regauge.weightspace.layers.reading import Pooling


@dataclass(frozen=True)
class DWS(Layer):
    """The layers of deep weight space networks, for any layout.

    Every tensor is pooled once over each set of axes that another tensor lacks. For each unit set, one linear map reads
    the pooled features of all tensors with units of the set, and writes to the same tensors. The paper has a separate
    map for each pair of tensors instead, which is about 4 L^2 maps for networks of L layers. With `sets="mean"` and
    `pooling="mean"`, the maps are the linear maps that the paper derives. The defaults follow the paper's code: the
    units of a set exchange features by attention, and pooling computes maxima. The linear map is combined with layer
    normalization, SiLU and a residual connection. The encoder projects inputs and classes to features once, before all
    layers.

    Attributes:
        sets: `"attention"` adds attention among the units of a set to the linear map. With `"mean"`, the map uses only
            pooled features.
        pooling: `"max"` or `"mean"`, over the axes that other tensors lack.
        heads: The number of attention heads, which must divide the width.
        is_diagonal: Whether tensors read only tensors with common units, as in Deep-Align. With diagonal layers, the
            cost and the number of parameters grow linearly, not quadratically, with the number of layers of the
            network. Unlike in Deep-Align, no tensor reads the mean or maximum over all units of a neighboring tensor.

    References:
        Navon et al. (2023), "Equivariant architectures for learning in deep weight spaces", theorem 4.1 and section 5;
        Navon et al. (2024), "Equivariant deep weight space alignment", for the diagonal; Zaheer et al. (2017) and Lee
        et al. (2019) for layers of sets.
    """

    sets: Sets = "attention"
    pooling: Pooling = "max"
    heads: int = 4
    is_diagonal: bool = False

    def __post_init__(self) -> None:
        if self.sets not in ("attention", "mean") or self.pooling not in ("max", "mean") or self.heads < 1:
            raise ValueError(
                f"sets={self.sets!r}, pooling={self.pooling!r} and heads={self.heads}; choose 'attention' or 'mean', "
                "'max' or 'mean', and at least one head"
            )

    @property
    def traits(self) -> Traits:
        """Return the properties of the layer that determine how a net is built.

        The DWS layer cannot weight units in means (by shares), because its maxima also depend on units of weight zero.
        """
        return Traits(is_shared=False, weighs_units=self.pooling == "mean")

    def build(self, plan: LayerPlan) -> nn.Module:
        """Return the torch module of one layer; see `weightspace.layers`.

        Raises:
            ValueError: The number of heads does not divide the width.
        """
        if self.sets == "attention" and plan.width % self.heads:
            raise ValueError(
                f"{self.heads} heads of attention do not divide a width of {plan.width}; change one of both"
            )
        return ExchangeLayer(Exchange(self.pooling, self.sets, self.heads, self.is_diagonal), plan)
