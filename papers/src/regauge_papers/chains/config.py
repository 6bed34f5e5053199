"""The settings of published deep weight space networks."""

from dataclasses import dataclass

from regauge.weightspace.layers.exchange import Sets
from regauge.weightspace.layers.reading import Pooling


@dataclass(frozen=True)
class ChainConfig:
    """Settings of a `ChainDWS`; the defaults are those of Deep-Align's code, with the two faults named here.

    Attributes:
        hidden: Features of every entry of every tensor, between the layers.
        layers: Number of layers.
        sets: `"attention"`, the authors' default: a set transformer's block without normalization; or `"mean"`: a
            linear map minus another one of what is pooled.
        pooling: `"max"` or `"mean"`.
        heads: Of the attention; the last layer has one.
        is_diagonal: Whether tensors hear only from those that share a place of the chain with them.
        inputs_to: If given, the input axis of the first weight is projected to this length before every layer and back
            after it, besides a linear map of the whole tensor.
        dropout: Share of the features that are dropped between layers, in training.
        are_biases_blind: Fault of Deep-Align's code: biases hear from weights as if inputs and classes were permuted,
            so that no bias tells inputs apart. DWSNets' code is right.
        is_last_constant: Fault of both codes: what the last weight hears from the one before it, and from biases that
            are no neighbors, is the same for all classes, so that the layer is not the largest one of the paper.

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
