"""Expansion of the constraints of operators (laws) into ties between slots. A slot is a single occurrence of an axis
factor.

An atom is a factor of an axis that also occurs in a parameter. An axis consists of one or several blocks, and each
block is a product of indivisible atoms (leaves). A slot is one occurrence of an atom: in one block, on one axis of one
tensor. A law constrains the transformations of several axes. A tie is a law, restricted to one slot on each axis of the
law. All slots of a tie are at the same position within corresponding blocks.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from regauge.core.groups import Placement
from regauge.discovery.laws import Axis, Law, Record, Value
from regauge.discovery.layout import Atom, Layout, Term, expand, leaves, terms


@dataclass(frozen=True, slots=True)
class Tie:
    """A law of an operator, restricted to one slot on each axis of the law. All slots of the tie are at the same
    position within corresponding blocks.

    The companions of a slot are other axis factors (atoms). Like the slot, each companion has exactly one index at each
    entry of the tensor. For example, heads are companions of the units within heads. A transformation of the slot may
    depend on the index of a companion. For example, the scales of units may differ between heads. Each companion is
    stored with the number of an operator index, because several operator indices may use one atom. For example, the
    rows and columns of `x @ x.T` have the same atom, but different operator indices.
    """

    law: Law
    slots: tuple[int, ...]
    companions: tuple[frozenset["Companion"], ...]

    def around(self, touched: Container[int]) -> "frozenset[Companion] | None":
        """Return the companions that all given slots of this tie have in common, or None if the tie contains no given
        slot.
        """
        found: frozenset[Companion] | None = None
        for slot, around in zip(self.slots, self.companions, strict=True):
            if slot in touched:
                found = around if found is None or found is around else found & around
        return found


Companion = tuple[Atom, int]
OWN = -1
"""The number of a companion that belongs to the same operator index as the law.

Numbers from zero on are positions of other laws in the record. Numbers below -1 belong to virtual axes, of which
tensors contain only selected indices.
"""


@dataclass
class Slots:
    """All slots (single occurrences of axis factors on axes), and for each factor (atom) the laws that tie its slots.

    Attributes:
        blocked: The slots on which only permutations may act.
        places: The places of the slots in parameters.
        watched: The places of the slots in the intermediate values for which the caller requested placements.
        unread: Names of watched intermediate values that the laws of operators do not fully describe.
        atoms: The atom of each slot.
        blocks: The blocks of each axis of all tensors.
    """

    ties: dict[Atom, list[Tie]] = field(default_factory=lambda: defaultdict(list))
    blocked: set[int] = field(default_factory=set)
    places: dict[int, "SlotPlace"] = field(default_factory=dict)
    watched: dict[int, "SlotPlace"] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    atoms: list[Atom] = field(default_factory=list)
    blocks: dict[tuple[Value, int], list["SlotBlock"]] = field(default_factory=dict)


@dataclass(frozen=True)
class SlotPlace:
    """The position of a slot: one axis of a parameter, and the index `term` of the block that contains the slot. A
    block is a part of the axis that is a product of indivisible factors (leaves).

    Attributes:
        others: The sizes and strides of the indivisible factors of the block, except the slot's own factor.
        mates: The indivisible factors of the block except the slot's own factor, as atoms.
        beside: Other atoms that also have exactly one index at each entry of the slot.
        is_whole: Whether the block covers the whole axis.
        numel_elsewhere: The number of entries of the parameter at each index of the axis.
    """

    name: str
    axis: int
    term: int
    start: int
    stride: int
    others: tuple[tuple[int, int], ...]
    mates: tuple[Atom, ...]
    beside: frozenset[Atom]
    is_whole: bool
    numel_elsewhere: int

    def placement(self, **how: Any) -> Placement:
        """Return the placement of a group that acts on the units of this slot. The arguments `how` describe the action,
        such as exponents.
        """
        return Placement(self.name, self.axis, self.start, self.stride or 1, self.others, **how)


SlotBlock = tuple[int, tuple[Atom, ...], tuple[tuple[Atom, int], ...]]
"""A block of an axis: its first index, its indivisible factors (leaves) with more than one unit, and all its leaves
with their slots.

