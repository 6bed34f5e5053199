"""A list of the features that signs or scales change and that can be nonzero after k layers.

Layers have no maps for features that are always zero.

The exponents with which signs and scales multiply a value or feature are called its character. Units have one feature
vector for every character that their values have (`Layout.unit_signs`). In the input of the first layer, a feature is
nonzero only if values of single units, such as biases, have its character. In later layers, messages and products of
two features make further features nonzero. Messages are sums of features of other units times features of weights.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from regauge.weightspace.layout.blocks import Block
from regauge.weightspace.layout.characters import Character, add, blank, find_sources, has_scale, is_odd
from regauge.weightspace.layout.compile import Layout

Known = Mapping[str, Collection[Character]]
"""For each unit set, the characters (exponents of signs and scales) of the features that can be nonzero."""


@dataclass(frozen=True)
class Message:
    """One kind of sum that the units of one set receive as a message through a block of weights. An end is one of the
    unit sets that the block connects.

    Attributes:
        receiver: The index of the end that receives the sum.
        is_block_odd: Whether the sum uses features of the block that signs or scales change.
        heard: The character (exponents of signs and scales) of the sum that is received.
        sources: The index of every other end of the block, with the character of the features that its units send.
    """

    receiver: int
    is_block_odd: bool
    heard: Character
    sources: tuple[tuple[int, Character], ...]


@dataclass(frozen=True, eq=False)
class Reach:
    """The features that can be nonzero at one layer, described by characters: the exponents of signs and scales.

    Attributes:
        known: For each unit set, the characters of the features before the layer, and of products of two of them.
        crossed: For each unit set, the characters of products of two features, each with all pairs of factors.
        messages: For each block of pairs, the messages that its units can receive.
        made: For each unit set, the characters of the features after the layer.
    """

    known: Mapping[str, frozenset[Character]]
    crossed: Mapping[str, Mapping[Character, list[tuple[Character, Character]]]]
    messages: Mapping[str, tuple[Message, ...]]
    made: Mapping[str, frozenset[Character]]

    @property
    def multiplied(self) -> frozenset[str]:
        """The names of the blocks whose features are factors of messages, if signs or scales change these features."""
        return frozenset(name for name, found in self.messages.items() if any(one.is_block_odd for one in found))


@lru_cache(maxsize=256)
def reach(layout: Layout, layers: int, *, keeps_pairs: bool) -> Reach:
    """Return the features that can be nonzero at the layer that follows `layers` other layers.

    Args:
        layout: The layout of the networks.
        layers: The number of preceding layers.
        keeps_pairs: Whether layers also have invariant features of pairs, and multiply unit features with each other.
            Without pair features, layers multiply unit features only by values that signs change.
    """
    before = reach(layout, layers - 1, keeps_pairs=keeps_pairs).made if layers else layout.own_signs
    crossed = {name: _products(found, layout.unit_signs[name]) if keeps_pairs else {} for name, found in before.items()}
    known = {name: found | crossed[name].keys() for name, found in before.items()}
    messages = {block.name: tuple(_messages(layout, block, known, keeps_pairs)) for block in layout.pair_blocks}
    made = {name: {*found} for name, found in known.items()}
    for block in layout.pair_blocks:
        for one in messages[block.name]:
            if is_odd(one.heard):
                made[block.ends[one.receiver].units].add(one.heard)
    return Reach(known, crossed, messages, {name: frozenset(found) for name, found in made.items()})


def _products(
    known: Collection[Character], wanted: Collection[Character]
) -> dict[Character, list[tuple[Character, Character]]]:
    """Return the exponents of signs of products of two features, with all pairs of factors; features that scales change
    are not included.
    """
    result: dict[Character, list[tuple[Character, Character]]] = {}
    for a, b in combinations(sorted(known), 2):
        made = tuple(add(x, y) for x, y in zip(a, b, strict=True))
        if made in wanted and not has_scale(a) and not has_scale(b):
            result.setdefault(made, []).append((a, b))
    return result


def _messages(layout: Layout, block: Block, known: Mapping[str, frozenset[Character]], has_even: bool) -> list[Message]:
    """Return every kind of message that can be sent through a block of weights and that respects signs and scales."""
    own = layout.character(block)
    grades = ([blank(own)] if has_even else []) + ([own] if is_odd(own) else [])
    found = []
    for receiver in range(len(block.ends)):
        for grade in grades:
            sources = find_sources(block, grade, receiver, known, layout.unit_signs)
            if sources is not None:
                found.append(Message(receiver, is_odd(grade), *sources))
    return found
