"""The invariant head, whose outputs are the same for all networks of an orbit."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regauge.weightspace.features import Features, Read
from regauge.weightspace.layers.dense import Dense, Norm
from regauge.weightspace.layers.reach import Known
from regauge.weightspace.layout.blocks import Grid
from regauge.weightspace.layout.compile import Layout
from regauge.weightspace.shares import Shares, average

VARIANCE = 1e-6
"""A constant that is added to squares, because the gradient of the square root is infinite at zero."""


@dataclass(frozen=True)
class Invariant:
    """A head that computes outputs from the mean and maximum features of units and pairs, and of the network.

    If units are weighted by shares of their outgoing weights, the head uses root mean squares instead of maxima.

    The features of each unit set, and of each block of pairs, are mapped linearly. An MLP maps the sum of the linear
    maps to the outputs.

    Attributes:
        outputs: The number of outputs for each network.
        hidden: The width of the hidden layer; by default the width of the net.
        dropout: The dropout probability of hidden units in training.
    """

    outputs: int
    hidden: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.outputs < 1 or not 0 <= self.dropout < 1 or (self.hidden is not None and self.hidden < 1):
            raise ValueError(
                f"outputs={self.outputs}, hidden={self.hidden} and dropout={self.dropout} make no head; outputs and "
                "hidden are positive, dropout is in [0, 1)"
            )

    def reads(self, layouts: Sequence[Layout], *, has_pairs: bool) -> frozenset[str]:
        """Return the kinds of features that the head reads from the last layer."""
        units = frozenset({"units", "positions", "network"})
        return units | {"pairs", "unwritten"} if has_pairs else units

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
        return _Head(self, layouts, width, has_pairs, generator)


class _Pool(nn.Module):
    """The mean and the maximum of the features of every unit set and of every block of weights. Every mean and maximum
    has a separate linear map, and the results are summed.
    """

    def __init__(self, count: int, width: int, outputs: int, generator: torch.Generator | None) -> None:
        super().__init__()
        gain = 1 / max(1, count) ** 0.5
        self.maps = nn.ModuleList(Dense(2 * width, outputs, gain=gain, generator=generator) for _ in range(count))

    def forward(self, features: Features, layout: Layout) -> Tensor:
        total = torch.zeros(())
        grids = [*(layout.grids[name] for name in features.units), *map(layout.grid, features.pairs)]
        for dense, x, grid in zip(self.maps, [*features.units.values(), *features.pairs.values()], grids, strict=True):
            total = total.to(x) + dense(torch.cat(_pool(x, grid, layout, features.shares), -1))
        return total.to(features.network)


def _pool(x: Tensor, grid: Grid, layout: Layout, shares: Shares) -> tuple[Tensor, Tensor]:
    """Return the mean and the maximum of features. If units have weights (shares), return the root mean square instead
    of the maximum.
    """
    axes = range(1, x.ndim - 1)
    if not layout.is_weighed:
        return x.mean([*axes]), x.flatten(1, -2).amax(1)
    square = average(x.square(), axes, grid, shares)
    return average(x, axes, grid, shares), (square + VARIANCE).sqrt()


class _Head(nn.Module):
    def __init__(
        self,
        settings: Invariant,
        layouts: Sequence[Layout],
        width: int,
        has_pairs: bool,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        hidden = settings.hidden or 2 * width
        self.pools = nn.ModuleList(
            _Pool(len(layout.units) + len(layout.pair_blocks) * has_pairs, width, hidden, generator)
            for layout in layouts
        )
        self.network = Dense(width, hidden, generator=generator)
        self.norm = Norm(hidden)
        self.middle = Dense(hidden, hidden, generator=generator)
        self.dropout = nn.Dropout(settings.dropout)
        self.last = Dense(hidden, settings.outputs, generator=generator)

    def forward(self, read: Read) -> Tensor:
        total = self.network(read.features.network) + self.pools[read.number](read.features, read.layout)
        mixed = nn.functional.silu(self.norm(total))
        mixed = self.dropout(nn.functional.silu(self.middle(mixed)))
        result: Tensor = self.last(mixed)
        return result
