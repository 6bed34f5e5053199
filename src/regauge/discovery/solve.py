"""From ties to groups: which transformations of each atom satisfy all laws at once."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

from regauge.discovery.layout import Atom
from regauge.discovery.planes import Planes, ScaleFamily
from regauge.discovery.slots import Place, Slots, Tie
from regauge.discovery.systems import (
    Matrices,
    Vector,
    Weighted,
    independent,
    independent_signs,
    scale_families,
    sign_families,
)


@dataclass(frozen=True)
class ShiftFamily:
    """A half-period shift: what is added at which slots, and where an odd number of steps flips the sign."""

    amounts: Mapping[int, float]
    parity: frozenset[int]


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
        scales: Exponents of each family of positive scales, with the bases of each.
        signs: Slots of each family of signs, with the bases of each.
        shifts: Families of half-period shifts.
        matrices: Matrices on some of the slots; the rest above does not act there.
        planes: Rotations of pairs of coordinates, where the units are such pairs.
    """

    atom: Atom
    slots: list[int]
    watched: list[int] = field(default_factory=list)
    is_permuted: bool = False
    bases: frozenset[Atom] = frozenset()
    scales: list[ScaleFamily] = field(default_factory=list)
    signs: list[tuple[frozenset[int], frozenset[Atom]]] = field(default_factory=list)
    shifts: list[ShiftFamily] = field(default_factory=list)
    matrices: list[MatrixPart] = field(default_factory=list)
    planes: list[Planes] = field(default_factory=list)


def solve(slots: Slots) -> list[Freedom]:
    """The freedom of every atom that parameters have, in order of first appearance."""
    by_atom: dict[Atom, list[int]] = defaultdict(list)
    for slot in slots.places:
        by_atom[slots.atoms[slot]].append(slot)
    watched: dict[Atom, list[int]] = defaultdict(list)
    for slot in slots.watched:
        watched[slots.atoms[slot]].append(slot)
    result = [_solve_atom(atom, own, watched[atom], slots) for atom, own in by_atom.items()]
    _make_acyclic(result)
    _drop_redundant(result, slots.places)
    _drop_uniform(result, slots.places)
    return result


def _solve_atom(atom: Atom, own: list[int], watched: list[int], slots: Slots) -> Freedom:
    ties = slots.ties[atom]
    blocked = {s for tie in ties for s in tie.slots if s in slots.blocked} | {s for s in own if s in slots.blocked}
    freedom = Freedom(atom, own, watched)
    freedom.is_permuted = atom.frozen is None and atom.size > 1
    beside = {slot: slots.places[slot].beside for slot in own}
    freedom.bases = _common([*beside.values(), *_around(ties, range(len(slots.atoms)))])
    if atom.size > 1:
        freedom.matrices = _matrices(ties, beside, watched, blocked)
    covered = {slot for part in freedom.matrices for slot in (*part.slots, *part.watched)}
    rest = {slot for slot in own if slot not in covered}
    kept = rest | {slot for slot in watched if slot not in covered}

    everywhere = list(dict.fromkeys([*own, *(slot for tie in ties for slot in tie.slots)]))

    families = scale_families(_scale_unknowns(ties, blocked), everywhere)
    for k in independent([_within(family, rest) for family in families]):
        freedom.scales.append((_within(families[k], kept), _bases_touching(ties, set(families[k]), beside)))

    translations, periods = _shift_unknowns(ties, blocked, own, slots.places)
    steps = _steps(translations, periods, rest)
    signs, shifts = _signs(ties, blocked, own, watched, everywhere, translations, steps)
    for k in independent_signs([family & rest for family in signs]):
        freedom.signs.append((signs[k] & kept, _bases_touching(ties, signs[k], beside)))
    freedom.shifts = [replace(shift, parity=shift.parity & kept) for shift in shifts]
    return freedom


