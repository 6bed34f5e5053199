"""ScaleGMN: messages are products, so that features change sign as the weights do that they are made of."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn

from regauge.weightspace.features import Features, Odd, order_as, others, spread
from regauge.weightspace.layers.dense import Invariants, OddNorm
from regauge.weightspace.layers.plan import ENDS, Layer, Plan
from regauge.weightspace.layers.trunk import NetworkUpdate, PairUpdate, UnitUpdate
from regauge.weightspace.layout import Block, Character, Layout
from regauge.weightspace.layout.characters import find_sources, is_odd
from regauge.weightspace.shares import Shares, average


@dataclass(frozen=True)
class ScaleGMN(Layer):
    """Message passing that respects signs by what it multiplies, without a canonical form of them.

    Units and weights have features that no sign changes, `x` and `e`, and others that signs multiply by the exponents
    of their placements, `u` and `o`. With invariants `i(u) = (A u) * (B u)`, for a weight between units x and y,

        e <- e + MLP(e, x, y, i(o)),          o <- o + (W o) * f(e, x, y, i(o))
        message to x, both ways: mean over y of (F o) * (S u_y), or of (F e) * (S x_y) + C e
        u <- u + (D u + messages) * f(x, messages),    x <- x + MLP(x, messages, i(D u + messages), network)

    Where a group has several families of signs, its units have such features for every product of them that occurs, and
    products of two make a third. Maps of features that signs change have no biases. Which products may be summed
    follows from the exponents: their signs must cancel at the units that are summed over. Signs are their own inverses,
    so that the same products serve for messages forward and backward.

    Departures from the paper: positive scales are brought to a canonical form first, which is smooth, holds for any
    number of families and any exponents, forward and backward, and leaves nothing out; signs have no such form. Norms
    keep the spread over networks through many layers, and `i(u)` takes the place of `MLP(u) + MLP(-u)`.

    Attributes:
        expansion: Width of the hidden layers of the MLPs, as a multiple of the width.

    References:
        Kalogeropoulos et al. (2024), section 4, equations 8 to 14.
    """

    expansion: int = 2

    respects = ("sign",)

    def __post_init__(self) -> None:
        if self.expansion < 1:
            raise ValueError(f"expansion={self.expansion} must be at least 1")

    def build(self, plan: Plan) -> nn.Module:
        """One layer; see `weightspace.layers`."""
        return _Layer(self, plan)


@dataclass(frozen=True)
class _Message:
    """One kind of sum that the units at one end of a block hear.

    Attributes:
        receiver: Number of the end.
        is_block_odd: Whether it is made of the features of the block that signs change.
        heard: Character of the sum.
        sources: The other ends, and the characters of their features.
    """

    receiver: int
    is_block_odd: bool
    heard: Character
    sources: tuple[tuple[int, Character], ...]

    @property
    def keys(self) -> dict[str, tuple[str, ...]]:
        """Names of the maps that make it."""
        at = min(self.receiver, ENDS - 1)
        is_plain = not self.is_block_odd and not any(is_odd(one) for _, one in self.sources)
        return {
            "factor": (f"{_kind(self.is_block_odd)}{at}",),
            "source": tuple(f"{_kind(is_odd(one))}{min(j, ENDS - 1)}" for j, one in self.sources),
            "addend": (f"even{at}",) if is_plain else (),
            "heard": (f"{_kind(is_odd(self.heard))}{at}",),
        }


def _kind(odd: bool) -> str:
    return "odd" if odd else "even"


def _messages(layout: Layout, block: Block) -> Iterator[_Message]:
    """Every kind of sum that makes sense."""
    blank = tuple((0,) * len(exponents) for exponents in layout.character(block))
    grades = [blank, layout.signs[block.name]] if block.name in layout.signs else [blank]
    for receiver in range(len(block.ends)):
        for grade in grades:
            found = find_sources(block, grade, receiver, layout.unit_signs)
            if found is not None:
                yield _Message(receiver, is_odd(grade), *found)


class _Layer(nn.Module):
    def __init__(self, settings: ScaleGMN, plan: Plan) -> None:
        super().__init__()
        width, hidden, layouts = plan.width, settings.expansion * plan.width, plan.layouts
        pairs = [(layout, block) for layout in layouts for block in layout.pair_blocks]
        messages = [message for layout, block in pairs for message in _messages(layout, block)]
        has_odd_units = any(signs for layout in layouts for signs in layout.unit_signs.values())
        has_odd_pairs = any(block.name in layout.signs for layout, block in pairs)
        self.messages = {
            layout.key: {block.name: tuple(_messages(layout, block)) for block in layout.pair_blocks}
            for layout in layouts
        }

        def maps(name: str) -> nn.ModuleDict:
            used = sorted({key for message in messages for key in message.keys[name]})
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
        if has_odd_pairs:
            self.odd_pair_norm = OddNorm(width)
            self.pair_invariants = Invariants(width, hidden, plan.generator)
        self.are_odd_pairs_new = has_odd_pairs and (
            "odd" in plan.reads or any(message.is_block_odd for message in messages)
        )
        if self.are_odd_pairs_new:
            self.odd_pair = plan.dense(width, width, is_biased=False, gain=0.5)
            self.pair_gate = plan.dense(hidden, width)
        if plan.has_units:
            self.units = UnitUpdate(plan, hidden)
        if has_odd_units:
            self.odd_norm = OddNorm(width)
            self.odd_in = plan.dense(width, width, is_biased=False)
            self.mixed_norm = OddNorm(width)
            self.unit_invariants = Invariants(width, hidden, plan.generator)
        if any(_products(signs) for layout in layouts for signs in layout.unit_signs.values()):
            self.crossed_norm = OddNorm(width)
            self.cross_left, self.cross_right = (plan.dense(width, width, is_biased=False) for _ in range(2))
        self.are_odd_units_new = has_odd_units and "odd" in plan.reads
        if self.are_odd_units_new:
            self.unit_gate = plan.dense(hidden, width, gain=0.5)

    def forward(self, features: Features, layout: Layout) -> Features:
        units = {name: self.units.norm(x) for name, x in features.units.items()}
        odd_units = {name: self._cross(known) for name, known in features.odd.units.items()}
        pairs, odd_pairs = self._relate(features, units, layout)
        inbox, odd_inbox = self._send(pairs, odd_pairs, units, odd_units, layout, features.shares)
        network = self.network.norm(features.network)
        result: dict[str, Tensor] = {}
        odd_result: dict[str, dict[Character, Tensor]] = {}
        for name, x in units.items():
            turned = {
                s: self.mixed_norm(self.odd_in(u) + _mean(odd_inbox[name][s])) for s, u in odd_units[name].items()
            }
            heard = self.units.hear(name, units, network, inbox, layout, features.shares)
            mixed = self.units.activate(x, (*heard, *(self.unit_invariants(u) for u in turned.values())))
            result[name] = features.units[name] + self.units.out(mixed)
            odd_result[name] = features.odd.units[name]
            if self.are_odd_units_new and turned:
                gate = self.unit_gate(mixed)
                odd_result[name] = {s: features.odd.units[name][s] + u * gate for s, u in turned.items()}
        changed = self.network.change(features, network, result, layout)
        return features.change(result, pairs, changed, Odd(odd_result, odd_pairs))

    def _cross(self, known: dict[Character, Tensor]) -> dict[Character, Tensor]:
        """Normed features of units; those of one character get products of those of two others that make it up."""
        normed = {one: self.odd_norm(u) for one, u in known.items()}
        result = dict(normed)
        for one, made_of in _products(tuple(known)).items():
            crossed = [self.cross_left(normed[a]) * self.cross_right(normed[b]) for a, b in made_of]
            result[one] = self.crossed_norm(normed[one] + _mean(crossed))
        return result

    def _relate(
        self, features: Features, units: dict[str, Tensor], layout: Layout
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The features of weights, from those of the units at their ends."""
        pairs, odd = {}, {}
        for block in layout.pair_blocks:
            e, o = features.pairs[block.name], features.odd.pairs.get(block.name)
            heard = [*self.pairs.hear(block, units)]
            if o is not None:
                normed = self.odd_pair_norm(o)
                heard.append(self.pair_invariants(normed))
            mixed = self.pairs.activate(self.pairs.norm(e), heard)
            pairs[block.name] = e + self.pairs.out(mixed)
            if o is not None:
                odd[block.name] = o + self.odd_pair(normed) * self.pair_gate(mixed) if self.are_odd_pairs_new else o
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
        """What units hear, by its character."""
        inbox: dict[str, list[Tensor]] = {name: [] for name in units}
        odd_inbox: dict[str, dict[Character, list[Tensor]]] = {
            name: {one: [] for one in known} for name, known in odd_units.items()
        }
        for block in layout.pair_blocks:
            for message in self.messages[layout.key][block.name]:
                keys, end = message.keys, block.ends[message.receiver]
                e = (odd_pairs if message.is_block_odd else pairs)[block.name]
                made = self.factor[keys["factor"][0]](e)
                for key, (j, one) in zip(keys["source"], message.sources, strict=True):
                    name = block.ends[j].units
                    x = odd_units[name][one] if is_odd(one) else units[name]
                    made = made * spread(self.source[key](x), block.ends[j], block)
                for key in keys["addend"]:
                    made = made + self.addend[key](e)
                away = others(end, block)
                heard = self.heard[keys["heard"][0]](
                    order_as(average(made, away, layout.grid(block.name), shares), end)
                )
                (odd_inbox[end.units][message.heard] if is_odd(message.heard) else inbox[end.units]).append(heard)
        return inbox, odd_inbox


def _products(known: tuple[Character, ...]) -> dict[Character, list[tuple[Character, Character]]]:
    """The characters that are products of two others, with all such pairs."""
    result: dict[Character, list[tuple[Character, Character]]] = {}
    for a, b in combinations(known, 2):
        made = tuple(tuple((x + y) % 2 for x, y in zip(p, q, strict=True)) for p, q in zip(a, b, strict=True))
        if made in known:
            result.setdefault(made, []).append((a, b))
    return result


def _mean(messages: list[Tensor]) -> Tensor | float:
    """The sum of messages, divided by the root of their number."""
    return torch.stack(messages).sum(0) / len(messages) ** 0.5 if messages else 0.0
