"""The transformations that may act on the units of one axis factor (atom), called the freedom of the atom."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Literal

from regauge.core.groups import Placement
from regauge.discovery.layout import Atom
from regauge.discovery.slots import SlotPlace
from regauge.discovery.systems import Vector, independent, select

Family = tuple[Vector, frozenset[Atom]]
"""The exponents of a scale (or of a sign, modulo two) for each slot, and the bases: the atoms, such as heads, on whose
index the factor may depend. A slot is one occurrence of an atom on an axis.
"""


@dataclass(frozen=True)
class PairedAxis:
    """An axis with one pair of coordinates for each unit of an atom. The indices of the two coordinates differ by
    `distance`.

    The two slots belong to the first and the second coordinate of each pair. If the coordinates of each pair differ
    only in the index of another axis factor, the two slots are identical. The field `others` contains the sizes and
    strides of all other factors of the axis.
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
        """The placement of a group in which each unit consists of the two coordinates of one pair."""
        return self._placement(self.stride, (2, self.distance), *self.others)

    def turn(self, size: int) -> Placement:
        """Return the placement of the rotations, which mix the two coordinates of each unit's pair."""
        return self._placement(self.distance, (size, self.stride), *self.others)

    def _placement(self, stride: int, *repeats: tuple[int, int]) -> Placement:
        return Placement(self.name, self.axis, self.start, stride, repeats)


@dataclass(frozen=True)
class Turns:
    """Rotations of pairs of coordinates. Each unit has one pair on every axis in `axes`.

    Attributes:
        axes: The axes that contain the pairs of coordinates.
        bases: Other atoms (axis factors), such as heads, on whose index the rotation angle may also depend.
        scales: Families of scales that act only on the pairs of coordinates in `axes`.
        unread: The names of intermediate values that contain only one coordinate of a pair. No placement describes how
            rotations act on values with only one coordinate of a pair.
    """

    axes: tuple[PairedAxis, ...]
    bases: frozenset[Atom]
    scales: tuple[Family, ...]
    unread: frozenset[str]


@dataclass(frozen=True)
class ShiftFamily:
    """A family of shifts by half periods, which change the arguments of functions such as sin.

    For each axis (slot) of a parameter, the field `amounts` contains the number that one step adds to the parameter.
    The field `parity` contains the slots at which an odd number of steps flips the sign.
    """

    amounts: Mapping[int, float]
    parity: Vector


@dataclass(frozen=True)
class MatrixPart:
    """A matrix that acts on axes of parameters (slots).

    The matrix itself acts on slots marked +1, and its inverse transpose acts on slots marked -1.
    """

    kind: Literal["orthogonal", "linear"]
    slots: Mapping[int, int]
    bases: frozenset[Atom]
    watched: Mapping[int, int] = field(default_factory=dict)
    keeps_ones: bool = False