If an atom occurs in no parameter, its slot is -1.
"""


def write_out(
    records: Iterable[Record], params: Mapping[str, Value], watched: Mapping[str, Value] | None = None
) -> Slots:
    """Expand the laws of all operators into ties between single slots (occurrences of atoms on axes). All axes must be
    final, that is, no later operator splits them further.

    Watched intermediate values get slots too, but the slots of watched values do not affect the ties.
    """
    return _Writer(params, watched or {}).run(records)


class _Writer:
    def __init__(self, params: Mapping[str, Value], watched: Mapping[str, Value]) -> None:
        self.slots = Slots()
        self.blocks = self.slots.blocks
        self.terms: dict[tuple[Atom, ...], list[tuple[Term, tuple[Atom, ...]]]] = {}
        self.repeated: dict[Value, frozenset[Atom]] = {}
        self.params, self.watched = params, watched
        self.interesting = {atom for value in params.values() for layout in value.layouts for atom in leaves(layout)}

    def run(self, records: Iterable[Record]) -> Slots:
        for record in records:
            self._record(record)
        read = {slot for ties in self.slots.ties.values() for tie in ties for slot in tie.slots} | self.slots.blocked
        for name, value in self.params.items():
            self.slots.places |= self._places(name, value, read)
        for name, value in self.watched.items():
            self.slots.watched |= self._places(name, value, read)
            if not self._is_read(value, read):
                self.slots.unread.add(name)
        return self.slots

    def _axis(self, value: Value, dim: int) -> list[SlotBlock]:
        key = (value, dim)
        if key not in self.blocks:
            self.blocks[key] = [
                (start, large, tuple([(atom, self._slot(atom)) for atom, _ in factors]))
                for (start, factors), large in self._terms(value.layouts[dim])
            ]
        return self.blocks[key]

    def _terms(self, layout: Layout) -> list[tuple[Term, tuple[Atom, ...]]]:
        """Return the blocks of an axis, each with its indivisible factors that have more than one unit.

        Axes that are tied together share their blocks.
        """
        key = tuple(expand(layout))
        if key not in self.terms:
            self.terms[key] = [(term, tuple(a for a, _ in term[1] if a.size > 1)) for term in terms(key)]
        return self.terms[key]

    def _slot(self, atom: Atom) -> int:
        if atom not in self.interesting:
            return -1
        self.slots.atoms.append(atom)
        return len(self.slots.atoms) - 1

    def _axes(self, axis: Axis) -> list[SlotBlock]:
        """Return the blocks of an axis. If the axis is a range, it begins and ends at block boundaries."""
        if len(axis.dims) == 1:
            blocks = self._axis(axis.value, axis.dims[0])
            if axis.length is None:
                return blocks
            inside = [b for b in blocks if axis.start <= b[0] < axis.start + axis.length]
            return [(start - axis.start, *rest) for start, *rest in inside or blocks]  # type: ignore[misc]
        axes = [self._axis(axis.value, dim) for dim in axis.dims]
        sizes = [axis.value.shape[dim] for dim in axis.dims]
        result: list[SlotBlock] = []
        for chosen in product(*axes):
            start = 0
            for (first, _, _), size in zip(chosen, sizes, strict=True):
                start = start * size + first
            large = tuple(atom for _, atoms, _ in chosen for atom in atoms)
            result.append((start, large, tuple(place for _, _, places in chosen for place in places)))
        return sorted(result, key=lambda block: block[0])

    def _record(self, record: Record) -> None:
        record = [law for law in record if any(axis.dims for axis in law.axes)]
        expanded = [[self._axes(axis) for axis in law.axes] for law in record]
        matched = [_aligned(blocks) for blocks in expanded]
        reach = [frozenset(axis.value for axis in law.axes) for law in record]
        everywhere = [
            _in_every_block(blocks) if ok and not (law.is_mixing or law.is_shared or law.is_virtual) else frozenset()
            for law, blocks, ok in zip(record, expanded, matched, strict=True)
        ]
        chosen = _virtual_axes(record)
        for k, law in enumerate(record):
            if not matched[k]:
                for blocks in expanded[k]:
                    self._block(place for block in blocks for place in block[2])
                continue
            if not any(slot >= 0 for blocks in expanded[k] for block in blocks for _, slot in block[2]):
                continue
            outside = {}
            for value in reach[k]:
                found = [(a, j) for j, row in enumerate(everywhere) if j != k and value in reach[j] for a in row]
                found += [(a, OWN - 1 - j) for j, (row, held) in enumerate(chosen) if value in held for a in row]
                once = _once([atom for atom, _ in found]) - self._repeated(value)
                outside[value] = frozenset(companion for companion in found if companion[0] in once)
            self._law(law, expanded[k], outside)

    def _law(self, law: Law, expanded: list[list[SlotBlock]], outside: Mapping[Value, frozenset[Companion]]) -> None:
        """Apply a law to all of its axes: tie the factors of these axes to each other, block by block.

        The argument `outside` holds companions from other laws, by tensor.
        """
        beside = tuple(frozenset[Companion]() if law.is_shared else outside[axis.value] for axis in law.axes)
        others = {atom for companions in beside for atom, _ in companions}
        taken = {value: {a for a, _ in companions} | self._repeated(value) for value, companions in outside.items()}
        for row in zip(*expanded, strict=True):
            inside = row[0][1]
            has_units = any(len(large) < len(places) for _, large, places in row)
            is_alone = len(inside) == 1 and inside[0] not in others
            around = _around(law, inside, outside, taken) if has_units or not is_alone else ()
            columns = [[slot for atom, slot in places if atom.size > 1] for _, _, places in row]
            for atom, *slots in zip(inside, *columns, strict=True):
                here = beside
                if not (law.is_shared or is_alone):
                    here = tuple(companions - {(atom, OWN)} for companions in around)
                self._tie(law, atom, slots, here)
            if has_units:
                self._units(law, row, around)

    def _tie(self, law: Law, atom: Atom, slots: Iterable[int], companions: tuple[frozenset[Companion], ...]) -> None:
        tie = Tie(law, tuple(slots), companions)
        if tie.slots[0] >= 0:
            self.slots.ties[atom].append(tie)

    def _units(self, law: Law, row: Sequence[SlotBlock], companions: tuple[frozenset[Companion], ...]) -> None:
        """Apply a law to the factors of size one, in one block of each axis of the law. If the axes have different
        factors of size one, allow only permutations for all factors of size one.
        """
        units = [[place for place in places if place[0].size == 1] for _, _, places in row]
        columns = list(zip(*units, strict=False))
        if len(set(map(len, units))) == 1 and all(len({atom for atom, _ in c}) == 1 for c in columns):
            for column in columns:
                self._tie(law, column[0][0], [slot for _, slot in column], companions)
        else:
            self._block(place for u in units for place in u)

    def _repeated(self, value: Value) -> frozenset[Atom]:
        """Return the atoms (factors of axes) that occur in more than one axis of a tensor."""
        if value not in self.repeated:
            axes = [self._axis(value, dim) for dim in range(value.ndim)]
            counts = Counter(a for blocks in axes for a in {a for _, _, places in blocks for a, _ in places})
            self.repeated[value] = frozenset(atom for atom, count in counts.items() if count > 1)
        return self.repeated[value]

    def _block(self, places: Iterable[tuple[Atom, int]]) -> None:
        self.slots.blocked.update(slot for _, slot in places if slot >= 0)

    def _is_read(self, value: Value, read: set[int]) -> bool:
        """Return whether a law describes every factor of a tensor's axes that also occurs in a parameter."""
        found = [slot for dim in range(value.ndim) for _, _, places in self._axis(value, dim) for _, slot in places]
        return all(slot in read for slot in found if slot >= 0)

    def _places(self, name: str, value: Value, read: set[int]) -> dict[int, SlotPlace]:
        """Return where the slots (occurrences of atoms on axes) of a tensor lie. If no operator reads the tensor,
        return no slots.
        """
        result: dict[int, SlotPlace] = {}
        if not any((value, dim) in self.blocks for dim in range(value.ndim)):
            return result  # No operator reads it.
        whole = [_in_every_block([self._axis(value, dim)]) for dim in range(value.ndim)]
        for dim in range(value.ndim):
            elsewhere = [atom for k, atoms in enumerate(whole) if k != dim for atom in atoms]
            blocks = self._terms(value.layouts[dim])
            for t, ((start, factors), _) in enumerate(blocks):
                for j, (_, stride) in enumerate(factors):
                    slot = self._axis(value, dim)[t][2][j][1]
                    if slot not in read:
                        continue
                    rest = [factor for i, factor in enumerate(factors) if i != j and factor[0].size > 1]
                    mates = tuple(atom for atom, _ in rest)
                    result[slot] = SlotPlace(
                        name=name,
                        axis=dim,
                        term=t,
                        start=start,
                        stride=stride,
                        others=tuple((atom.size, distance) for atom, distance in rest),
                        mates=mates,
                        beside=_once([*mates, *elsewhere]) - self._repeated(value),
                        is_whole=len(blocks) == 1,
                        numel_elsewhere=math.prod(value.shape[:dim] + value.shape[dim + 1 :]),
                    )
        return result


