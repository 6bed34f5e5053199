"""Propagation: messages are products of weights with features, as in the network's own passes forward and backward."""

import math
from dataclasses import dataclass
from string import ascii_lowercase

import torch
from torch import Tensor, nn

from regauge.weightspace.features import Features, spread
from regauge.weightspace.layers.plan import Layer, Plan, read_blocks
from regauge.weightspace.layers.trunk import NetworkUpdate, UnitUpdate
from regauge.weightspace.layout import Block, End, Layout


@dataclass(frozen=True)
class Propagation(Layer):
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

    keeps_pairs = False

    def __post_init__(self) -> None:
        if min(self.channels, self.expansion) < 1:
            raise ValueError(f"channels={self.channels} and expansion={self.expansion} must be at least 1")

    def build(self, plan: Plan) -> nn.Module:
        """One layer; see `weightspace.layers`."""
        return _Layer(self, plan)


class _Layer(nn.Module):
    def __init__(self, settings: Propagation, plan: Plan) -> None:
        super().__init__()
        self.channels = settings.channels
        width, hidden = plan.width, settings.expansion * plan.width
        self.reads = plan.reads
        self.network = NetworkUpdate(plan, hidden)
        self.sent = plan.for_ends(width, self.channels * width, is_biased=False, gain=1 / math.sqrt(self.channels))
        self.heard = plan.for_ends(width, hidden, is_biased=False)
        if plan.has_units:
            self.units = UnitUpdate(plan, hidden)
        if any(read_blocks(layout, plan.reads) for layout in plan.layouts):
            self.pair_in, self.pair_out = plan.dense(self.channels, width), plan.dense(width, width)
            self.pair_ends = plan.for_ends(width, width, is_biased=False, are_read=True)

    def forward(self, features: Features, layout: Layout) -> Features:
        units = {name: self.units.norm(x) for name, x in features.units.items()}
        network = self.network.norm(features.network)
        inbox: dict[str, list[Tensor]] = {name: [] for name in units}
        sent: dict[tuple[str, int], Tensor] = {}
        for block in layout.pair_blocks:
            for j, other in enumerate(block.ends):
                key = (other.units, self.sent.number(j))
                if key not in sent:
                    made = self.sent.at(j, units[other.units])
                    sent[key] = made.reshape(*made.shape[:-1], self.channels, -1)
                for k, end in enumerate(block.ends):
                    if j != k:
                        message = _multiply(features.values[block.name], sent[key], block, end, other)
                        inbox[end.units].append(self.heard.at(k, message))
        result = self.units.change(features, units, network, inbox, layout) if units else {}
        pairs = {block.name: self._pair(block, features, result) for block in read_blocks(layout, self.reads)}
        return Features(result, pairs, self.network.change(features, network, result), features.values)

    def _pair(self, block: Block, features: Features, units: dict[str, Tensor]) -> Tensor:
        mixed = self.pair_in(features.values[block.name])
        for k, end in enumerate(block.ends):
            mixed = mixed + spread(self.pair_ends.at(k, units[end.units]), end, block)
        made: Tensor = self.pair_out(nn.functional.silu(mixed))
        return made


def _multiply(values: Tensor, sent: Tensor, block: Block, end: End, other: End) -> Tensor:
    """Sums over the units of one end, for those of another: `[models, *sizes of the end, width]`."""
    letters = ascii_lowercase[: len(block.sizes)]
    into, out = ("".join(letters[axis] for axis in one.axes) for one in (end, other))
    summed = [size for axis, size in enumerate(block.sizes) if axis not in end.axes]
    made = torch.einsum(f"X{letters}Y,X{out}YZ->X{into}Z", values, sent)
    return made / math.sqrt(math.prod(summed))
