"""Vectors for every unit, which move with it: what units are matched by."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regauge.weightspace.features import Read
from regauge.weightspace.layers.dense import Dense
from regauge.weightspace.layout import Layout


@dataclass(frozen=True)
class UnitFeatures:
    """One linear map from the features of units to vectors, shared by all sets.

    The result has, for each group that is permuted, `[models, (bases ...,) size, width]`.

    Attributes:
        width: Length of the vectors.
    """

    width: int

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width={self.width}; vectors have at least one number")

    def reads(self, layouts: Sequence[Layout], *, has_pairs: bool) -> frozenset[str]:
        """Which features of the last layer are read; `has_pairs` says whether layers have any of pairs anyway."""
        return frozenset({"units"})

    def build(
        self, layouts: Sequence[Layout], width: int, *, has_pairs: bool, generator: torch.Generator | None
    ) -> nn.Module:
        """The head; see `weightspace.heads`."""
        return _Head(self, width, generator)


class _Head(nn.Module):
    def __init__(self, settings: UnitFeatures, width: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.last = Dense(width, settings.width, generator=generator)

    def forward(self, read: Read) -> dict[str, Tensor]:
        units = read.layout.units
        return {name: self.last(x) for name, x in read.features.units.items() if units[name].is_permuted}
