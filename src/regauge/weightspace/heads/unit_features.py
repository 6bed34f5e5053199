"""A head that outputs a vector for every unit, by which units can be matched; permuting units permutes the vectors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regauge.weightspace.features import Features, Read
from regauge.weightspace.layers.dense import Dense
from regauge.weightspace.layers.reach import Known
from regauge.weightspace.layout.compile import Layout


@dataclass(frozen=True)
class UnitFeatures:
    """A head that maps the features of units to vectors, by the same linear map for all units.

    For each permuted group, the result has an entry `[models, (bases ...,) size, width]`.

    Attributes:
        width: The length of the vectors.
    """

    width: int

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width={self.width}; vectors have at least one number")

    def reads(self, layouts: Sequence[Layout], *, has_pairs: bool) -> frozenset[str]:
        """Return the kinds of features that the head reads from the last layer: only features of units."""
        return frozenset({"units"})

    def build(
        self,
        layouts: Sequence[Layout],
        width: int,
        *,
        has_pairs: bool,
        generator: torch.Generator | None,
        known: Sequence[Known] = (),
    ) -> nn.Module:
        """Return the torch module of this head; see `weightspace.heads`."""
        return VectorHead(self, width, generator)


class VectorHead(nn.Module):
    """The map from the features of units to their vectors."""

    def __init__(self, settings: UnitFeatures, width: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.last = Dense(width, settings.width, generator=generator)

    def forward(self, read: Read) -> dict[str, Tensor]:
        return self.read(read.features, read.layout)

    def read(self, features: Features, layout: Layout) -> dict[str, Tensor]:
        """Return the vectors of all units, given the features of the last layer."""
        return {name: self.last(x) for name, x in features.units.items() if layout.units[name].is_permuted}
