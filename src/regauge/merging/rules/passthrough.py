"""Passthrough: one network, unchanged or with its tensors multiplied by a factor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from regauge.merging.rule import Rule, Target
from regauge.merging.settings import Number, require_scale


@dataclass(frozen=True)
class Passthrough(Rule):
    """One network, unchanged or with its tensors multiplied by a factor.

    Attributes:
        scale: The factor. A setting with substrings of names multiplies only some tensors.
    """

    scale: Number = 1.0

    least, most, has_shares = 1, 1, False

    def __post_init__(self) -> None:
        require_scale(self.scale)

    def combine(self, tensors: Iterator[Tensor], factors: Sequence[float], target: Target) -> Tensor:
        """Return the tensor of the only network, multiplied by the scale."""
        (tensor,) = tensors
        return tensor.mul_(target.number(self.scale))