@dataclass
class Freedom:
    """All transformations that may act on the units of one axis factor (atom).

    Each family of scales, signs or shifts lists the slots on which it acts, both in parameters and in watched
    intermediate values. Watched values do not affect which families exist.

    Attributes:
        atom: The atom on which the transformations act.
        slots: The slots of the atom: its occurrences on axes of parameters.
        watched: The slots of the atom in the intermediate values for which the caller requested placements.
        is_permuted: Whether the units of the atom can be permuted.
        bases: Other atoms, such as heads, on whose index the permutation may depend. If there is no permutation, a
            scale or sign may depend on the index of the bases.
        scales: The families of positive scales.
        signs: The families of signs.
        shifts: The families of half-period shifts.
        matrices: Matrices that act on some of the slots. No permutation and no family acts on slots with matrices.
        turns: Rotations of pairs of coordinates, if the units of the atom have pairs of coordinates.
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


KINDS: tuple[tuple[Callable[[Freedom], list[Family]], int], ...] = ((attrgetter("scales"), 0), (attrgetter("signs"), 2))
"""The two kinds of families, each with the modulus of its exponents: 0 for scales, whose exponents are rational, and 2
for signs."""


def make_acyclic(freedoms: list[Freedom]) -> None:
    """Remove bases that cannot be represented. A base is an axis factor (atom), such as heads, within whose units other
    atoms are repeated.

    A base of an atom is removed if it is not in `freedoms`, or if matrices act on it.

    If two atoms are bases of each other, only the first atom remains a base of the second.
    """
    order = {freedom.atom: k for k, freedom in enumerate(freedoms)}
    by_atom = {freedom.atom: freedom for freedom in freedoms}
    wanted = {freedom.atom: _all_bases(freedom) for freedom in freedoms}

    def allowed(atom: Atom, base: Atom) -> bool:
        if base not in order or by_atom[base].matrices:
            return False
        return atom not in wanted[base] or order[base] < order[atom]

    for freedom in freedoms:
        good = frozenset(base for base in wanted[freedom.atom] if allowed(freedom.atom, base))
        _restrict(freedom, good.intersection)
    changed = True
    while changed:
        changed = False
        for freedom in freedoms:
            # If a base has bases of its own, these must be bases too.
            before = _all_bases(freedom)
            _restrict(freedom, lambda bases: frozenset(b for b in bases if by_atom[b].bases <= bases))
            changed |= before != _all_bases(freedom)


def _all_bases(freedom: Freedom) -> frozenset[Atom]:
    families = [bases for _, bases in (*freedom.scales, *freedom.signs)]
    return freedom.bases.union(*families, *(part.bases for part in freedom.matrices))


def _restrict(freedom: Freedom, keep: Callable[[frozenset[Atom]], frozenset[Atom]]) -> None:
    freedom.bases = keep(freedom.bases)
    for families in (freedom.scales, freedom.signs):
        families[:] = [(family, keep(bases)) for family, bases in families]
    freedom.matrices = [replace(part, bases=keep(part.bases)) for part in freedom.matrices]


def drop_redundant(freedoms: list[Freedom], places: Mapping[int, SlotPlace]) -> None:
    """Drop scales and signs of a unit, such as a head, that are special cases of transformations inside this unit.

    For example, the matrices of heads include multiples of the identity, and therefore all factors of heads.
    """
    by_atom = {freedom.atom: freedom for freedom in freedoms}
    for families_of, modulus in KINDS:
        known: dict[Atom, list[Vector]] = defaultdict(list)
        for freedom in freedoms:
            # Invertible matrices contain all multiples of the identity; orthogonal ones contain minus the identity.
            matrices = [(part.slots, part.bases) for part in freedom.matrices if part.kind == "linear" or modulus]
            for family, bases in (*matrices, *families_of(freedom)):
                for base in bases:
                    known[base].append(_lift(family, by_atom[base], places))
        for freedom in freedoms:
            families, own = families_of(freedom), frozenset(freedom.slots)
            kept = independent([select(family, own) for family, _ in families], known[freedom.atom], modulus)
            families[:] = [families[k] for k in kept]


def drop_uniform(freedoms: list[Freedom], places: Mapping[int, SlotPlace]) -> None:
    """Drop the factor of an axis of size one, if a larger axis can multiply the same parameters by a common factor.

    The common factor of all units of the larger axis must have the same effect as the dropped factor.
    """

    def whole(exponents: Vector) -> Vector | None:
        result: Vector = {}
        for slot, exponent in exponents.items():
            if slot not in places:
                continue
            if not places[slot].is_whole:
                return None
            key = names.setdefault(places[slot].name, len(names))
            result[key] = result.get(key, 0) + exponent
        return result

    names: dict[str, int] = {}
    for families_of, modulus in KINDS:
        large = [family for freedom in freedoms if freedom.atom.size > 1 for family, _ in families_of(freedom)]
        known = [vector for family in large if (vector := whole(family)) is not None]
        for freedom in freedoms:
            families, kept = families_of(freedom), []
            for family, bases in families if freedom.atom.size == 1 else ():
                vector = whole(family)
                if vector is None or independent([vector], known, modulus):
                    kept.append((family, bases))
                    known += [vector] if vector else []
            if freedom.atom.size == 1:
                families[:] = kept


def _lift(exponents: Mapping[int, int], base: Freedom, places: Mapping[int, SlotPlace]) -> Vector:
    """Return exponents for a factor of a whole unit, such as a head.

    The factor of the whole unit has the same effect as equal factors, with the given exponents, for everything inside
    this unit.
    """
    result: Vector = {}
    for slot, exponent in select(exponents, places).items():
        inner = places[slot]
        for other in base.slots:
            outer = places[other]
            if outer.name == inner.name and (outer.axis != inner.axis or outer.term == inner.term):
                result[other] = exponent
    return result
