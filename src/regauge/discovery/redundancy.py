"""Freedoms made consistent with one another: bases that exist, and no family that another group contains."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from regauge.discovery.freedom import Freedom
from regauge.discovery.layout import Atom
from regauge.discovery.slots import SlotPlace
from regauge.discovery.systems import Vector, independent, independent_signs, select


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
    rows = [b for _, b in freedom.scales] + [b for _, b in freedom.signs] + [part.bases for part in freedom.matrices]
    return freedom.bases.union(*rows) if rows else freedom.bases


def _restrict(freedom: Freedom, keep: Callable[[frozenset[Atom]], frozenset[Atom]]) -> None:
    freedom.bases = keep(freedom.bases)
    freedom.scales = [(family, keep(bases)) for family, bases in freedom.scales]
    freedom.signs = [(family, keep(bases)) for family, bases in freedom.signs]
    freedom.matrices = [replace(part, bases=keep(part.bases)) for part in freedom.matrices]


def drop_redundant(freedoms: list[Freedom], places: Mapping[int, SlotPlace]) -> None:
    """Families of a base that the groups repeated within it contain: a factor per head is a matrix per head."""
    known_scales: dict[Atom, list[Vector]] = defaultdict(list)
    known_signs: dict[Atom, list[frozenset[int]]] = defaultdict(list)
    by_atom = {freedom.atom: freedom for freedom in freedoms}
    for freedom in freedoms:
        for part in freedom.matrices:
            for base in part.bases:
                if part.kind == "linear":
                    known_scales[base].append(_lifted(part.slots, by_atom[base], places))
                known_signs[base].append(frozenset(_lifted(part.slots, by_atom[base], places)))
        for family, bases in freedom.scales:
            for base in bases:
                known_scales[base].append(_lifted(family, by_atom[base], places))
        for signs, bases in freedom.signs:
            for base in bases:
                known_signs[base].append(frozenset(_lifted(dict.fromkeys(signs, 1), by_atom[base], places)))
    for freedom in freedoms:
        own = frozenset(freedom.slots)
        kept = independent([select(family, own) for family, _ in freedom.scales], known_scales[freedom.atom])
        freedom.scales = [freedom.scales[k] for k in kept]
        odd = independent_signs([family & own for family, _ in freedom.signs], known_signs[freedom.atom])
        freedom.signs = [freedom.signs[k] for k in odd]


def drop_uniform(freedoms: list[Freedom], places: Mapping[int, SlotPlace]) -> None:
    """Families of single units that multiply whole parameters as uniform families of larger groups do."""

    def whole(exponents: Vector) -> Vector | None:
        result: Vector = {}
        for slot, exponent in exponents.items():
            if slot not in places:
                continue
            if not places[slot].is_whole:
                return None
            key = names.setdefault(places[slot].name, len(names))
            result[key] = result.get(key, 0) + exponent
        return {key: e for key, e in result.items() if e}

    names: dict[str, int] = {}
    large = [freedom for freedom in freedoms if freedom.atom.size > 1]
    scales = [vector for f in large for family, _ in f.scales if (vector := whole(family))]
    signs = [
        frozenset(key for key, e in vector.items() if e % 2)
        for f in large
        for family, _ in f.signs
        if (vector := whole(dict.fromkeys(family, 1)))
    ]
    for freedom in freedoms:
        if freedom.atom.size > 1:
            continue
        kept = []
        for family, bases in freedom.scales:
            vector = whole(family)
            if vector is None or independent([vector], scales):
                kept.append((family, bases))
                scales += [vector] if vector else []
        freedom.scales = kept
        odd = []
        for signs_here, bases in freedom.signs:
            vector = whole(dict.fromkeys(signs_here, 1))
            flipped = frozenset(key for key, e in (vector or {}).items() if e % 2)
            if vector is None or independent_signs([flipped], signs):
                odd.append((signs_here, bases))
                signs += [flipped] if vector else []
        freedom.signs = odd


def _lifted(exponents: Mapping[int, int], base: Freedom, places: Mapping[int, SlotPlace]) -> Vector:
    """What a family that is the same for all units within each block does to the block as a whole."""
    result: Vector = {}
    for slot, exponent in select(exponents, places).items():
        inner = places[slot]
        for other in base.slots:
            outer = places[other]
            if outer.name == inner.name and (outer.axis != inner.axis or outer.term == inner.term):
                result[other] = exponent
    return result
