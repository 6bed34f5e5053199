"""Deep weight space networks: maps between all tensors in which the units of a set hear from each other."""

from dataclasses import dataclass

from torch import nn

from regauge.weightspace.layers.exchange import Exchange, ExchangeLayer, Sets
from regauge.weightspace.layers.plan import Layer, LayerPlan, Traits
from regauge.weightspace.layers.reading import Pooling


@dataclass(frozen=True)
class DWS(Layer):
    """The layers of deep weight space networks, for any layout.

    Every tensor is pooled once over the axes that others lack. The pooled features at the units of a set are mapped at
    once to all tensors that have these units. A layer of the paper has a map of its own for each pair of tensors, which
    are four times the square of the number of layers. With `sets="mean"` and `pooling="mean"` these are the linear maps
    that the paper derives; with the defaults of its code, as here, sets are read by attention and pooling takes maxima.
    Around the map stand layer normalization, SiLU, and a residual connection. Inputs and classes are projected once by
    the encoder.

    Attributes:
        sets: `"attention"` among the units of a set, besides the linear map, or `"mean"`: by what is pooled alone.
        pooling: `"max"` or `"mean"`.
        heads: The number of heads of the attention; they divide the width.
        is_diagonal: Whether tensors read only those with common units, as in Deep-Align: cost and parameters then grow
            with the number of layers and not with its square. What is pooled over all units of a tensor is read by that
            tensor alone, while there its neighbors read it, too.

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
        """Maxima see units that count for nothing."""
        return Traits(is_shared=False, weighs_units=self.pooling == "mean")

    def build(self, plan: LayerPlan) -> nn.Module:
        """Return one layer; see `weightspace.layers`.

        Raises:
            ValueError: The heads do not divide the width.
        """
        if self.sets == "attention" and plan.width % self.heads:
            raise ValueError(
                f"{self.heads} heads of attention do not divide a width of {plan.width}; choose either anew"
            )
        return ExchangeLayer(Exchange(self.pooling, self.sets, self.heads, self.is_diagonal), plan)
