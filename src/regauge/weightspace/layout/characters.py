"""What signs multiply values and features by: one exponent for each axis and family, zero or one.

Odd half periods of sines are signs of other values, and count as families of their own where they still act.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from regauge.weightspace.layout.blocks import Block, End, Label

Character = tuple[tuple[int, ...], ...]
"""For each axis the exponents of the sign families of its group, and of the shifts that still act, modulo two."""


def character_of(block: Block, *, has_shifts: bool) -> Character:
    """What signs, and odd half periods if these still act, multiply the values of a block by."""
    return character_of_labels(block.labels, has_shifts=has_shifts)


def character_of_labels(labels: Iterable[Label], *, has_shifts: bool) -> Character:
    """What they multiply values along some axes by."""
    return tuple(
        tuple(exponent % 2 for exponent in (*label.sign, *(label.parity if has_shifts else ()))) for label in labels
    )


def is_odd(character: Character) -> bool:
    """Whether some sign changes values of this character."""
    return any(any(exponents) for exponents in character)


def at_end(character: Character, end: End) -> Character:
    """What of it belongs to the units at one end."""
    return tuple(character[axis] for axis in end.axes)


def multiply(character: Character, factors: Iterable[tuple[End, Character]]) -> Character:
    """What signs multiply the product of features of a block with features of units at some of its ends by."""
    total = [list(exponents) for exponents in character]
    for end, factor in factors:
        for axis, exponents in zip(end.axes, factor, strict=True):
            total[axis] = [(x + y) % 2 for x, y in zip(total[axis], exponents, strict=True)]
    return tuple(tuple(exponents) for exponents in total)


def find_sources(
    block: Block, character: Character, receiver: int, known: Mapping[str, Sequence[Character]]
) -> tuple[Character, tuple[tuple[int, Character], ...]] | None:
    """The features of the other ends for which sums over them mean something, times features of a block.

    A sum over units means something only if their signs do not change its terms.

    Args:
        block: With two ends or more.
        character: Of its features: its own, or an even one.
        receiver: Number of the end whose units hear the sums.
        known: For each set of units the characters of their features that signs change.

    Returns:
        The character of the sums at the receiver, and the other ends with the characters of their features; None if no
        features fit.
    """
    end = block.ends[receiver]
    numbers = [j for j in range(len(block.ends)) if j != receiver]
    blank = tuple((0,) * len(exponents) for exponents in character)
    choices = [(at_end(blank, block.ends[j]), *known[block.ends[j].units]) for j in numbers]
    for chosen in product(*choices):
        total = multiply(character, ((block.ends[j], one) for j, one in zip(numbers, chosen, strict=True)))
        heard = at_end(total, end)
        is_settled = not any(any(exponents) for axis, exponents in enumerate(total) if axis not in end.axes)
        if is_settled and (heard in known[end.units] or not is_odd(heard)):
            return heard, tuple(zip(numbers, chosen, strict=True))
    return None
