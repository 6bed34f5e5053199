"""Ways to read the slots of an atom as pairs of coordinates: halves of an axis, neighbors, complex numbers."""

from collections.abc import Iterator, Mapping, Sequence

from regauge.discovery.freedom import PairedAxis
from regauge.discovery.layout import Atom
from regauge.discovery.slots import SlotPlace


def pairings(
    slots: Sequence[int], bases: frozenset[Atom], places: Mapping[int, SlotPlace]
) -> Iterator[tuple[int | None, list[PairedAxis]]]:
    """Ways to read slots with a common sign as pairs of coordinates; with the number of the piece that is the pair."""
    found = [_pieces(places[slot], bases) for slot in slots]
    for k in range(min(map(len, found), default=0)):
        yield k, _neighbors(slots, k, bases, places)
    halves = _halves(slots, places)
    if halves:
        yield None, halves


def _pieces(place: SlotPlace, bases: frozenset[Atom]) -> list[Atom]:
    """Pieces of an axis that may be the two coordinates of a pair, those with the nearest entries first."""
    near = sorted(zip(place.mates, place.others, strict=True), key=lambda piece: piece[1][1])
    return [atom for atom, _ in near if atom.size == 2 and atom not in bases]


def _neighbors(
    slots: Sequence[int], k: int, bases: frozenset[Atom], places: Mapping[int, SlotPlace]
) -> list[PairedAxis]:
    """The two indices of another axis piece of each block: entries beside each other, complex numbers."""
    result = []
    for slot in slots:
        place = places[slot]
        pair = place.mates.index(_pieces(place, bases)[k])
        others = place.others[:pair] + place.others[pair + 1 :]
        result.append(_paired_axis((slot, slot), place, place.others[pair][1], others))
    return result


def _halves(slots: Sequence[int], places: Mapping[int, SlotPlace]) -> list[PairedAxis]:
    """Blocks of one axis that are alike, two by two; nothing where they are not."""
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


def watched_pairs(
    slots: Sequence[int], k: int | None, bases: frozenset[Atom], places: Mapping[int, SlotPlace]
) -> list[PairedAxis]:
    """The pairs of intermediate values, read as those of the parameters; those that cannot be read so are left out."""
    result = []
    for name in dict.fromkeys(places[slot].name for slot in slots):
        here = [slot for slot in slots if places[slot].name == name]
        result += dict(pairings(here, bases, places)).get(k, [])
    return result
