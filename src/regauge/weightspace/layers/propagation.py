"""Propagation: messages are products of weights and features, as in a network's own forward and backward passes."""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from regauge.core import products
from regauge.weightspace.features import Features, Odd, others, spread
from regauge.weightspace.layers.odd_units import OddUnits
from regauge.weightspace.layers.plan import Layer, LayerPlan, Traits, read_blocks
from regauge.weightspace.layers.reach import reach
from regauge.weightspace.layers.trunk import NetworkUpdate, UnitUpdate
from regauge.weightspace.layout.blocks import Block, End
from regauge.weightspace.layout.compile import Layout
from regauge.weightspace.shares import Terms, weigh


@dataclass(frozen=True)
class Propagation(Layer):
    """A layer whose messages are sums of other units' features, multiplied by functions of weights between units.

        message to unit i:   sum over c and j of E_ijc B_c x_j / sqrt(number of j)

    Here, `E_ijc` are `channels` linear functions of the encoded weight between i and j; no layer changes `E_ijc`. All
    messages together are therefore a product of matrices, and pairs of units have no features. A layer costs `channels`
    times as much as evaluating the network that is read on `width` inputs. With one channel, which is the weight
    itself, messages are computed as in a forward or backward pass of the network that is read. After the messages, `x
    <- x
    + MLP(x, messages, features of the units that contain x, network)`.

    If signs act on the weights, the functions of weights read absolute values. Units then have additional features `u`,
    which change their signs together with the units' weights:

        message to unit i:   sum over j of w_ij B u_j

    In sine networks, half periods can be added to biases, which are therefore treated as angles. For an angle `a` of
    frequency `f`, `u` consists of `sin(a + f messages)` and `cos(a + f messages)`. The inputs of the network also send
    messages: each input has `width` learned numbers of at most one in place of features. The features of the network
    read the sums of `u` times the weights to the outputs. The first layers can therefore compute the outputs of a sine
    network at learned inputs, although the network is never evaluated. For units without angles, `u` and messages are
    mapped linearly and multiplied by functions of `x`. The features `x` read products of two features `u`.

    Attributes:
        channels: The number of functions of each weight.
        expansion: The width of the MLP's hidden layer, as a multiple of the net's width.
        is_signed: Whether the layer respects signs and half periods by features `u`, without a canonical form.
        is_pass: Whether the maps `B` of `u` are initialized as the identity. With identity maps, untrained layers
            compute the forward pass of the network that is read.

    References:
        arXiv 2607.02166, whose blocks also multiply features and weights.
    """

    channels: int = 4
    expansion: int = 2
    is_signed: bool = True
    is_pass: bool = True

    def __post_init__(self) -> None:
        if min(self.channels, self.expansion) < 1:
            raise ValueError(f"channels={self.channels} and expansion={self.expansion} must be at least 1")

    @property
    def traits(self) -> Traits:
        """Return the layer's properties: weights multiply features, and `is_signed` layers respect signs."""
        respects = ("sign", "shift") if self.is_signed else ()
        return Traits(keeps_pairs=False, channels=self.channels, has_odd=True, respects=respects)

    def build(self, plan: LayerPlan) -> nn.Module:
        """Return the torch module of one layer; see `weightspace.layers`."""
        return _Layer(self, plan)


class _Layer(nn.Module):
    def __init__(self, settings: Propagation, plan: LayerPlan) -> None:
        super().__init__()
        self.channels = settings.channels
        width, hidden = plan.width, settings.expansion * plan.width
        self.reads = plan.reads
        self.terms = Terms(plan.layouts)
        self.network = NetworkUpdate(plan, hidden)
        self.sent = plan.for_ends(width, self.channels * width, is_biased=False, gain=1 / math.sqrt(self.channels))
        self.heard = plan.for_ends(width, hidden, is_biased=False)
        if plan.has_units:
            self.units = UnitUpdate(plan, hidden)
        self.odd: OddUnits | None = None
        reaches = [reach(layout, plan.before, keeps_pairs=settings.traits.keeps_pairs) for layout in plan.layouts]
        if any(signs for found in reaches for signs in found.made.values()):
            self.odd = OddUnits(plan, hidden, reaches, is_pass=settings.is_pass)
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
                        values = features.values[block.name]
                        if features.shares:
                            values = weigh(values, others(end, block), layout.grid(block.name), features.shares)
                        factor = self.terms.factor(block, end, layout, features.shares)
                        message = _multiply(values, sent[key], block, end, other) * factor
                        inbox[end.units].append(self.heard.at(k, message))
        if self.odd is None:
            result = self.units.change(features, units, network, inbox, layout) if units else {}
            return self._finish(features, layout, result, features.odd, network)
        even, heard = self.odd.hear(features, units, layout)
        turned, result, hidden = {}, {}, {}
        for name, x in units.items():
            turned[name] = self.odd.turn(name, features, heard, layout)
            inbox[name].extend(even[name])
            own = self.units.hear(name, units, network, inbox, layout, features.shares)
            hidden[name] = self.units.activate(x, (*own, *self.odd.hear_turned(turned[name])))
            result[name] = features.units[name] + self.units.out(hidden[name])
        odd = self.odd.change(features, turned, hidden, layout)
        return self._finish(features, layout, result, odd, network)

    def _finish(
        self, features: Features, layout: Layout, units: dict[str, Tensor], odd: Odd, network: Tensor
    ) -> Features:
        """Return the new features of networks, given the new features of their units."""
        pairs = {block.name: self._pair(block, features, units) for block in read_blocks(layout, self.reads)}
        read = 0.0 if self.odd is None else self.odd.read(odd, layout, features.shares)
        return features.change(units, pairs, self.network.change(features, network, units, layout) + read, odd)

    def _pair(self, block: Block, features: Features, units: dict[str, Tensor]) -> Tensor:
        mixed = self.pair_in(features.values[block.name])
        for k, end in enumerate(block.ends):
            mixed = mixed + spread(self.pair_ends.at(k, units[end.units]), end, block)
        made: Tensor = self.pair_out(nn.functional.silu(mixed))
        return made


def _multiply(values: Tensor, sent: Tensor, block: Block, end: End, other: End) -> Tensor:
    """Return, for each unit of one set that a block connects, the sum over the units of another set: `[models, *sizes
    of the first set, width]`.

    All sums are computed as one batched matrix product, because `einsum` would copy the two factors.
    """
    shared = [axis for axis in end.axes if axis in other.axes]
    rows, columns = ([axis for axis in one.axes if axis not in shared] for one in (end, other))
    rest = [axis for axis in range(len(block.sizes)) if axis not in (*end.axes, *other.axes)]
    values = values.permute(0, *(1 + axis for axis in (*shared, *rows, *columns, *rest)), -1)
    values = values.sum(tuple(range(-1 - len(rest), -1))) if rest else values
    sent = sent.permute(0, *(1 + other.axes.index(axis) for axis in (*shared, *columns)), -2, -1)
    stack, length = (math.prod(block.sizes[axis] for axis in axes) for axes in (shared, rows))
    made = products.matmul(
        values.reshape(len(values) * stack, length, -1), sent.reshape(len(sent) * stack, -1, sent.shape[-1])
    )
    made = made.reshape(len(values), *(block.sizes[axis] for axis in (*shared, *rows)), -1)
    return made.permute(0, *(1 + (*shared, *rows).index(axis) for axis in end.axes), -1)
