"""What may act on one atom: an order of its units, families of scales, signs and shifts, matrices, turns of pairs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from regauge.core.groups import Placement
from regauge.discovery.layout import Atom
from regauge.discovery.systems import Vector

Family = tuple[Vector, frozenset[Atom]]
"""Exponents at slots of a positive scale or (modulo two) of a sign, and the bases of the family."""


@dataclass(frozen=True)
class PairedAxis:
    """Where the units of an atom have two coordinates each, `distance` indices apart, on one axis of one tensor.

    The two slots are those of the first and of the second coordinate; they are one where the pair is a piece of the
    axis. The other leaves of the block are given by sizes and strides.
    """

    slots: tuple[int, int]
    name: str
    axis: int
    start: int
    stride: int
    distance: int
    others: tuple[tuple[int, int], ...]

    @property
    def pairs(self) -> Placement:
        """Where the units act."""
        return self._placement(self.stride, (2, self.distance), *self.others)

    def turn(self, size: int) -> Placement:
        """Where the rotations of the two coordinates act."""
        return self._placement(self.distance, (size, self.stride), *self.others)

    def _placement(self, stride: int, *repeats: tuple[int, int]) -> Placement:
        return Placement(self.name, self.axis, self.start, stride, repeats)


@dataclass(frozen=True)
class Turns:
    """Rotations of the pairs of coordinates that the units of an atom have.

    Attributes:
        axes: Where.
        bases: Atoms on which the angles may depend, besides the unit.
        scales: Families of scales of these pairs, and of no other parameters.
        unread: Intermediate values that turn in a way that no pair says: one coordinate without the other.
    """

    axes: tuple[PairedAxis, ...]
    bases: frozenset[Atom]
    scales: tuple[Family, ...]
    unread: frozenset[str]


@dataclass(frozen=True)
class ShiftFamily:
    """A half-period shift: what is added at which slots, and where an odd number of steps flips the sign."""

    amounts: Mapping[int, float]
    parity: Vector


@dataclass(frozen=True)
class MatrixPart:
    """A matrix that acts on some slots, by +1 as it is and by -1 as its inverse transpose."""

    kind: Literal["orthogonal", "linear"]
    slots: Mapping[int, int]
    bases: frozenset[Atom]
    watched: Mapping[int, int] = field(default_factory=dict)
    keeps_ones: bool = False


@dataclass
class Freedom:
    """Everything that may act on one atom.

    Families name the slots of parameters and of watched values alike; which of them exist is decided on the
    parameters alone.

    Attributes:
        atom: The axis piece.
        slots: Its occurrences in parameters.
        watched: Its occurrences in intermediate values that were asked for.
        is_permuted: Whether its units can be reordered.
        bases: Atoms on which the order (or, where there is none, a family) may depend.
        scales: Families of positive scales.
        signs: Families of signs.
        shifts: Families of half-period shifts.
        matrices: Matrices on some of the slots; the rest above does not act there.
        turns: Rotations of pairs of coordinates, where the units are such pairs.
    """

    atom: Atom
    slots: list[int]
    watched: list[int] = field(default_factory=list)
    is_permuted: bool = False
    bases: frozenset[Atom] = frozenset()
    scales: list[Family] = field(default_factory=list)
    signs: list[Family] = field(default_factory=list)
    shifts: list[ShiftFamily] = field(default_factory=list)
    matrices: list[MatrixPart] = field(default_factory=list)
    turns: list[Turns] = field(default_factory=list)
