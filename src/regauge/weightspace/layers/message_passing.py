"""Message passing: units hear from units through the weights between them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from regauge.weightspace.features import Features, at_units, from_nested, order_as, others, spread
from regauge.weightspace.layers.dense import Dense, Norm
from regauge.weightspace.layout import Layout

Aggregation = Literal["mean", "sum", "pna"]
ENDS = 3
"""Ends of a block that have maps of their own; further ones share the last."""
VARIANCE = 1e-6
"""Added to variances, whose root has no gradient at zero."""


@dataclass(frozen=True)
class MessagePassing:
    """Messages through weights, multiplied by the features of the unit that they come from.

    For every block with features `e` between units `x` and `y`:

        e <- e + MLP(e, x, y),      message to x: mean over y of (A e) * (B y) + C e

    and then `x <- x + MLP(x, messages, what x is repeated within, network)`. Maps are shared by all tensors, which the
    encoder tells apart. All sums are over axes of dense blocks: nothing is scattered.

    Attributes:
        aggregation: `"mean"`, `"sum"` divided by the root of the number of units, or `"pna"`: mean, largest, smallest
            and standard deviation side by side.
        expansion: Width of the hidden layers of the MLPs, as a multiple of the width.

    References:
        Kofinas et al. (2024), section 3, for multiplied messages and PNA; Lim et al. (2024) for shared maps.
    """

    aggregation: Aggregation = "mean"
    expansion: int = 2

    is_shared = True
    respects: ClassVar[tuple[str, ...]] = ()
    keeps_pairs = True
    channels = 0

    def __post_init__(self) -> None:
        if self.aggregation not in ("mean", "sum", "pna") or self.expansion < 1:
            raise ValueError(
                f"aggregation={self.aggregation!r} and expansion={self.expansion}; choose 'mean', 'sum' or 'pna', and "
                "an expansion of at least 1"
            )

    def build(
        self, layouts: Sequence[Layout], width: int, *, reads: frozenset[str], generator: torch.Generator | None
    ) -> nn.Module:
        """One layer; see `weightspace.layers`."""
        return _Layer(self, layouts, width, reads, generator)


class _Layer(nn.Module):
    def __init__(
        self,
        settings: MessagePassing,
        layouts: Sequence[Layout],
        width: int,
        reads: frozenset[str],
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.settings = settings
        hidden = settings.expansion * width
        ends = min(ENDS, max((len(block.ends) for layout in layouts for block in layout.pair_blocks), default=0))
        is_nested = any(len(units.axes) > 1 for layout in layouts for units in layout.units.values())
        has_units = any(layout.units for layout in layouts)

        def dense(inputs: int, outputs: int, *, is_biased: bool = True, gain: float = 1.0) -> Dense:
            return Dense(inputs, outputs, is_biased=is_biased, gain=gain, generator=generator)

        def for_ends(inputs: int, outputs: int, *, is_biased: bool = True) -> nn.ModuleList:
            return nn.ModuleList(dense(inputs, outputs, is_biased=is_biased) for _ in range(ends))

        self.network_norm = Norm(width)
        if ends:
            kinds = 4 if settings.aggregation == "pna" else 1
            self.pair_norm = Norm(width)
            self.pair_in = dense(width, hidden)
            self.end_in = for_ends(width, hidden, is_biased=False)
            self.pair_out = dense(hidden, width, gain=0.5)
            self.through = for_ends(width, 2 * width)
            self.source = for_ends(width, width)
            self.heard = for_ends(kinds * width, hidden, is_biased=False)
        if has_units:
            self.unit_norm = Norm(width)
            self.unit_in = dense(width, hidden)
            self.from_network = dense(width, hidden, is_biased=False)
            self.unit_out = dense(hidden, width, gain=0.5)
        if is_nested:
            self.from_base = dense(width, hidden, is_biased=False)
            self.from_inner = dense(width, hidden, is_biased=False)
        self.is_network_read = "network" in reads
        if self.is_network_read:
            self.network_in = dense(width, hidden)
            self.network_out = dense(hidden, width, gain=0.5)
            if has_units:
                self.network_heard = dense(width, hidden, is_biased=False)

    def forward(self, features: Features, layout: Layout) -> Features:
        units = {name: self.unit_norm(x) for name, x in features.units.items()}
        network = self.network_norm(features.network)
        inbox: dict[str, list[Tensor]] = {name: [] for name in units}
        pairs = {}
        for block in layout.pair_blocks:
            e = features.pairs[block.name]
            mixed = self.pair_in(self.pair_norm(e))
            for k, end in enumerate(block.ends):
                mixed = mixed + spread(self.end_in[min(k, ENDS - 1)](units[end.units]), end, block)
            e = pairs[block.name] = e + self.pair_out(nn.functional.silu(mixed))
            for k, end in enumerate(block.ends):
                role = min(k, ENDS - 1)
                factor, addend = self.through[role](e).chunk(2, -1)
                message = addend
                for j, other in enumerate(block.ends):
                    if j != k:
                        message = message + factor * spread(
                            self.source[min(j, ENDS - 1)](units[other.units]), other, block
                        )
                inbox[end.units].append(self.heard[role](order_as(self._aggregate(message, others(end, block)), end)))
        result = {}
        for name, x in units.items():
            mixed = self.unit_in(x) + at_units(self.from_network(network), x)
            for message in inbox[name]:
                mixed = mixed + message / len(inbox[name]) ** 0.5
            for is_outer, there in from_nested(name, units, layout):
                mixed = mixed + (self.from_base if is_outer else self.from_inner)(there)
            result[name] = features.units[name] + self.unit_out(nn.functional.silu(mixed))
        if not self.is_network_read:
            return Features(result, pairs, features.network, features.values)
        mixed = self.network_in(network)
        for x in result.values():
            mixed = mixed + self.network_heard(x.flatten(1, -2).mean(1)) / len(result)
        return Features(result, pairs, features.network + self.network_out(nn.functional.silu(mixed)), features.values)

    def _aggregate(self, message: Tensor, axes: tuple[int, ...]) -> Tensor:
        if self.settings.aggregation == "pna":
            if not axes:
                return message.repeat_interleave(4, -1)
            deviation = (message.var(axes, unbiased=False) + VARIANCE).sqrt()
            return torch.cat([message.mean(axes), message.amax(axes), message.amin(axes), deviation], -1)
        if not axes:
            return message
        mean = message.mean(axes)
        count = math.prod(message.shape[axis] for axis in axes)
        return mean if self.settings.aggregation == "mean" else mean * count**0.5
