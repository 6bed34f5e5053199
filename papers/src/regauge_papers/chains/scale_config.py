"""The settings of the published ScaleGMN."""

from dataclasses import dataclass
from typing import Literal

Invariance = Literal["symmetrized", "absolute"]
Ends = Literal["gated", "perceptron"]
Readout = Literal["outputs", "everything"]


@dataclass(frozen=True)
class ChainScaleConfig:
    """Settings of a `ChainScaleGMN`; the defaults come from the published code for images of digits, with forward
    messages only.

    Attributes:
        hidden: The number of features of every unit and every weight.
        layers: Number of layers.
        is_bidirectional: Whether units also receive messages from the units of the next layer.
        signs: The invariant function of features x that signs change: `"symmetrized"` is rho(x) + rho(-x), and
            `"absolute"` is |x|. If scales act instead of signs, the function is always x / |x|.
        ends: The map at inputs and outputs, on which no scale acts. `"gated"` is the product of a linear map and a
            perceptron of all features, similar to hidden units. `"perceptron"` is the perceptron alone.
        are_ends_shared: Whether inputs and outputs share the perceptron of `ends`.
        reads: The units from which an `Invariant` head computes numbers: the `"outputs"` (and the inputs, if
            `is_bidirectional`), or `"everything"`.
        is_skipping: Whether a linear map of the states before a layer is added to the states after the layer.
        are_ends_added: Whether the learned vectors of inputs and outputs are added to the features of inputs and
            outputs. Without `are_ends_added`, vectors and features are multiplied, as at hidden units.
        are_weights_placed: Whether weights of different layers, inputs or outputs have different learned vectors in
            their initial features.
        are_messages_placed: Whether the maps of messages and states also read a learned vector of the unit's layer.
        dropout: The dropout probability of states after every layer, in training.
        are_perceptrons_normalized: Whether layer normalization follows the first linear map of a perceptron.
        is_backward_inverted: Whether backward messages use features of 1 / w, as in the paper (zero if w is zero). The
            published code uses features of w. With messages in both directions, the published net is therefore not
            invariant to scales.
        are_classes_mixed: Whether to repeat a fault of the published code: the vectors of outputs are assigned to the
            last weight as if it were transposed. With more than one output, the net is then not invariant to
            permutations.

    References:
        Kalogeropoulos et al. (2024), section 5 and appendix A.
    """

    hidden: int = 128
    layers: int = 4
    is_bidirectional: bool = False
    signs: Invariance = "symmetrized"
    ends: Ends = "gated"
    are_ends_shared: bool = True
    reads: Readout = "outputs"
    is_skipping: bool = True
    are_ends_added: bool = True
    are_weights_placed: bool = True
    are_messages_placed: bool = False
    dropout: float = 0.0
    are_perceptrons_normalized: bool = True
    is_backward_inverted: bool = False
    are_classes_mixed: bool = True

    def __post_init__(self) -> None:
        if min(self.hidden, self.layers) < 1 or not 0 <= self.dropout < 1:
            raise ValueError(
                f"hidden={self.hidden}, layers={self.layers} and dropout={self.dropout} make no net; sizes are at "
                "least 1, and dropout is in [0, 1)"
            )
        choices = (
            self.signs in ("symmetrized", "absolute"),
            self.ends in ("gated", "perceptron"),
            self.reads in ("outputs", "everything"),
        )
        if not all(choices):
            raise ValueError(
                f"signs={self.signs!r}, ends={self.ends!r} and reads={self.reads!r}; choose 'symmetrized' or "
                "'absolute', 'gated' or 'perceptron', and 'outputs' or 'everything'"
            )
