"""Which combinations of a group's families are settled, over the rationals or modulo two."""

from collections.abc import Iterable, Sequence
from fractions import Fraction

Vector = tuple[Fraction, ...]


class Span:
    """Exponent vectors that are settled, and the directions that move none of them.

    Args:
        families: Length of the vectors.
        is_binary: Whether they are counted modulo two, as exponents of signs are.
    """

    def __init__(self, families: int, *, is_binary: bool = False) -> None:
        self._is_binary = is_binary
        self._free = [tuple(Fraction(int(k == f)) for k in range(families)) for f in range(families)]
        self._known: dict[tuple[int, ...], bool] = {}

    @property
    def is_everything(self) -> bool:
        """Whether nothing is free."""
        return not self._free

    def contains(self, vector: Sequence[int]) -> bool:
        """Whether no free direction moves the vector."""
        key = tuple(vector)
        if key not in self._known:
            self._known[key] = not any(self._dot(vector, free) for free in self._free)
        return self._known[key]

    def is_same(self, left: Sequence[int], right: Sequence[int]) -> bool:
        """Whether every free direction moves both vectors alike."""
        return self.contains([a - b for a, b in zip(left, right, strict=True)])

    def settle(self, vector: Sequence[int]) -> Vector:
        """Extend the span by `vector`; return the dual vector (1 on `vector`, 0 on all earlier ones)."""
        chosen = next(free for free in self._free if self._dot(vector, free))
        length = self._dot(vector, chosen)
        direction = self._reduce(x / length for x in chosen)
        others = [free for free in self._free if free is not chosen]
        self._known.clear()
        self._free = [
            self._reduce(x - self._dot(vector, free) * y for x, y in zip(free, direction, strict=True))
            for free in others
        ]
        return direction

    def _dot(self, left: Sequence[int], right: Vector) -> Fraction:
        total = sum((x * y for x, y in zip(left, right, strict=True)), Fraction())
        return total % 2 if self._is_binary else total

    def _reduce(self, values: Iterable[Fraction]) -> Vector:
        return tuple(x % 2 if self._is_binary else x for x in values)
