"""The settings of published deep weight space networks."""

from dataclasses import dataclass

from regauge.weightspace.layers.exchange import Sets
from regauge.weightspace.layers.reading import Pooling


@dataclass(frozen=True)
class ChainConfig:
    """Settings of a `ChainDWS`; the defaults come from Deep-Align's code, including two faults (`are_biases_blind`,
    `is_last_constant`).

    Attributes:
        hidden: The number of features of every entry of every tensor, between the layers.
        layers: Number of layers.
        sets: The map among the units of a layer. `"attention"`, the authors' default, is a set transformer block
            without normalization. `"mean"` is `A x - B pool(x)` with two linear maps.
        pooling: `"max"` or `"mean"`.
        heads: The number of attention heads of every layer except the last, which has one head.
        is_diagonal: Whether a tensor reads only tensors with which it has a layer of units in common.
        inputs_to: The length to which the input axis of the first weight is projected before every layer. The output of
            the layer is projected back to the original length, and is added to a linear map of the whole tensor.
            Default: no projection.
        dropout: The dropout probability of features between layers, in training.
        are_biases_blind: Whether to repeat a fault of Deep-Align's code: weights are pooled over inputs and classes
            before biases read them. The biases then cannot distinguish the inputs. In the code of DWSNets, biases can
            distinguish the inputs.
        is_last_constant: Whether to repeat a fault of the code of DWSNets and of Deep-Align: some maps to the last
            weight give the same result for all classes. The faulty maps read the previous weight, or the biases of
            units that the last weight does not connect. With the fault, the layer is not the most general layer of the
            paper.

    References:
        Navon et al. (2023), section 5 and appendix B; Navon et al. (2024), section 5 and appendix.
    """

    hidden: int = 64
    layers: int = 5
    sets: Sets = "attention"
    pooling: Pooling = "max"
    heads: int = 8
    is_diagonal: bool = True
    inputs_to: int | None = None
    dropout: float = 0.0
    are_biases_blind: bool = True
    is_last_constant: bool = True

    def __post_init__(self) -> None:
        sizes = (self.hidden, self.layers, self.heads, 1 if self.inputs_to is None else self.inputs_to)
        if min(sizes) < 1 or not 0 <= self.dropout < 1:
            raise ValueError(
                f"hidden={self.hidden}, layers={self.layers}, heads={self.heads}, inputs_to={self.inputs_to} and "
                f"dropout={self.dropout} make no net; sizes are at least 1, and dropout is in [0, 1)"
            )
        if self.sets not in ("attention", "mean") or self.pooling not in ("max", "mean"):
            raise ValueError(
                f"sets={self.sets!r} and pooling={self.pooling!r}; choose 'attention' or 'mean', and 'max' or 'mean'"
            )
        if self.sets == "attention" and self.hidden % self.heads:
            raise ValueError(f"{self.heads} heads of attention do not divide hidden={self.hidden}; choose either anew")
