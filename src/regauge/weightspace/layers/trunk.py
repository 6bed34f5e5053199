"""Updates of the vectors of units, pairs and the network by messages, for all layers with shared maps."""

from collections.abc import Iterable, Mapping
from itertools import chain

from torch import Tensor, nn

from regauge.weightspace.features import Features, at_units, from_nested, spread
from regauge.weightspace.layers.dense import Norm
from regauge.weightspace.layers.plan import LayerPlan
from regauge.weightspace.layout.blocks import Block
from regauge.weightspace.layout.compile import Layout
from regauge.weightspace.shares import Shares, average

Inbox = Mapping[str, list[Tensor]]
"""For each unit set, the messages that its units receive. Messages have the width of the MLP's hidden layer."""


class Update(nn.Module):
    """The update `x + B silu(A norm(x) + messages)` of feature vectors x, where messages have the hidden width.

    Features that the next layer does not read are not updated and need no linear maps.
    """

    def __init__(self, plan: LayerPlan, hidden: int, *, is_read: bool = True) -> None:
        super().__init__()
        self.is_read = is_read
        self.norm = Norm(plan.width)
        if is_read:
            self.into, self.out = plan.dense(plan.width, hidden), plan.dense(hidden, plan.width, gain=0.5)

    def activate(self, normed: Tensor, heard: Iterable[Tensor]) -> Tensor:
        """Return `silu(A normed + messages)`, where `normed` is the normalized vector and `heard` contains the
        messages.
        """
        mixed: Tensor = self.into(normed)
        for part in heard:
            mixed = mixed + part
        return nn.functional.silu(mixed)

    def forward(self, x: Tensor, normed: Tensor, heard: Iterable[Tensor]) -> Tensor:
        return x + self.out(self.activate(normed, heard)) if self.is_read else x


class PairUpdate(Update):
    """The update of the vectors of pairs by the vectors of the two units."""

    def __init__(self, plan: LayerPlan, hidden: int) -> None:
        super().__init__(plan, hidden)
        self.ends = plan.for_ends(plan.width, hidden, is_biased=False)

    def hear(self, block: Block, units: Mapping[str, Tensor]) -> Iterable[Tensor]:
        """Yield messages to pairs of units from the units of each pair."""
        return (spread(self.ends.at(k, units[end.units]), end, block) for k, end in enumerate(block.ends))

    def change(self, features: Features, units: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
        """Return the new vectors of all pairs."""
        blocks = {block.name: (block, features.pairs[block.name]) for block in layout.pair_blocks}
        return {name: self(e, self.norm(e), self.hear(block, units)) for name, (block, e) in blocks.items()}


class UnitUpdate(Update):
    """The update of the feature vectors of units by messages, by the network's vector, and by the vectors of containing
    and contained units.
    """

    def __init__(self, plan: LayerPlan, hidden: int) -> None:
        super().__init__(plan, hidden)
        self.from_network = plan.dense(plan.width, hidden, is_biased=False)
        if plan.is_nested:
            self.from_base = plan.dense(plan.width, hidden, is_biased=False)
            self.from_inner = plan.dense(plan.width, hidden, is_biased=False)

    def hear(
        self,
        name: str,
        units: Mapping[str, Tensor],
        network: Tensor,
        inbox: Inbox,
        layout: Layout,
        shares: Shares,
    ) -> Iterable[Tensor]:
        """Yield all messages that the units of a set receive."""
        yield at_units(self.from_network(network), units[name])
        for message in inbox[name]:
            yield message / len(inbox[name]) ** 0.5
        for is_outer, there in from_nested(name, units, layout, shares):
            yield (self.from_base if is_outer else self.from_inner)(there)

    def change(
        self, features: Features, units: Mapping[str, Tensor], network: Tensor, inbox: Inbox, layout: Layout
    ) -> dict[str, Tensor]:
        """Return the new vectors of all units."""
        return {
            name: self(features.units[name], x, self.hear(name, units, network, inbox, layout, features.shares))
            for name, x in units.items()
        }


class NetworkUpdate(Update):
    """The update of the network's vector by the mean feature vectors of all unit sets."""

    def __init__(self, plan: LayerPlan, hidden: int) -> None:
        super().__init__(plan, hidden, is_read="network" in plan.reads)
        if self.is_read and plan.has_units:
            self.from_units = plan.dense(plan.width, hidden, is_biased=False)

    def change(
        self,
        features: Features,
        network: Tensor,
        units: Mapping[str, Tensor],
        layout: Layout,
        heard: Iterable[Tensor] = (),
    ) -> Tensor:
        """Return the new feature vector of each network. The new vector may also depend on messages, which have the
        width of the hidden layer.
        """
        pooled = (average(x, range(1, x.ndim - 1), layout.grids[name], features.shares) for name, x in units.items())
        means = (self.from_units(x) / len(units) for x in pooled)
        made: Tensor = self(features.network, network, chain(means, heard))
        return made
