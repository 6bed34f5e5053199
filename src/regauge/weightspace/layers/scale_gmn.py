"""ScaleGMN: messages are products of weights and features that signs and scales multiply like weights."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regauge.weightspace.features import Features, Odd, order_as, others, spread
from regauge.weightspace.layers.dense import OddNorm
from regauge.weightspace.layers.plan import ENDS, Layer, LayerPlan, Traits
from regauge.weightspace.layers.reach import Message, reach
from regauge.weightspace.layers.remains import PairSizes, Remains, UnitSizes
from regauge.weightspace.layers.trunk import NetworkUpdate, PairUpdate, UnitUpdate
from regauge.weightspace.layout.characters import Character, has_scale, is_odd
from regauge.weightspace.layout.compile import Layout
from regauge.weightspace.shares import Shares, average


@dataclass(frozen=True)
class ScaleGMN(Layer):
    """Message passing that respects signs, because messages are products of weights and features.

    Units have invariant features `x`, and weights have invariant features `e`. Units also have features `u`, and
    weights have features `o`, which change their signs together with the weights. With `i(u) = (A u) * (B u)`, for a
    weight between units x and y,

        e <- e + MLP(e, x, y, i(o)),          o <- o + (W o) * f(e, x, y, i(o))
        message to x, both ways: mean over y of (F o) * (S u_y), or of (F e) * (S x_y) + C e
        u <- u + (D u + messages) * f(x, messages),    x <- x + MLP(x, messages, i(D u + messages), network)

    If a group has several families of signs, a value may change with a product of several signs. Units have features
    `u` for every product of signs that occurs in the network. Products of two features `u` give further features. Maps
    of features that signs change have no biases. Products are summed over units only if the signs of the summed units
    cancel in each product. Each sign is its own inverse, so forward and backward messages use the same products.

    With `is_scaled`, features also change together with positive scales, as in the paper. With `is_scaled`, `i(u)`
    consists of the direction of `u`, and of logarithms of ratios of sizes that no scale changes. Backward messages
    begin at the outputs, and use features that scale like outgoing weights. No weight is inverted, and kernels may be
    padded with zeros.

    `ScaleGMN` differs from the paper in the following ways. Unless `is_scaled`, positive scales are canonicalized
    first. Unlike the canonical form of signs, the canonical form of scales is continuous, and with it the first layer
    can read the sizes of weights. Vectors are normalized in every layer, which preserves differences between networks
    through many layers. The function `i(u)` replaces the paper's `MLP(u) + MLP(-u)`.

    Attributes:
        expansion: The width of the MLPs' hidden layers, as a multiple of the net's width.
        is_scaled: Whether the layer is also equivariant to scales, by products. Even with `is_scaled`, scales are
            canonicalized in three cases: if no features have the exponents that messages need (squared ReLU), if
            matrices or other canonical forms depend on scales, or if the net uses shares, moments or probes.

    References:
        Kalogeropoulos et al. (2024), section 4, equations 8 to 14.
    """

    expansion: int = 2
    is_scaled: bool = False

    def __post_init__(self) -> None:
        if self.expansion < 1:
            raise ValueError(f"expansion={self.expansion} must be at least 1")

    @property
    def traits(self) -> Traits:
        """Return the layer's properties: the layer respects signs, and also scales if `is_scaled`."""
        return Traits(has_odd=True, respects=("sign", "scale") if self.is_scaled else ("sign",))

    def build(self, plan: LayerPlan) -> nn.Module:
        """Return the torch module of one layer; see `weightspace.layers`."""
        return _Layer(self, plan)


def _keys(message: Message) -> dict[str, tuple[str, ...]]:
    """Return the names of the linear maps that compute one kind of message."""
    at = min(message.receiver, ENDS - 1)
    is_plain = not message.is_block_odd and not any(is_odd(one) for _, one in message.sources)
    return {
        "factor": (f"{_kind(message.is_block_odd)}{at}",),
        "source": tuple(f"{_kind(is_odd(one))}{min(j, ENDS - 1)}" for j, one in message.sources),
        "addend": (f"even{at}",) if is_plain else (),
        "heard": (f"{_kind(is_odd(message.heard))}{at}",),
    }


