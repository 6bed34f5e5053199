"""Integer vectors that solve linear equations, in exact arithmetic."""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm


def null_space(rows: Sequence[Sequence[int]], count: int, *, modulus: int | None = None) -> list[tuple[int, ...]]:
    """Integer vectors that span the null space of the rows; of their remainders, if there is a modulus, a prime.

    Each vector has an entry at which all others are zero.
    """

    # Rational arithmetic: a rounded null vector would move what it should keep.
    def wrap(values: Sequence[Fraction]) -> list[Fraction]:
        return list(values) if modulus is None else [Fraction(int(x) % modulus) for x in values]

    def divide(values: Sequence[Fraction], lead: Fraction) -> list[Fraction]:
        if modulus is None:
            return [x / lead for x in values]
        return wrap([x * pow(int(lead), -1, modulus) for x in values])

    reduced: list[tuple[int, list[Fraction]]] = []  # Rows with a leading one, each alone in its column.
    for row in rows:
        rest = wrap([Fraction(x) for x in row])
        for pivot, other in reduced:
            rest = wrap([x - rest[pivot] * y for x, y in zip(rest, other, strict=True)])
        if not any(rest):
            continue
        lead = next(k for k, x in enumerate(rest) if x)
        rest = divide(rest, rest[lead])
        reduced = [
            (pivot, wrap([y - other[lead] * x for x, y in zip(rest, other, strict=True)])) for pivot, other in reduced
        ]
        reduced.append((lead, rest))
    result = []
    for free in sorted(set(range(count)) - {pivot for pivot, _ in reduced}):
        vector = [Fraction(int(k == free)) for k in range(count)]
        for pivot, other in reduced:
            vector[pivot] = -other[free]
        vector = wrap(vector)
        scale = lcm(*(x.denominator for x in vector))
        result.append(tuple(int(x * scale) for x in vector))
    return result
