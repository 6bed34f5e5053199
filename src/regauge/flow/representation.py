"""Settings of the representation of networks as points. This module does not import torch."""

from dataclasses import dataclass
from typing import Literal, get_args

Scales = Literal["balance", "sphere", "flat", "keep"]
Head = Literal["keep", "direction", "unit"]


@dataclass(frozen=True)
class Representation:
    """A representation of networks as points.

    Attributes:
        scales: balance: every network goes to the point of smallest norm on its orbit, where networks are aligned, too,
            and the flow is Euclidean. sphere: the incoming weights of each unit whose scale is a symmetry get norm one,
            which changes no function, and the flow stays on the unit spheres. flat: the same norm, but the flow is
            Euclidean, and drawn networks are brought to norm one at the end. keep: weights as they are. Unless they are
            kept, translations are taken out, too (`Symmetry.split`), and drawn networks have none.
        head: Weight of the last layer, for `head_form`.
        head_form: keep: the last layer as it is. direction: its direction on a unit sphere and the logarithm of its
            norm. unit: its direction alone, which changes the loss of networks but not their classes, for studies of
            the thesis.
        head_bias: Name of the head's bias, which "unit" divides by the norm, too.
        components: Fit the flow in this number of principal components of aligned networks, with a perceptron and
            without spheres, and draw the rest from a normal distribution: for many values. None: in all
            values.

    References:
        Erdogan (2025), sections 4.4 and 6.2; "unit" is its Normalized and Geometric flow.
    """

    scales: Scales = "balance"
    head: str | None = None
    head_form: Head = "keep"
    head_bias: str | None = None
    components: int | None = None

    def __post_init__(self) -> None:
        if self.scales not in get_args(Scales) or self.head_form not in ("keep", "direction", "unit"):
            raise ValueError(
                f"scales={self.scales!r} and head_form={self.head_form!r}: scales are 'balance', 'sphere', 'flat' or "
                "'keep', the form of the head is 'keep', 'direction' or 'unit'; choose among these"
            )
        if (self.head is None) != (self.head_form == "keep"):
            raise ValueError(
                f"head={self.head!r} does not go with head_form={self.head_form!r}; name the last layer's weight and "
                "say 'direction' or 'unit', or leave out both"
            )
        if self.components is not None and (self.components < 1 or self.scales == "sphere" or self.head is not None):
            raise ValueError(
                f"components={self.components} with scales={self.scales!r} and head={self.head!r}: principal "
                "components, one at least, are for scales='balance', 'flat' or 'keep' without a head"
            )
