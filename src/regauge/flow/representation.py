"""Settings of the representation of networks as points. This module does not import torch."""

from dataclasses import dataclass
from typing import Literal, get_args

Scales = Literal["balance", "sphere", "flat", "keep"]
Head = Literal["keep", "direction", "unit"]


@dataclass(frozen=True)
class Representation:
    """A representation of networks as points.

    Attributes:
        scales: balance: every network is replaced by the equivalent network of smallest norm, and the flow is
            Euclidean. sphere: if a unit can be scaled without changing the function, its incoming weights get norm one,
            and the flow stays on unit spheres. flat: weights are normalized as with sphere, but the flow is Euclidean,
            and sampled networks are normalized at the end. keep: weights are not changed. All settings except keep also
            remove translations (`Symmetry.split`).
        head: Name of the weight of the last layer, for `head_form`.
        head_form: keep: the last layer is not changed. direction: the direction of the layer on a unit sphere, and the
            logarithm of its norm. unit: only the direction, as in the thesis, which changes losses but not predicted
            classes.
        head_bias: Name of the head's bias, which "unit" also divides by the norm.
        components: Number of principal components of aligned networks in which the flow is fitted, with a perceptron
            and without spheres. The remaining principal components are sampled from a normal distribution. None: the
            flow uses all values.

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
                f"head={self.head!r} cannot be combined with head_form={self.head_form!r}; name the last layer's "
                "weight and give 'direction' or 'unit', or leave out both"
            )
        if self.components is not None and (self.components < 1 or self.scales == "sphere" or self.head is not None):
            raise ValueError(
                f"components={self.components} with scales={self.scales!r} and head={self.head!r}: principal "
                "components, one at least, are for scales='balance', 'flat' or 'keep' without a head"
            )
