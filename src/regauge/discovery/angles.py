"""Free angles: rotations of pairs of coordinates that commute with the fixed rotations of rotary embeddings.

The solver treats each index of an operator separately. A rotary embedding rotates pairs of coordinates by fixed angles.
For a rotated pair of coordinates, the solver finds only a common scale and a common sign. However, all rotations of a
pair of coordinates commute with the fixed rotations. Therefore queries and keys may be rotated by any common angle. The
names of operators do not reveal on which axes rotary embeddings act. Models store the two coordinates of a pair in two
halves of an axis, as neighbors, or as a complex number. Therefore every pair of coordinates that shares a sign is
tested. The test evaluates the operators from the parameters up to the first values that lack the axis of the pairs. The
operators are evaluated in float64, before and after random rotations. Parameters are random, constants come from the
trace, and all other operands are random. If a rotation leaves all tested values unchanged, the rotation also leaves the
outputs of the model unchanged.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regauge.core import act as _act
from regauge.core.element import random
from regauge.core.groups import Group, Placement
from regauge.core.probe import relative_change
from regauge.discovery.emit import needed_bases
from regauge.discovery.evaluation import Constants, UndecidedError
from regauge.discovery.freedom import Family, Freedom, PairedAxis, Turns
from regauge.discovery.interpret import Pass
from regauge.discovery.layout import Atom
from regauge.discovery.region import Region
from regauge.discovery.slots import SlotPlace, Slots
from regauge.discovery.trace import Program

ANGLE_TOLERANCE = 1e-9
"""The largest relative change of the operator results, in float64, that the test accepts."""


def free_angles(
    freedoms: Sequence[Freedom], slots: Slots, program: Program, found: Pass, inputs: Sequence[Any]
) -> tuple[list[Freedom], tuple[str, ...]]:
    """Return the transformations that may act on each axis factor, including rotations of pairs that pass the test.

    Also return a message for each pair that could not be tested.

    The example inputs are a flat list of tensors. If the example inputs are on the meta device, their entries are
    unknown.
    """
    trial = _Trial(freedoms, slots, program, found, inputs)
    turned = dict(enumerate(freedoms))
    # If two factors would rotate the same entries, only the factor with more angles does; the other keeps its signs.
    for k in sorted(turned, key=lambda k: -trial.angles(freedoms[k])):
        if trial.may_turn(freedoms[k]):
            turned[k] = trial.turn(freedoms[k])
    return [turned[k] for k in range(len(freedoms))], tuple(trial.undecided)


class _Trial:
    """A test that finds the rotations of coordinate pairs that leave all outputs unchanged."""

    def __init__(
        self, freedoms: Sequence[Freedom], slots: Slots, program: Program, found: Pass, inputs: Sequence[Any]
    ) -> None:
        self.program, self.found = program, found
        self.constants = Constants(program, inputs)
        self.bases = needed_bases(freedoms)
        self.places = {**slots.places, **slots.watched}
        of_bases = [freedom for freedom in freedoms if freedom.atom in self.bases]
        self.where = {f.atom: [self.places[slot].placement() for slot in f.slots] for f in of_bases}
        self.known: dict[Hashable, bool] = {}
        self.undecided: dict[str, None] = {}
        self.taken: set[tuple[str, int, int]] = set()

    def angles(self, freedom: Freedom) -> int:
        """Return how many rotation angles a factor of axes would have if its pairs of coordinates could be rotated."""
        families = (math.prod(base.size for base in bases) for _, bases in freedom.signs)
        return freedom.atom.size * max(families, default=0)

    def may_turn(self, freedom: Freedom) -> bool:
        return bool(freedom.signs) and not (freedom.is_permuted or freedom.matrices or freedom.atom in self.bases)

    def turn(self, freedom: Freedom) -> Freedom:
        """Return the transformations that may act on one axis factor.

        If rotations of its coordinate pairs pass the test, the rotations replace the common sign of each pair.
        """
        signs, scales, turns = [], list(freedom.scales), list(freedom.turns)
        for family, bases in freedom.signs:
            own = [slot for slot in freedom.slots if slot in family]
            number, pairs = self._free_pairs(own, freedom.atom, bases)
            entries = {entry for paired in pairs for entry in self._entries(paired, freedom.atom.size)}
            if not pairs or not self.taken.isdisjoint(entries):
                signs.append((family, bases))
                continue
            self.taken |= entries
            seen = [slot for slot in freedom.watched if slot in family]
            everywhere = [*pairs, *_watched_pairs(seen, number, bases, self.places)]
            along = [scale for scale in scales if _is_scale_of(scale, everywhere, bases, freedom.slots)]
            scales = [scale for scale in scales if scale not in along]
            unread = {self.places[slot].name for slot in seen} - {paired.name for paired in everywhere}
            turns.append(Turns(tuple(everywhere), bases, tuple(along), frozenset(unread)))
        return replace(freedom, signs=signs, scales=scales, turns=turns)

    def _entries(self, paired: PairedAxis, size: int) -> Iterator[tuple[str, int, int]]:
        """Return the entries that belong to pairs of coordinates: a tensor name, an axis, and an index for each
        entry.
        """
        positions, _ = _act.covered(Group("", size, (paired.pairs,)), paired.pairs, self.program.shapes[paired.name])
        return ((paired.name, paired.axis, k) for k in positions.tolist())

    def _free_pairs(
        self, slots: Sequence[int], atom: Atom, bases: frozenset[Atom]
    ) -> tuple[int | None, Sequence[PairedAxis]]:
        """Return coordinates, grouped into pairs such that rotations of all pairs pass the test.

        The result also contains the number of the axis factor along which the coordinates of each pair differ. If no
        grouping passes the test, no pairs are returned.
        """
        reasons = []
        for number, pairs in _pairings(slots, bases, self.places):
            groups = _groups(pairs, atom, {base: self.where[base] for base in bases})
            try:
                if self._passes(pairs, groups, atom):
                    return number, pairs
            except UndecidedError as error:
                reasons.append(str(error))
        if reasons:
            name = self.places[slots[0]].name
            sentence = f"it is not known whether pairs of units of {name!r} can be rotated: {reasons[0]}"
            self.undecided[sentence] = None
        return None, ()

    def _passes(self, axes: Sequence[PairedAxis], groups: tuple[Group, ...], atom: Atom) -> bool:
        """Return whether pairs pass the test: the tested values stay the same if random rotations act on all
        parameters.

        The tested values must also change if the rotations act on only the first parameter axis.
        """
        region = Region(self.program, self.found, atom, axes, self.constants)
        if region.has_output:
            return False
        like = (region.shape(), _geometry(region.names, axes, groups))
        if like not in self.known:
            generator = torch.Generator().manual_seed(0)
            only_first = (*groups[:-1], replace(groups[-1], placements=groups[-1].placements[:1]))
            region.draw(generator)
            before = region.ends(region.params)
            after = region.ends(_move(groups, region.params, generator))
            alone = region.ends(_move(only_first, region.params, generator))
            # Otherwise every pair would pass if these values depend on no parameter.
            is_finite = all(bool(t.isfinite().all()) for t in before)
            is_free = is_finite and relative_change(before, after) <= ANGLE_TOLERANCE
            self.known[like] = is_free and relative_change(before, alone) > 1000 * ANGLE_TOLERANCE
        return self.known[like]


def _is_scale_of(scale: Family, axes: Sequence[PairedAxis], bases: frozenset[Atom], own: Sequence[int]) -> bool:
    """Return whether a family of scales multiplies both coordinates of each pair by the same factor, and changes no
    other entries.
    """
    family, within = scale
    covered = {slot for paired in axes for slot in paired.slots}
    is_alike = all(family.get(paired.slots[0], 0) == family.get(paired.slots[1], 0) for paired in axes)
    return within == bases and all(slot in covered for slot in own if slot in family) and is_alike


def _groups(axes: Sequence[PairedAxis], atom: Atom, bases: Mapping[Atom, Sequence[Placement]]) -> tuple[Group, ...]:
    """Return groups that contain one rotation angle for every unit of an axis factor (atom).

    Each unit of a base, such as each head, has angles of its own.
    """
    names = {paired.name for paired in axes}
    groups = []
    for k, (base, placements) in enumerate(bases.items()):
        here = tuple(p for p in placements if p.parameter in names)
        groups.append(Group(f"base {k}", base.size, here, is_permuted=False, is_base=True))
    pairs = tuple(paired.pairs for paired in axes)
    groups.append(Group("pairs", atom.size, pairs, is_permuted=False, is_base=True))
    within = tuple(group.name for group in groups)
    turns = tuple(paired.turn(atom.size) for paired in axes)
    last = Group("turns", 2, turns, is_permuted=False, matrix="orthogonal", is_proper=True, within=within)
    return (*groups, last)


def _geometry(names: Sequence[str], axes: Sequence[PairedAxis], groups: Sequence[Group]) -> Hashable:
    """Return a key for placements of axes and groups on parameters. In the key, numbers replace names, so equal
    placements on other parameters have equal keys.
    """
    numbers = {name: k for k, name in enumerate(names)}
    own = tuple((numbers[p.name], p.axis, p.start, p.stride, p.distance, p.others) for p in axes)
    sites = tuple(
        (group.size, tuple(replace(p, parameter=str(numbers.get(p.parameter))) for p in group.placements))
        for group in groups
    )
    return own, sites


def _move(groups: tuple[Group, ...], params: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    try:
        sites = {name: _act.resolve(groups, name, tuple(t.shape)) for name, t in params.items()}
    except ValueError as error:  # A parameter lacks an axis for a base of a group.
        raise UndecidedError(str(error)) from error
    return dict(_act.act(groups, sites, random(groups, generator), params, {n: t.ndim for n, t in params.items()}))


def _pairings(
    slots: Sequence[int], bases: frozenset[Atom], places: Mapping[int, SlotPlace]
) -> Iterator[tuple[int | None, list[PairedAxis]]]:
    """Group coordinates with a common sign into pairs, and yield all possible groupings.

    Each grouping is a list of pairs, with the number of the axis factor along which the coordinates of a pair differ.
    If the coordinates of a pair are in two halves of an axis, the number is None.
    """
    found = [_pieces(places[slot], bases) for slot in slots]
    for k in range(min(map(len, found), default=0)):
        yield k, _neighbors(slots, k, bases, places)
    halves = _halves(slots, places)
    if halves:
        yield None, halves


def _pieces(place: SlotPlace, bases: frozenset[Atom]) -> list[Atom]:
    """Return the axis factors of size two, in the order of their strides.

    A returned factor may index the two coordinates of a pair.
    """
    near = sorted(zip(place.mates, place.others, strict=True), key=lambda piece: piece[1][1])
    return [atom for atom, _ in near if atom.size == 2 and atom not in bases]


def _neighbors(
    slots: Sequence[int], k: int, bases: frozenset[Atom], places: Mapping[int, SlotPlace]
) -> list[PairedAxis]:
    """Return pairs of coordinates that differ only in the index of one axis factor of size two.

    For example, the coordinates of a pair are adjacent entries, or a real part and an imaginary part.
    """
    result = []
    for slot in slots:
        place = places[slot]
        pair = place.mates.index(_pieces(place, bases)[k])
        others = place.others[:pair] + place.others[pair + 1 :]
        result.append(_paired_axis((slot, slot), place, place.others[pair][1], others))
    return result


def _halves(slots: Sequence[int], places: Mapping[int, SlotPlace]) -> list[PairedAxis]:
    """Return pairs that consist of one coordinate from each of two equal blocks of an axis. If the blocks of an axis
    differ in structure, return no pairs.
    """
    by_axis: dict[tuple[str, int], list[int]] = {}
    for slot in slots:
        by_axis.setdefault((places[slot].name, places[slot].axis), []).append(slot)
    result = []
    for along in by_axis.values():
        along.sort(key=lambda slot: places[slot].start)
        for one, two in zip(along[::2], along[1::2], strict=False):
            first, second = places[one], places[two]
            if (first.stride, first.others, first.mates) == (second.stride, second.others, second.mates):
                result.append(_paired_axis((one, two), first, second.start - first.start, first.others))
    return result if 2 * len(result) == len(slots) else []


def _paired_axis(
    slots: tuple[int, int], place: SlotPlace, distance: int, others: tuple[tuple[int, int], ...]
) -> PairedAxis:
    return PairedAxis(slots, place.name, place.axis, place.start, place.stride or 1, distance, others)


def _watched_pairs(
    slots: Sequence[int], k: int | None, bases: frozenset[Atom], places: Mapping[int, SlotPlace]
) -> list[PairedAxis]:
    """Return the pairs of coordinates in intermediate values, grouped in the same way as the pairs in parameters.

    Intermediate values in which the coordinates do not form pairs are omitted.
    """
    result = []
    for name in dict.fromkeys(places[slot].name for slot in slots):
        here = [slot for slot in slots if places[slot].name == name]
        result += dict(_pairings(here, bases, places)).get(k, [])
    return result
