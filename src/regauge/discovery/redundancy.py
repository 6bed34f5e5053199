"""Freedoms made consistent with one another: bases that exist, and no family that another group contains."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter

from regauge.discovery.freedom import Family, Freedom
from regauge.discovery.layout import Atom
from regauge.discovery.slots import SlotPlace
from regauge.discovery.systems import Vector, independent, select

KINDS: tuple[tuple[Callable[[Freedom], list[Family]], int], ...] = ((attrgetter("scales"), 0), (attrgetter("signs"), 2))
"""Families of scales, which are independent over the rationals, and of signs, modulo two."""


def make_acyclic(freedoms: list[Freedom]) -> None:
    """Keep bases that exist, and of two atoms that always go together let the first be the base of the other."""
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
            # A base that is itself repeated within others brings them along.
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
    """Drop families of a base that the groups repeated within it contain: a factor per head is a matrix per head."""
    by_atom = {freedom.atom: freedom for freedom in freedoms}
    for families_of, modulus in KINDS:
        known: dict[Atom, list[Vector]] = defaultdict(list)
        for freedom in freedoms:
            matrices = [(part.slots, part.bases) for part in freedom.matrices if part.kind == "linear" or modulus]
            for family, bases in (*matrices, *families_of(freedom)):
                for base in bases:
                    known[base].append(_lift(family, by_atom[base], places))
        for freedom in freedoms:
            families, own = families_of(freedom), frozenset(freedom.slots)
            kept = independent([select(family, own) for family, _ in families], known[freedom.atom], modulus)
            families[:] = [families[k] for k in kept]


def drop_uniform(freedoms: list[Freedom], places: Mapping[int, SlotPlace]) -> None:
    """Drop families of single units that multiply whole parameters as uniform families of larger groups do."""

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
    """What a family that is the same for all units within each block does to the block as a whole."""
    result: Vector = {}
    for slot, exponent in select(exponents, places).items():
        inner = places[slot]
        for other in base.slots:
            outer = places[other]
            if outer.name == inner.name and (outer.axis != inner.axis or outer.term == inner.term):
                result[other] = exponent
    return result
