"""Propagation: messages are products of weights with features, as in the network's own passes forward and backward."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import ClassVar

import torch
from torch import Tensor, nn

from regauge.weightspace.features import Features, at_units, from_nested, spread
from regauge.weightspace.layers.dense import Dense, Norm
from regauge.weightspace.layout import Block, End, Layout

ENDS = 2
"""Ends of a block that have maps of their own; further ones share the last."""


@dataclass(frozen=True)
class Propagation:
    """Units hear sums of the features of others, each multiplied by a few functions of the weight between them.

        message to unit i:   sum over c and j of E_ijc B_c x_j / sqrt(number of j)

    where `E_ijc` are `channels` linear functions of the encoded value of the weight between i and j, which no layer
    changes. So a message is a product of matrices, and pairs of units have no vectors of their own: a layer costs what
    the network's own pass with as many inputs costs, times `channels`. With one channel and the value itself it is one
    layer of that pass, or of the one backward. `x <- x + MLP(x, messages, what x is repeated within, network)` follows.

    Attributes:
        channels: Functions of each weight.
        expansion: Width of the hidden layer of the MLP, as a multiple of the width.

    References:
        Related to the blocks of arXiv 2607.02166, which multiply features and weights too.
    """

    channels: int = 4
    expansion: int = 2

    is_shared = True
    respects: ClassVar[tuple[str, ...]] = ()
    keeps_pairs = False

    def __post_init__(self) -> None:
        if min(self.channels, self.expansion) < 1:
            raise ValueError(f"channels={self.channels} and expansion={self.expansion} must be at least 1")

    def build(
        self, layouts: Sequence[Layout], width: int, *, reads: frozenset[str], generator: torch.Generator | None
    ) -> nn.Module:
        """One layer; see `weightspace.layers`."""
        return _Layer(self, layouts, width, reads, generator)


class _Layer(nn.Module):
    def __init__(
        self,
        settings: Propagation,
        layouts: Sequence[Layout],
        width: int,
        reads: frozenset[str],
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        hidden, self.channels = settings.expansion * width, settings.channels
        has_pairs = any(layout.pair_blocks for layout in layouts)
        self.ends = ENDS if has_pairs else 0
        self.is_network_read = "network" in reads
        self.are_pairs_read = "pairs" in reads and has_pairs

        def dense(inputs: int, outputs: int, *, is_biased: bool = True, gain: float = 1.0) -> Dense:
            return Dense(inputs, outputs, is_biased=is_biased, gain=gain, generator=generator)

        gain = 1 / math.sqrt(self.channels)
        self.network_norm = Norm(width)
        self.sent = nn.ModuleList(
            dense(width, self.channels * width, is_biased=False, gain=gain) for _ in range(self.ends)
        )
        self.heard = nn.ModuleList(dense(width, hidden, is_biased=False) for _ in range(self.ends))
        if any(layout.units for layout in layouts):
            self.unit_norm = Norm(width)
            self.unit_in = dense(width, hidden)
            self.from_network = dense(width, hidden, is_biased=False)
            self.unit_out = dense(hidden, width, gain=0.5)
            if self.is_network_read:
                self.network_heard = dense(width, hidden, is_biased=False)
        if any(len(units.axes) > 1 for layout in layouts for units in layout.units.values()):
            self.from_base = dense(width, hidden, is_biased=False)
            self.from_inner = dense(width, hidden, is_biased=False)
        if self.is_network_read:
            self.network_in = dense(width, hidden)
            self.network_out = dense(hidden, width, gain=0.5)
        if self.are_pairs_read:
            self.pair_in = dense(self.channels, width)
            self.pair_ends = nn.ModuleList(dense(width, width, is_biased=False) for _ in range(self.ends))
            self.pair_out = dense(width, width)

    def forward(self, features: Features, layout: Layout) -> Features:
        units = {name: self.unit_norm(x) for name, x in features.units.items()}
        network = self.network_norm(features.network)
        inbox: dict[str, list[Tensor]] = {name: [] for name in units}
        sent: dict[tuple[str, int], Tensor] = {}
        for block in layout.pair_blocks:
            values = features.values[block.name]
            for k, end in enumerate(block.ends):
                for j, other in enumerate(block.ends):
                    if j == k:
                        continue
                    key = (other.units, min(j, ENDS - 1))
                    if key not in sent:
                        sent[key] = self.sent[key[1]](units[other.units]).unflatten(-1, (self.channels, -1))
                    message = _multiply(values, sent[key], block, end, other)
                    inbox[end.units].append(self.heard[min(k, ENDS - 1)](message))
        result = {}
        for name, x in units.items():
            mixed = self.unit_in(x) + at_units(self.from_network(network), x)
            for message in inbox[name]:
                mixed = mixed + message / len(inbox[name]) ** 0.5
            for is_outer, there in from_nested(name, units, layout):
                mixed = mixed + (self.from_base if is_outer else self.from_inner)(there)
            result[name] = features.units[name] + self.unit_out(nn.functional.silu(mixed))
        pairs = {block.name: self._pair(block, features, result) for block in layout.pair_blocks if self.are_pairs_read}
        if not self.is_network_read:
            return Features(result, pairs, features.network, features.values)
        mixed = self.network_in(network)
        for x in result.values():
            mixed = mixed + self.network_heard(x.flatten(1, -2).mean(1)) / len(result)
        return Features(result, pairs, features.network + self.network_out(nn.functional.silu(mixed)), features.values)

    def _pair(self, block: Block, features: Features, units: dict[str, Tensor]) -> Tensor:
        mixed = self.pair_in(features.values[block.name])
        for k, end in enumerate(block.ends):
            mixed = mixed + spread(self.pair_ends[min(k, ENDS - 1)](units[end.units]), end, block)
        made: Tensor = self.pair_out(nn.functional.silu(mixed))
        return made


def _multiply(values: Tensor, sent: Tensor, block: Block, end: End, other: End) -> Tensor:
    """Sums over the units of one end, for those of another: `[models, *sizes of the end, width]`."""
    letters = ascii_lowercase[: len(block.sizes)]
    into, out = ("".join(letters[axis] for axis in one.axes) for one in (end, other))
    summed = [size for axis, size in enumerate(block.sizes) if axis not in end.axes]
    made = torch.einsum(f"X{letters}Y,X{out}YZ->X{into}Z", values, sent)
    return made / math.sqrt(math.prod(summed))
