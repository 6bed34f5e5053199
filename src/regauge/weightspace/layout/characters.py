"""Characters: the exponents with which signs and scales multiply values and features, by axis and family.

If a sine is shifted by an odd number of half periods, values that depend on the sine change their signs. If half-period
shifts are not canonicalized, their signs count as separate families.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import product

from regauge.weightspace.layout.blocks import Block, End, Label

Character = tuple[tuple[bool | int, ...], ...]
"""The exponents of all families of signs, shifts and scales, for each axis. The exponents of signs and shifts are
booleans, and the exponents of scales are integers. Exponents of canonicalized families are zero."""


def character_of_labels(labels: Iterable[Label], *, has_signs: bool, has_shifts: bool, has_scales: bool) -> Character:
    """Return the exponents with which signs, half periods and scales (if not canonicalized) multiply values along some
    axes.
    """
    return tuple(
        (
            *(bool(exponent % 2) and has_signs for exponent in label.sign),
            *(bool(exponent % 2) and has_shifts for exponent in label.parity),
            *(exponent * has_scales for exponent in label.scale),
        )
        for label in labels
    )


def blank(character: Character) -> Character:
    """Return the character of values that no sign or scale changes: all exponents are zero, on the same axes."""
    return tuple(tuple(type(exponent)(0) for exponent in exponents) for exponents in character)


def scales_of(character: Character) -> tuple[int, ...]:
    """Return the exponents of scales along all axes."""
    return tuple(e for exponents in character for e in exponents if not isinstance(e, bool))


def has_scale(character: Character) -> bool:
    """Return whether any scale changes values with this character (the exponents of signs and scales)."""
    return any(scales_of(character))


def has_sign(character: Character) -> bool:
    """Return whether any sign changes values with this character (the exponents of signs and scales)."""
    return any(e is True for exponents in character for e in exponents)


def is_odd(character: Character) -> bool:
    """Return whether any sign or scale changes values with this character (the exponents of signs and scales)."""
    return any(any(exponents) for exponents in character)


def add(left: tuple[bool | int, ...], right: tuple[bool | int, ...]) -> tuple[bool | int, ...]:
    """Return the exponents of a product of two values, given the exponents of both factors along one axis."""
    return tuple(x != y if isinstance(x, bool) else x + y for x, y in zip(left, right, strict=True))


def at_end(character: Character, end: End) -> Character:
    """Return the exponents of signs and scales that belong to the axes of one unit set in a block (one end)."""
    return tuple(character[axis] for axis in end.axes)


def multiply(character: Character, factors: Iterable[tuple[End, Character]]) -> Character:
    """Return the exponents of signs and scales of the product of a block's features and the features of units that the
    block connects.
    """
    total = [*character]
    for end, factor in factors:
        for axis, exponents in zip(end.axes, factor, strict=True):
            total[axis] = add(total[axis], exponents)
    return tuple(total)


def find_sources(
    block: Block,
    character: Character,
    receiver: int,
    known: Mapping[str, Collection[Character]],
    wanted: Mapping[str, Collection[Character]],
) -> tuple[Character, tuple[tuple[int, Character], ...]] | None:
    """Find unit features that can be multiplied with a block's features and summed to messages for the units of one
    set.

    A sum over units is allowed only if signs and scales of the summed units do not change its terms.

    Args:
        block: A block of weights that connects two or more unit sets (its ends).
        character: The character of the block's features: the character of its values, or the character of invariant
            features.
        receiver: The index of the end whose units receive the sums.
        known: For each unit set, the characters of the features that its units may send in addition to invariant
            features.
        wanted: For each unit set, the characters that a message to its units may have, unless it is invariant.

    Returns:
        The character of the message, and for each sending end its index and the character of the features that it
        sends. The result is None if no combination of features gives a wanted character.
    """
    end = block.ends[receiver]
    numbers = [j for j in range(len(block.ends)) if j != receiver]
    choices = [(at_end(blank(character), block.ends[j]), *sorted(known[block.ends[j].units])) for j in numbers]
    for chosen in product(*choices):
        total = multiply(character, ((block.ends[j], one) for j, one in zip(numbers, chosen, strict=True)))
        heard = at_end(total, end)
        is_settled = not any(any(exponents) for axis, exponents in enumerate(total) if axis not in end.axes)
        if is_settled and (heard in wanted[end.units] or not is_odd(heard)):
            return heard, tuple(zip(numbers, chosen, strict=True))
    return None
