"""Conversion of the possible transformations of axes to named groups with placements, and the list of frozen axes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from regauge.core.groups import Frozen, Group, Placement
from regauge.discovery.freedom import Freedom
from regauge.discovery.laws import Value
from regauge.discovery.layout import Atom, leaves
from regauge.discovery.slots import SlotPlace, Slots
from regauge.discovery.systems import Vector


def groups_of(freedoms: Sequence[Freedom], slots: Slots, aliases: Mapping[str, tuple[str, ...]]) -> tuple[Group, ...]:
    """Return the groups in the order of their first parameters.

    A group, such as heads, comes before the groups that are repeated within its units.

    If intermediate values are watched, the groups also have placements on watched values.
    """
    return _Emitter(freedoms, {**slots.places, **slots.watched}, aliases).run()


def unplaced(freedoms: Sequence[Freedom], slots: Slots) -> set[str]:
    """Return the names of watched values on which a group acts in a way that no placement can describe.

    For example, a value may lack an axis for the units within which the group is repeated.
    """
    refused = set(slots.unread)
    for freedom in freedoms:
        refused |= frozenset().union(*(part.unread for part in freedom.turns))
        bases = [freedom.bases, *(bases for _, bases in (*freedom.scales, *freedom.signs))]
        covered = {slot: part.bases for part in freedom.matrices for slot in part.watched}
        for slot in freedom.watched:
            place = slots.watched[slot]
            needed = [covered[slot]] if slot in covered else bases
            if not all(some <= place.beside for some in needed):
                refused.add(place.name)
    return refused


def frozen_axes(params: Mapping[str, Value], groups: Sequence[Group]) -> tuple[Frozen, ...]:
    """Return every axis of every used parameter that no group permutes or rotates, and the reason."""
    moved = {(p.parameter, p.axis) for g in groups for p in g.placements if g.is_permuted or g.matrix != "none"}
    result = []
    for name, value in params.items():
        for dim, layout in enumerate(value.layouts):
            if (name, dim) not in moved and value.shape[dim] > 1:
                reasons = [atom.frozen for atom in leaves(layout) if atom.frozen is not None]
                result.append(Frozen(name, dim, value.shape[dim], reasons[0] if reasons else "single unit"))
    return tuple(result)


class _Emitter:
    def __init__(
        self, freedoms: Sequence[Freedom], places: Mapping[int, SlotPlace], aliases: Mapping[str, tuple[str, ...]]
    ) -> None:
        self.freedoms = freedoms
        self.places = places
        self.aliases = aliases
        self.order = {freedom.atom: k for k, freedom in enumerate(freedoms)}
        self.used = needed_bases(freedoms)
        self.names: dict[Atom, str] = {}
        self.taken: dict[str, int] = defaultdict(int)

    def run(self) -> tuple[Group, ...]:
        for freedom in self.freedoms:
            if freedom.atom in self.used or self._has_main(freedom):
                self.names[freedom.atom] = self._name(freedom, freedom.slots)
        kinds = (self._main, self._matrices, self._turns)
        return tuple(group for freedom in self.freedoms for kind in kinds for group in kind(freedom))

    def _has_main(self, freedom: Freedom) -> bool:
        return _can_permute(freedom) or bool(freedom.scales or freedom.signs or freedom.shifts)

    def _main(self, freedom: Freedom) -> list[Group]:
        """Return the groups for the permutation, and for the families of scales, signs and shifts.

        Families of scales and signs that depend on the units of more groups than the permutation become separate
        groups.
        """
        is_base = freedom.atom in self.used
        if not is_base and not self._has_main(freedom):
            return []
        has_order = freedom.is_permuted or is_base or bool(freedom.shifts)
        rows: dict[frozenset[Atom], tuple[list[Vector], list[Vector]]] = {freedom.bases: ([], [])} if has_order else {}
        pairs: dict[frozenset[Atom], tuple[list[Vector], list[Vector]]] = {}
        for kind, families in enumerate((freedom.scales, freedom.signs)):
            for family, bases in families:
                if has_order and bases - freedom.bases:
                    pairs.setdefault(bases, ([], []))[kind].append(family)
                else:
                    rows.setdefault(freedom.bases if has_order else bases, ([], []))[kind].append(family)
        shifts = freedom.shifts if has_order else []
        acts_everywhere = (has_order and freedom.is_permuted) or is_base
        covered = set() if is_base else {s for part in freedom.matrices for s in (*part.slots, *part.watched)}
        groups: list[Group] = []
        for bases, (scales, signs) in rows.items():
            placements = []
            for slot in (slot for slot in (*freedom.slots, *freedom.watched) if slot not in covered):
                how = {
                    "scale": tuple(family.get(slot, 0) for family in scales),
                    "sign": tuple(int(slot in family) for family in signs),
                    "parity": tuple(int(slot in shift.parity) for shift in shifts),
                    "shift": tuple(shift.amounts.get(slot, 0.0) for shift in shifts),
                }
                if acts_everywhere or any(map(any, how.values())):
                    placements += self._placements(slot, **how)
            groups.append(
                Group(
                    self._name(freedom, freedom.slots) if groups else self.names[freedom.atom],
                    freedom.atom.size,
                    merged(placements),
                    is_permuted=has_order and freedom.is_permuted,
                    scales=len(scales),
                    signs=len(signs),
                    shifts=len(shifts),
                    within=self._within(bases),
                    is_base=is_base,
                )
            )
        return groups + [self._of_pairs(freedom, bases, *families) for bases, families in pairs.items()]

    def _of_pairs(self, freedom: Freedom, bases: frozenset[Atom], scales: list[Vector], signs: list[Vector]) -> Group:
        """Return a group with a separate factor for every combination of units, such as every weight of a layer.

        The group has size one. The group is repeated for every unit of an axis factor (atom), and within each base of
        this atom.
        """
        placements = []
        for slot in dict.fromkeys(slot for family in (*scales, *signs) for slot in family):
            place = self.places[slot]
            own = ((freedom.atom.size, place.stride), *place.others)
            scale, sign = tuple(f.get(slot, 0) for f in scales), tuple(int(slot in f) for f in signs)
            placements += self._named(Placement(place.name, place.axis, place.start, 1, own, scale=scale, sign=sign))
        within = self._within(bases | {freedom.atom})
        name = self._name(freedom, freedom.slots)
        return Group(
            name, 1, merged(placements), is_permuted=False, scales=len(scales), signs=len(signs), within=within
        )

    def _matrices(self, freedom: Freedom) -> list[Group]:
        groups = []
        for part in freedom.matrices:
            slots = (*part.slots.items(), *part.watched.items())
            placements = [p for slot, parity in slots for p in self._placements(slot, is_inverse=parity < 0)]
            groups.append(
                Group(
                    self._name(freedom, list(part.slots)),
                    freedom.atom.size,
                    merged(placements),
                    is_permuted=False,
                    matrix=part.kind,
                    keeps_ones=part.keeps_ones,
                    within=self._within(part.bases),
                )
            )
        return groups

    def _turns(self, freedom: Freedom) -> list[Group]:
        """Return two groups for each kind of coordinate pair. The units of the first group are the pairs, and the group
        may scale them. The second group rotates each pair of coordinates.
        """
        groups = []
        size = freedom.atom.size
        for part in freedom.turns:
            within = self._within(part.bases)
            name = self._name(freedom, [part.axes[0].slots[0]])
            pairs, turns = [], []
            for paired in part.axes:
                scale = tuple(family.get(paired.slots[0], 0) for family, _ in part.scales)
                pairs += self._named(replace(paired.pairs, scale=scale))
                turns += self._named(paired.turn(size))
            scales = len(part.scales)
            groups.append(
                Group(name, size, tuple(pairs), is_permuted=False, scales=scales, within=within, is_base=True)
            )
            inner = (*within, name)
            groups.append(
                Group(
                    f"{name}.angles",
                    2,
                    tuple(turns),
                    is_permuted=False,
                    matrix="orthogonal",
                    is_proper=True,
                    within=inner,
                )
            )
        return groups

    def _named(self, placement: Placement) -> list[Placement]:
        """Return one copy of a placement for each name of its parameter. Tied parameters have several names."""
        names = self.aliases.get(placement.parameter, (placement.parameter,))
        return [replace(placement, parameter=name) for name in names]

    def _within(self, bases: frozenset[Atom]) -> tuple[str, ...]:
        def rank(atom: Atom) -> tuple[int, int]:
            return len(self.freedoms[self.order[atom]].bases), self.order[atom]

        return tuple(self.names[atom] for atom in sorted(bases, key=rank))

    def _placements(self, slot: int, **how: object) -> list[Placement]:
        return self._named(self.places[slot].placement(**how))

    def _name(self, freedom: Freedom, slots: Sequence[int]) -> str:
        """Return the name of a group, which begins with the name of the first parameter on which the group acts.

        The ending ".blocks" marks units, such as heads, that contain the units of other groups. The ending ".units"
        marks units that lie within the units of another group.
        """
        place = self.places[slots[0]]
        stem, _, last = place.name.rpartition(".")
        stem = stem if stem and last in ("weight", "bias") else place.name
        if freedom.atom in self.used:
            stem += ".blocks"
        elif any(mate in self.used for mate in place.mates):
            stem += ".units"
        self.taken[stem] += 1
        return stem if self.taken[stem] == 1 else f"{stem}#{self.taken[stem]}"


def needed_bases(freedoms: Sequence[Freedom]) -> set[Atom]:
    """Return the atoms (factors of axes) within whose units some group is repeated."""
    needed: set[Atom] = set()
    for freedom in freedoms:
        if _can_permute(freedom) or freedom.shifts:
            needed |= freedom.bases
            for _, bases in (*freedom.scales, *freedom.signs):
                needed |= {freedom.atom, *bases} if bases - freedom.bases else set()
        else:
            needed.update(*(bases for _, bases in (*freedom.scales, *freedom.signs)))
        needed.update(*(part.bases for part in freedom.matrices), *(part.bases for part in freedom.turns))
    while more := {b for freedom in freedoms if freedom.atom in needed for b in freedom.bases} - needed:
        needed |= more  # A base is a group of its own, with its own bases.
    return needed


def _can_permute(freedom: Freedom) -> bool:
    """Return whether the units of an axis factor (atom) are permuted on at least one axis.

    If a matrix acts on an axis, the units are not permuted on this axis.
    """
    covered = {slot for part in freedom.matrices for slot in part.slots}
    return freedom.is_permuted and any(slot not in covered for slot in freedom.slots)


def merged(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Merge placements of a group on neighboring blocks of one axis into one placement.

    The group must act on all merged blocks in the same way.
    """
    result: list[Placement] = []
    for new in placements:
        joined = _join(result[-1], new) if result else None
        if joined is None:
            result.append(new)
        else:
            result[-1] = joined
    return tuple(result)


def _join(a: Placement, b: Placement) -> Placement | None:
    size_a = next((size for size, stride in a.repeats if stride == 1), 1)
    size_b = next((size for size, stride in b.repeats if stride == 1), 1)
    outer_a = tuple(r for r in a.repeats if r[1] != 1)
    outer_b = tuple(r for r in b.repeats if r[1] != 1)
    if a.stride == 1 or outer_a != outer_b or b.start != a.start + size_a:
        return None
    if replace(a, start=0, repeats=()) != replace(b, start=0, repeats=()) or size_a + size_b > a.stride:
        return None
    return replace(a, repeats=(*outer_a, (size_a + size_b, 1)))
