"""Planes: units that are pairs of coordinates, which a rotation turns."""

from dataclasses import dataclass

from regauge.core.groups import Placement
from regauge.discovery.layout import Atom
from regauge.discovery.systems import Vector

ScaleFamily = tuple[Vector, frozenset[Atom]]
"""Exponents at slots, and the bases of the family."""


@dataclass(frozen=True)
class Plane:
    """Where the units of an atom have two coordinates each, on one axis of one tensor.

    Attributes:
        slots: Those of the first and of the second coordinate; the same one where the pair is a piece of the axis.
        name: The tensor.
        axis: Its axis.
        start: First index.
        stride: Distance between units.
        distance: Between the two coordinates of a unit.
        others: Sizes and strides of the other leaves of the block.
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
class Planes:
    """Rotations of the pairs of coordinates that the units of an atom have.

    Attributes:
        planes: Where.
        bases: Atoms on which the angles may depend, besides the unit.
        scales: Families of scales of these pairs, and of no other parameters.
        unread: Intermediate values that turn in a way that no plane says: one coordinate without the other.
    """

    planes: tuple[Plane, ...]
    bases: frozenset[Atom]
    scales: tuple[ScaleFamily, ...]
    unread: frozenset[str]