def _scale_unknowns(ties: Sequence[Tie], blocked: set[int]) -> Weighted:
    unknowns = Weighted()
    for slot in blocked:
        unknowns.fix(slot)
    for tie in ties:
        if tie.letter.scale is None:
            for slot in tie.slots:
                unknowns.fix(slot)
            continue
        for row in tie.letter.scale:
            equation: dict[int, Fraction] = defaultdict(Fraction)
            for slot, coefficient in zip(tie.slots, row, strict=True):
                equation[slot] += coefficient
            unknowns.equation({s: c for s, c in equation.items() if c})
    return unknowns


def _matrices(
    ties: Sequence[Tie], beside: Mapping[int, frozenset[Atom]], watched: Sequence[int], blocked: set[int]
) -> list[MatrixPart]:
    system = Matrices()
    for slot in beside:
        system.find(slot)
    for tie in ties:
        if tie.letter.edges is None:
            for slot in tie.slots:
                system.block(slot)
            continue
        with_edge = {k for i, j, _ in tie.letter.edges for k in (i, j)}
        for k, slot in enumerate(tie.slots):
            if k not in with_edge:
                system.block(slot)
        for i, j, parity in tie.letter.edges:
            system.tie(tie.slots[i], tie.slots[j], parity)
        if tie.letter.is_metric:
            system.rotate(tie.slots[0], keeps_ones=tie.letter.keeps_ones)
    for slot in blocked:
        system.block(slot)
    components: dict[int, dict[int, int]] = defaultdict(dict)
    for slot in beside:
        root, parity = system.find(slot)
        if root not in system.blocked:
            components[root][slot] = parity
    seen: dict[int, dict[int, int]] = defaultdict(dict)
    for slot in watched:
        root, parity = system.find(slot)
        seen[root][slot] = parity
    members: dict[int, set[int]] = defaultdict(set)
    for tie in ties:
        for slot in tie.slots:
            members[system.find(slot)[0]].add(slot)
    parts = []
    for root, slots in components.items():
        sign = next(iter(slots.values()))
        kind: Literal["orthogonal", "linear"] = "orthogonal" if root in system.metric else "linear"
        parts.append(
            MatrixPart(
                kind,
                {s: p * sign for s, p in slots.items()},
                _bases_touching(ties, members[root], beside),
                {s: p * sign for s, p in seen[root].items()},
                root in system.keeps_ones,
            )
        )
    return parts


def _shift_unknowns(
    ties: Sequence[Tie], blocked: set[int], own: list[int], places: Mapping[int, Place]
) -> tuple[Weighted, list[int]]:
    """Translations of values along this atom, and the slots at which periodic functions read them."""
    unknowns = Weighted()
    periods: list[int] = []
    if not any(tie.letter.period for tie in ties):
        return unknowns, periods
    for slot in blocked:
        unknowns.fix(slot)
    for slot in own:
        # A translation must be constant along all other axes: only a vector can hold one.
        if places[slot].numel_elsewhere > 1:
            unknowns.fix(slot)
    for tie in ties:
        if tie.letter.period is not None:
            x, out = tie.slots
            unknowns.fix(out)
            periods.append(x)
        elif tie.letter.shift is None:
            for slot in tie.slots:
                unknowns.fix(slot)
        else:
            for row in tie.letter.shift:
                equation: dict[int, Fraction] = defaultdict(Fraction)
                for slot, coefficient in zip(tie.slots, row, strict=True):
                    equation[slot] += Fraction(coefficient)
                unknowns.equation({s: c for s, c in equation.items() if c})
    unknowns.settle()
    while unknowns.pending:
        # Two biases that add up: the shift goes to one of them.
        unknowns.fix(max(unknowns.pending[0]))
        unknowns.settle()
    return unknowns, periods


def _steps(translations: Weighted, periods: Sequence[int], own: Iterable[int]) -> dict[int, Fraction]:
    """The translations that can move in half periods: by root, the size of one step in units of pi."""
    carriers = {translations.find(slot)[0] for slot in own if translations.value(slot)[1]}
    steps: dict[int, Fraction] = {}
    for root in carriers:
        weights = [w for x in periods for r, w in [translations.value(x)] if r == root and w]
        step = 1 / min((abs(w) for w in weights), default=Fraction(1))
        if weights and all((w * step).denominator == 1 for w in weights):
            steps[root] = step
    return steps