def _kind(odd: bool) -> str:
    return "odd" if odd else "even"


class _Layer(nn.Module):
    def __init__(self, settings: ScaleGMN, plan: LayerPlan) -> None:
        super().__init__()
        width, hidden, layouts = plan.width, settings.expansion * plan.width, plan.layouts
        keeps = settings.traits.keeps_pairs
        self.reach = {layout.key: reach(layout, plan.before, keeps_pairs=keeps) for layout in layouts}
        messages = [one for known in self.reach.values() for own in known.messages.values() for one in own]
        known = [one for found in self.reach.values() for own in found.known.values() for one in own]
        made = [one for found in self.reach.values() for own in found.made.values() for one in own]
        blocks = [layout.signs[b.name] for layout in layouts for b in layout.pair_blocks if b.name in layout.signs]

        def maps(name: str) -> nn.ModuleDict:
            used = sorted({key for message in messages for key in _keys(message)[name]})
            is_heard = name == "heard"
            return nn.ModuleDict(
                {
                    key: plan.dense(
                        width,
                        hidden if is_heard and key.startswith("even") else width,
                        is_biased=not is_heard and key.startswith("even"),
                    )
                    for key in used
                }
            )

        self.factor, self.source, self.addend, self.heard = map(maps, ("factor", "source", "addend", "heard"))
        self.network = NetworkUpdate(plan, hidden)
        if plan.has_pairs:
            self.pairs = PairUpdate(plan, hidden)
        self.pair_remains = Remains(blocks, plan, hidden)
        self.pair_sizes = PairSizes(self.reach, plan, hidden)
        self.are_odd_pairs_new = bool(blocks) and (
            "odd" in plan.reads or any(message.is_block_odd for message in messages)
        )
        if self.are_odd_pairs_new:
            self.odd_pair = plan.dense(width, width, is_biased=False, gain=0.5)
            self.pair_gate = plan.dense(hidden, width)
        if plan.has_units:
            self.units = UnitUpdate(plan, hidden)
        if not all(map(has_scale, known)):
            self.odd_norm = OddNorm(width)
        if known:
            self.odd_in = plan.dense(width, width, is_biased=False)
        self.unit_remains = Remains(made, plan, hidden)
        self.unit_sizes = UnitSizes(self.reach, plan, hidden)
        if any(pairs for found in self.reach.values() for pairs in found.crossed.values()):
            self.crossed_norm = OddNorm(width)
            self.cross_left, self.cross_right = (plan.dense(width, width, is_biased=False) for _ in range(2))
        self.are_odd_units_new = bool(made) and "odd" in plan.reads
        if self.are_odd_units_new:
            self.unit_gate = plan.dense(hidden, width, gain=0.5)

    def forward(self, features: Features, layout: Layout) -> Features:
        made = self.reach[layout.key].made
        units = {name: self.units.norm(x) for name, x in features.units.items()}
        odd_units = {name: self._cross(name, features, layout) for name in units}
        pairs, odd_pairs = self._relate(features, units, layout)
        inbox, odd_inbox = self._send(pairs, odd_pairs, units, odd_units, layout, features.shares)
        network = self.network.norm(features.network)
        result: dict[str, Tensor] = {}
        odd_result: dict[str, dict[Character, Tensor]] = {}
        for name, x in units.items():
            turned = {s: self._turn(odd_units[name].get(s), odd_inbox[name][s]) for s in sorted(made[name])}
            normed = {s: self.unit_remains.norm(u, s) for s, u in turned.items()}
            heard = [*self.units.hear(name, units, network, inbox, layout, features.shares)]
            heard += [self.unit_remains(u, s) for s, u in normed.items()]
            heard += self.unit_sizes.hear(name, turned, layout)
            mixed = self.units.activate(x, heard)
            result[name] = features.units[name] + self.units.out(mixed)
            odd_result[name] = dict(features.odd.units[name])
            if self.are_odd_units_new and turned:
                gate = self.unit_gate(mixed)
                for s, u in turned.items():
                    odd_result[name][s] = odd_result[name][s] + (u if has_scale(s) else normed[s]) * gate
        changed = self.network.change(features, network, result, layout)
        return features.change(result, pairs, changed, Odd(odd_result, odd_pairs))

    def _cross(self, name: str, features: Features, layout: Layout) -> dict[Character, Tensor]:
        """Return the features of units that can be nonzero, and products of two nonzero features. Features that no
        scale changes are normalized.
        """
        found = self.reach[layout.key]
        known = {s: features.odd.units[name][s] for s in sorted(found.known[name])}
        normed = {s: u if has_scale(s) else self.odd_norm(u) for s, u in known.items()}
        result = dict(normed)
        # Characters multiply: an entrywise product of two features has the product of their characters, whatever maps
        # without bias are applied to them before.
        for one, made_of in found.crossed[name].items():
            crossed = [self.cross_left(normed[a]) * self.cross_right(normed[b]) for a, b in made_of]
            result[one] = self.crossed_norm(normed[one] + _mean(crossed))
        return result

    def _turn(self, u: Tensor | None, messages: list[Tensor]) -> Tensor:
        """Return the received messages, plus a linear map of the unit's own features `u` unless `u` is None."""
        parts = [*([] if u is None else [self.odd_in(u)]), *([_mean(messages)] if messages else [])]
        return torch.stack(parts).sum(0)

    def _relate(
        self, features: Features, units: dict[str, Tensor], layout: Layout
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the new features of weights, computed from the features of the connected units."""
        pairs, odd = {}, {}
        for block in layout.pair_blocks:
            e, o = features.pairs[block.name], features.odd.pairs.get(block.name)
            heard = [*self.pairs.hear(block, units)]
            if o is not None:
                character = layout.signs[block.name]
                normed = self.pair_remains.norm(o, character)
                heard.append(self.pair_remains(normed, character))
                heard += self.pair_sizes.hear(block, o, features.odd.units, layout)
            mixed = self.pairs.activate(self.pairs.norm(e), heard)
            pairs[block.name] = e + self.pairs.out(mixed)
            if o is not None:
                odd[block.name] = o
                if self.are_odd_pairs_new:
                    changed = self.odd_pair(o if has_scale(character) else normed)
                    odd[block.name] = o + changed * self.pair_gate(mixed)
        return pairs, odd

    def _send(
        self,
        pairs: dict[str, Tensor],
        odd_pairs: dict[str, Tensor],
        units: dict[str, Tensor],
        odd_units: dict[str, dict[Character, Tensor]],
        layout: Layout,
        shares: Shares,
    ) -> tuple[dict[str, list[Tensor]], dict[str, dict[Character, list[Tensor]]]]:
        """Return messages to units, sorted by character (the exponents of signs and scales)."""
        found = self.reach[layout.key]
        inbox: dict[str, list[Tensor]] = {name: [] for name in units}
        odd_inbox: dict[str, dict[Character, list[Tensor]]] = {
            name: {one: [] for one in made} for name, made in found.made.items()
        }
        for block in layout.pair_blocks:
            for message in found.messages[block.name]:
                keys, end = _keys(message), block.ends[message.receiver]
                e = (odd_pairs if message.is_block_odd else pairs)[block.name]
                made = self.factor[keys["factor"][0]](e)
                for key, (j, one) in zip(keys["source"], message.sources, strict=True):
                    name = block.ends[j].units
                    x = odd_units[name][one] if is_odd(one) else units[name]
                    made = made * spread(self.source[key](x), block.ends[j], block)
                for key in keys["addend"]:
                    made = made + self.addend[key](e)
                away = others(end, block)
                told = average(made, away, layout.grid(block.name), shares)
                if message.is_block_odd and has_scale(layout.signs[block.name]):
                    told = told * math.prod(made.shape[axis] for axis in away) ** 0.5
                    told = told if is_odd(message.heard) else torch.asinh(told)  # no other step limits its size
                heard = self.heard[keys["heard"][0]](order_as(told, end))
                (odd_inbox[end.units][message.heard] if is_odd(message.heard) else inbox[end.units]).append(heard)
        return inbox, odd_inbox


def _mean(messages: list[Tensor]) -> Tensor:
    """Return the sum of messages, divided by the square root of their number."""
    made: Tensor = torch.stack(messages).sum(0) / len(messages) ** 0.5
    return made