def _around(
    law: Law,
    inside: Sequence[Atom],
    outside: Mapping[Value, frozenset[Companion]],
    taken: Mapping[Value, Container[Atom]],
) -> tuple[frozenset[Companion], ...]:
    """Return the companions of a slot in one block, for each axis of a law.

    The companions are the other indivisible factors of the block, and the atoms in `outside`.
    """
    mates = [] if law.is_mixing else [atom for atom in inside if inside.count(atom) == 1]
    found = {
        value: frozenset([c for c in beside if c[0] not in inside] + [(a, OWN) for a in mates if a not in taken[value]])
        for value, beside in outside.items()
    }
    return tuple(found[axis.value] for axis in law.axes)


def _aligned(expanded: list[list[SlotBlock]]) -> bool:
    """Return whether all axes of one law consist of the same blocks, with the same indivisible factors."""
    shapes = [[(start, large) for start, large, _ in blocks] for blocks in expanded]
    return all(shape == shapes[0] for shape in shapes)


def _in_every_block(expanded: list[list[SlotBlock]]) -> frozenset[Atom]:
    blocks = [large for _, large, _ in expanded[0]]
    return frozenset.intersection(*map(_once, blocks)) if blocks else frozenset()


def _once(atoms: Sequence[Atom]) -> frozenset[Atom]:
    """Return the axis factors (atoms) that occur exactly once in a list.

    If an atom occurred twice, it would be unclear on which of the two indices a transformation depends.
    """
    return frozenset(atom for atom in atoms if atoms.count(atom) == 1)


def _virtual_axes(record: Record) -> list[tuple[frozenset[Atom], set[Value]]]:
    """Return the virtual axes of the tensors in a record: the axes of which a tensor contains only selected indices.

    Each virtual axis comes with the tensors that depend on the selection.
    """
    found: dict[tuple[int, int], tuple[frozenset[Atom], set[Value]]] = {}
    direct: dict[Atom, set[Value]] = defaultdict(set)
    for k, law in enumerate(record):
        for axis in law.axes:
            if law.is_virtual:
                for atom in leaves(axis.value.layouts[axis.dims[0]]):
                    direct[atom].add(axis.value)
            virtual = axis.value.virtual
            if virtual is not None and axis.dims == (virtual.dim,) and not law.is_mixing:
                # Two axes that select indices are two selections, even if one index tensor makes both.
                found.setdefault((id(virtual.source), k), (frozenset(leaves(virtual.layout)), set()))[1].add(axis.value)
    return [(atoms, values.union(*(direct[atom] for atom in atoms))) for atoms, values in found.values()]