def _signs(
    ties: Sequence[Tie],
    blocked: set[int],
    own: list[int],
    watched: list[int],
    everywhere: list[int],
    translations: Weighted,
    steps: Mapping[int, Fraction],
) -> tuple[list[frozenset[int]], list[ShiftFamily]]:
    """Families of signs, and families of shifts with the signs that an odd number of steps flips."""
    rows: list[frozenset[int]] = []
    zero: set[int] = set(blocked)
    tags = {root: -1 - k for k, root in enumerate(steps)}
    for tie in ties:
        if tie.letter.sign is None:
            zero.update(tie.slots)
            continue
        for row in tie.letter.sign:
            odd: frozenset[int] = frozenset()
            for slot, coefficient in zip(tie.slots, row, strict=True):
                if coefficient % 2:
                    odd ^= {slot}
            if tie.letter.period is not None:
                root, weight = translations.value(tie.slots[0])
                if weight and root in steps and int(weight * steps[root]) % 2:
                    odd ^= {tags[root]}
            rows.append(odd)
    carriers = {s for s in own if translations.find(s)[0] in steps and translations.value(s)[1]}
    early = [s for s in everywhere if s not in carriers]
    basis = sign_families(rows, zero, [*early[::-1], *carriers, *tags.values()])
    signs, shifts = [], []
    for vector in basis:
        roots = [root for root, tag in tags.items() if tag in vector]
        slots = frozenset(v for v in vector if v >= 0)
        if not roots:
            signs.append(slots)
            continue
        amounts = {}
        for slot in (*carriers, *watched):
            root, weight = translations.value(slot)
            if weight and root in roots:
                amounts[slot] = float(weight * steps[root]) * math.pi
        shifts.append(ShiftFamily(amounts, slots))
    return signs, shifts


def _within(exponents: Mapping[int, int], slots: Container[int]) -> Vector:
    return {slot: e for slot, e in exponents.items() if slot in slots}


def _common(sets: Iterable[frozenset[Atom]]) -> frozenset[Atom]:
    found: frozenset[Atom] | None = None
    for s in sets:
        found = s if found is None else found & s
    return found or frozenset()


def _bases_touching(
    ties: Sequence[Tie], slots: Collection[int], beside: Mapping[int, frozenset[Atom]]
) -> frozenset[Atom]:
    """What a transformation of these slots may depend on; slots that it leaves alone do not matter."""
    found = set(slots)
    there = [atoms for slot, atoms in beside.items() if slot in found]
    return _common([*there, *_around(ties, found)])


def _around(ties: Iterable[Tie], touched: Container[int]) -> Iterator[frozenset[Atom]]:
    for tie in ties:
        bases = tie.bases(touched)
        if bases is not None:
            yield bases


def _make_acyclic(freedoms: list[Freedom]) -> None:
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


def _drop_redundant(freedoms: list[Freedom], places: Mapping[int, Place]) -> None:
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
        kept = independent([_within(family, own) for family, _ in freedom.scales], known_scales[freedom.atom])
        freedom.scales = [freedom.scales[k] for k in kept]
        odd = independent_signs([family & own for family, _ in freedom.signs], known_signs[freedom.atom])
        freedom.signs = [freedom.signs[k] for k in odd]


def _drop_uniform(freedoms: list[Freedom], places: Mapping[int, Place]) -> None:
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


def _lifted(exponents: Mapping[int, int], base: Freedom, places: Mapping[int, Place]) -> Vector:
    """What a family that is the same for all units within each block does to the block as a whole."""
    result: Vector = {}
    for slot, exponent in _within(exponents, places).items():
        inner = places[slot]
        for other in base.slots:
            outer = places[other]
            if outer.name == inner.name and (outer.axis != inner.axis or outer.term == inner.term):
                result[other] = exponent
    return result
