"""The settings of the published ScaleGMN."""

from dataclasses import dataclass
from typing import Literal

Invariance = Literal["symmetrized", "absolute"]
Ends = Literal["gated", "perceptron"]
Readout = Literal["outputs", "everything"]


@dataclass(frozen=True)
class ChainScaleConfig:
    """Settings of a `ChainScaleGMN`; the defaults are those of the published code for images of digits, forward.

    Attributes:
        hidden: Features of every unit and every weight.
        layers: Number of layers.
        is_bidirectional: Whether units also hear from those that come after them.
        signs: What is left of features that signs change: `"symmetrized"`, rho(x) + rho(-x), or `"absolute"`, |x|.
            Where scales act, it is x / |x| in either case.
        ends: What units of the inputs and outputs have in place of the product that respects scales: `"gated"`, the
            same product with a perceptron of what no scale changes there, or `"perceptron"`, that alone.
        are_ends_shared: Whether inputs and outputs share that perceptron.
        reads: What numbers are made of: the states of the `"outputs"` (with both directions those of the inputs, too),
            or of `"everything"`.
        is_skipping: Whether states are added to a linear map of those before.
        are_ends_added: Whether the vectors of the places of inputs and outputs are added to their features, rather
            than multiplied with them as those of hidden units are.
        are_weights_placed: Whether features of weights know their layer, and their input or output.
        are_messages_placed: Whether messages and states know the layer of the unit that they come from.
        dropout: Share of the states that are dropped after every layer, in training.
        are_perceptrons_normalized: Whether layer normalization stands behind the first map of a perceptron.
        is_backward_inverted: Whether messages backward multiply by features of 1 / w, as the paper says: the published
            code does by those of w, so that scales are not respected in two directions. A weight of zero stays zero.
        are_classes_mixed: Fault of the published code: weights of the last layer know outputs in the order of the
            transposed matrix, so that with more than one output permutations are not respected, either.

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
