"""Unit features that change their signs together with weights: messages between units, updates by messages, and
messages to the network.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_lowercase

import torch
from torch import Tensor, nn

from regauge.weightspace.features import Features, Odd, others, turn
from regauge.weightspace.layers.dense import OddNorm
from regauge.weightspace.layers.plan import LayerPlan
from regauge.weightspace.layers.reach import Reach
from regauge.weightspace.layout.blocks import Block
from regauge.weightspace.layout.characters import Character, at_end, is_odd
from regauge.weightspace.layout.compile import Layout
from regauge.weightspace.shares import Shares, Terms, average, weigh

Heard = Mapping[str, Mapping[Character, list[Tensor]]]
"""For each unit set, the messages to its units, sorted by character (the exponents of the signs that multiply them)."""


@dataclass(frozen=True)
class Turned:
    """The features of the units of one set after all received messages were added.

    Attributes:
        mixed: Linear maps of features and messages, by character (the exponents of the signs that multiply them).
        waves: Sines and cosines of the units' angles, after all messages are added to the angles, if the units have
            angles.
    """

    mixed: Mapping[Character, Tensor]
    waves: Mapping[Character, Tensor]


class OddUnits(nn.Module):
    """The part of a layer that updates those unit features that signs change.

    Messages are sums over weights times features. If units have angles, messages are multiplied by the frequency and
    added to the angles, and the layer applies sine and cosine, as in a sine network. Units without angles add a map of
    their messages, multiplied by functions of features that no sign changes.

    Args:
        plan: The plan of the layer.
        hidden: The width of the MLPs' hidden layers.
        reaches: For each layout, the characters (exponents of signs) of unit features before the layer.
        is_pass: Whether untrained layers send features unchanged, and therefore compute the forward pass of the network
            that is read.
    """

    def __init__(self, plan: LayerPlan, hidden: int, reaches: Sequence[Reach], *, is_pass: bool) -> None:
        super().__init__()
        layouts, width = plan.layouts, plan.width
        self.messages = {layout.key: found.messages for layout, found in zip(layouts, reaches, strict=True)}
        self.made = {layout.key: found.made for layout, found in zip(layouts, reaches, strict=True)}
        messages = [one for known in self.messages.values() for own in known.values() for one in own]
        self.ends, self.terms = plan.count_ends(), Terms(layouts)
        self.counts = {one.key: {name: math.prod(units.sizes) for name, units in one.units.items()} for one in layouts}
        kinds = sorted({self._kind(j, sign) for one in messages for j, sign in one.sources})
        self.sent = nn.ModuleDict({kind: plan.dense(width, width, is_biased=False) for kind in kinds})
        for weight in self.sent.parameters() if is_pass else ():
            nn.init.eye_(weight)
        if any(not is_odd(one.heard) for one in messages):
            self.to_even: nn.Module = plan.dense(width, hidden, is_biased=False)
        self.norm, self.own_norm = OddNorm(width), OddNorm(width)
        self.known = {layout.key: found.known for layout, found in zip(layouts, reaches, strict=True)}
        if any(signs for found in reaches for signs in found.known.values()):
            self.own = plan.dense(width, width, is_biased=False)
        self.from_squares = plan.dense(width, hidden, is_biased=False)
        read = {layout.key: _read_signs(layout) if "network" in plan.reads else {} for layout in layouts}
        self.read_signs = read
        self.new_signs = {
            one.key: {
                name: [sign for sign in signs if sign in self.made[one.key][name]]
                for name, signs in (one.unit_signs if "odd" in plan.reads else read[one.key]).items()
            }
            for one in layouts
        }
        self.is_network_read = any(signs for known in read.values() for signs in known.values())
        if self.is_network_read:
            self.to_network = plan.dense(width, width, is_biased=False)
        new = [
            sign in (layout.wave_signs(name) if name in (layout.waves or {}) else ())
            for layout in layouts
            for name, signs in self.new_signs[layout.key].items()
            for sign in signs
        ]
        if not all(new):
            self.gate = plan.dense(hidden, width, gain=0.5)
        if any(new):
            self.wave_gate = plan.dense(hidden, 2 * width, gain=0.01)

    def _kind(self, end: int, sign: Character) -> str:
        """Return the name of the linear map for the features that the units of one unit set send through a block of
        weights.
        """
        return f"{'odd' if is_odd(sign) else 'even'}{min(end, self.ends - 1)}"

    def hear(
        self, features: Features, units: Mapping[str, Tensor], layout: Layout
    ) -> tuple[dict[str, list[Tensor]], dict[str, dict[Character, list[Tensor]]]]:
        """Return the messages that no sign changes, and the messages that signs change, sorted by character (the
        exponents of signs).
        """
        even: dict[str, list[Tensor]] = {name: [] for name in units}
        odd: dict[str, dict[Character, list[Tensor]]] = {
            name: {one: [] for one in known} for name, known in features.odd.units.items()
        }
        for block in layout.pair_blocks:
            for message in self.messages[layout.key].get(block.name, ()):
                values, size = features.odd.values[block.name]
                end = block.ends[message.receiver]
                wave = (layout.waves or {}).get(end.units)
                sent = []
                for j, sign in message.sources:
                    name = block.ends[j].units
                    x = features.odd.units[name][sign] if is_odd(sign) else units[name]
                    sent.append((j, self.sent[self._kind(j, sign)](x)))
                if features.shares:
                    values = weigh(values, others(end, block), layout.grid(block.name), features.shares)
                made = _multiply(values, sent, block, message.receiver)
                if wave is not None and message.heard == wave.addend:
                    odd[end.units][message.heard].append(made * wave.frequency)
                    continue
                made = made * (self.terms.factor(block, end, layout, features.shares) / size)
                if is_odd(message.heard):
                    odd[end.units][message.heard].append(made)
                else:
                    even[end.units].append(self.to_even(made))
        return even, odd

    def turn(self, name: str, features: Features, heard: Heard, layout: Layout) -> "Turned":
        """Add messages to the features of the units of one set. The method `change` later multiplies the result by
        functions of invariant features.
        """
        known = features.odd.units[name]
        wave = (layout.waves or {}).get(name)
        mixed = {}
        for sign in sorted(self.made[layout.key][name]):
            parts = [message / len(heard[name][sign]) ** 0.5 for message in heard[name][sign]]
            if sign in self.known[layout.key][name]:
                parts.append(self.own(self.own_norm(known[sign])))
            mixed[sign] = self.norm(torch.stack(parts).sum(0))
        if wave is None:
            return Turned(mixed, {})
        phases = features.odd.given[name].get(wave.addend, torch.zeros_like(known[wave.addend]))
        for message in heard[name][wave.addend]:
            phases = phases + message
        return Turned(mixed, dict(zip(layout.wave_signs(name), turn(features.odd.waves[name], phases), strict=True)))

    def hear_turned(self, turned: "Turned") -> Iterator[Tensor]:
        """Yield functions of the updated features that no sign changes, as vectors of the hidden width."""
        # Squares have no signs. Their mean has about the same size for any number of characters.
        found = [u.square() for u in (*turned.mixed.values(), *turned.waves.values())]
        if found:
            yield self.from_squares(torch.stack(found).mean(0))

    def change(
        self, features: Features, turned: Mapping[str, "Turned"], hidden: Mapping[str, Tensor], layout: Layout
    ) -> Odd:
        """Return the new features of all units. The new features are computed from the features plus messages, and from
        the hidden layers of the units' MLPs.
        """
        result = {}
        for name, known in features.odd.units.items():
            made, new = turned[name], dict(known)
            for sign in self.new_signs[layout.key].get(name, ()):
                # Gates are functions of even features, so multiplying by a gate keeps the character of a feature.
                if sign in made.waves:
                    along, beside = self.wave_gate(hidden[name]).chunk(2, -1)
                    new[sign] = made.waves[sign] * (1 + along) + made.mixed[sign] * beside
                else:
                    new[sign] = known[sign] + made.mixed[sign] * self.gate(hidden[name])
            result[name] = new
        return replace(features.odd, units=result)

    def read(self, odd: Odd, layout: Layout, shares: Shares) -> Tensor | float:
        """Return messages to the network's vector: sums over units of the unit's values (such as biases) times the
        unit's features.
        """
        read = [(name, sign) for name, signs in self.read_signs[layout.key].items() for sign in signs]
        total: Tensor | float = 0.0
        for name, sign in read:
            product = odd.given[name][sign] * odd.units[name][sign]
            mean = average(product, range(1, product.ndim - 1), layout.grids[name], shares)
            total = total + mean * math.sqrt(self.counts[layout.key][name] if shares else product[0, ..., 0].numel())
        return self.to_network(total) if read else 0.0


def _read_signs(layout: Layout) -> dict[str, list[Character]]:
    """Return the characters (exponents of signs) of values of single units, except sines and cosines of angles."""
    waves = layout.waves or {}
    angles = {name for wave in waves.values() for name in (wave.sine, wave.cosine)}
    found: dict[str, list[Character]] = {}
    for block in layout.unit_blocks:
        (end,) = block.ends
        if block.name not in layout.signs or block.name in angles:
            continue
        sign = at_end(layout.signs[block.name], end)
        is_part = end.units in waves and sign == waves[end.units].addend
        if not is_part and sign not in found.setdefault(end.units, []):
            found[end.units].append(sign)
    return found


def _multiply(values: Tensor, sent: list[tuple[int, Tensor]], block: Block, receiver: int) -> Tensor:
    """Return sums of a block's values times features of the units from which messages come, `[models, *sizes,
    width]`.
    """
    letters = ascii_lowercase[: len(block.sizes)]
    end = block.ends[receiver]
    ends = ["".join(letters[axis] for axis in block.ends[j].axes) for j, _ in sent]
    into = "".join(letters[axis] for axis in end.axes)
    equation = ",".join([f"X{letters}", *(f"X{one}Z" for one in ends)])
    return torch.einsum(f"{equation}->X{into}Z", values.squeeze(-1), *(x for _, x in sent))
