"""Message passing: units receive messages from other units through the weights between them."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from regauge.weightspace.features import Features, order_as, others, spread
from regauge.weightspace.layers.plan import Layer, LayerPlan, Traits
from regauge.weightspace.layers.trunk import NetworkUpdate, PairUpdate, UnitUpdate
from regauge.weightspace.layout.blocks import Block
from regauge.weightspace.layout.compile import Layout
from regauge.weightspace.shares import average

Aggregation = Literal["mean", "sum", "pna"]
VARIANCE = 1e-6
"""A constant that is added to variances, because the gradient of the square root is infinite at zero."""


@dataclass(frozen=True)
class MessagePassing(Layer):
    """Messages from weights, multiplied by the features of the sending unit.

    The layer updates the features `e` of every block between units `x` and `y`:

        e <- e + MLP(e, x, y),      message to x: mean over y of (A e) * (B y) + C e

    and then `x <- x + MLP(x, messages, features of the units that contain x, network)`. All tensors share the maps of a
    layer; the encoder's features distinguish the tensors. All sums run over axes of dense tensors, without scatter
    operations.

    Attributes:
        aggregation: `"mean"`, `"sum"` (divided by the root of the number of units), or `"pna"` (mean, largest, smallest
            and standard deviation, concatenated).
        expansion: The width of the MLPs' hidden layers, as a multiple of the net's width.

    References:
        Kofinas et al. (2024), section 3, for multiplied messages and PNA; Lim et al. (2024) for shared maps.
    """

    aggregation: Aggregation = "mean"
    expansion: int = 2

    def __post_init__(self) -> None:
        if self.aggregation not in ("mean", "sum", "pna") or self.expansion < 1:
            raise ValueError(
                f"aggregation={self.aggregation!r} and expansion={self.expansion}; choose 'mean', 'sum' or 'pna', and "
                "an expansion of at least 1"
            )

    @property
    def traits(self) -> Traits:
        """Return the properties of the layer that determine how a net is built.

        Units can have weights (shares) only with means, because sums and maxima depend on the number of copies of a
        unit.
        """
        return Traits(weighs_units=self.aggregation == "mean")

    def build(self, plan: LayerPlan) -> nn.Module:
        """Return the torch module of one layer; see `weightspace.layers`."""
        return _Layer(self, plan)


class _Layer(nn.Module):
    def __init__(self, settings: MessagePassing, plan: LayerPlan) -> None:
        super().__init__()
        self.aggregation = settings.aggregation
        width, hidden = plan.width, settings.expansion * plan.width
        self.network = NetworkUpdate(plan, hidden)
        if plan.has_pairs:
            kinds = 4 if settings.aggregation == "pna" else 1
            self.pairs = PairUpdate(plan, hidden)
            self.through = plan.for_ends(width, 2 * width)
            self.source = plan.for_ends(width, width)
            self.heard = plan.for_ends(kinds * width, hidden, is_biased=False)
        if plan.has_units:
            self.units = UnitUpdate(plan, hidden)

    def forward(self, features: Features, layout: Layout) -> Features:
        units = {name: self.units.norm(x) for name, x in features.units.items()}
        network = self.network.norm(features.network)
        pairs = self.pairs.change(features, units, layout) if layout.pair_blocks else {}
        inbox: dict[str, list[Tensor]] = {name: [] for name in units}
        for block in layout.pair_blocks:
            for k, end in enumerate(block.ends):
                told, away = self._message(pairs[block.name], units, block, k), others(end, block)
                is_mean = self.aggregation == "mean"
                message = (
                    average(told, away, layout.grid(block.name), features.shares)
                    if is_mean
                    else self._aggregate(told, away)
                )
                inbox[end.units].append(self.heard.at(k, order_as(message, end)))
        result = self.units.change(features, units, network, inbox, layout) if units else {}
        return features.change(result, pairs, self.network.change(features, network, result, layout))

    def _message(self, e: Tensor, units: dict[str, Tensor], block: Block, receiver: int) -> Tensor:
        """Return the message that every weight of a block sends to one of the two connected units, `[models, *labels,
        width]`.
        """
        factor, message = self.through.at(receiver, e).chunk(2, -1)
        for j, other in enumerate(block.ends):
            if j != receiver:
                message = message + factor * spread(self.source.at(j, units[other.units]), other, block)
        return message

    def _aggregate(self, message: Tensor, axes: tuple[int, ...]) -> Tensor:
        if self.aggregation == "pna":
            if not axes:
                return message.repeat_interleave(4, -1)
            deviation = (message.var(axes, unbiased=False) + VARIANCE).sqrt()
            return torch.cat([message.mean(axes), message.amax(axes), message.amin(axes), deviation], -1)
        if not axes:
            return message
        return message.sum(axes) / math.sqrt(math.prod(message.shape[axis] for axis in axes))
