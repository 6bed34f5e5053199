"""A solver that finds, for each atom (factor of an axis), the transformations that satisfy the laws of all
operators.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from regauge.discovery.freedom import Freedom, MatrixPart, ShiftFamily, drop_redundant, drop_uniform, make_acyclic
from regauge.discovery.layout import Atom
from regauge.discovery.slots import Slots, Tie
from regauge.discovery.systems import MatrixSlots, Proportions, Rational, Vector, independent, quotient, select


def solve(slots: Slots) -> list[Freedom]:
    """Return, for every atom (factor of an axis) of parameters, the transformations that satisfy all laws.

    The results are in the order in which atoms first occur.
    """
    by_atom: dict[Atom, list[int]] = defaultdict(list)
    for slot in slots.places:
        by_atom[slots.atoms[slot]].append(slot)
    watched: dict[Atom, list[int]] = defaultdict(list)
    for slot in slots.watched:
        watched[slots.atoms[slot]].append(slot)
    result = [_AtomSolver(atom, own, watched[atom], slots).run() for atom, own in by_atom.items()]
    make_acyclic(result)
    drop_redundant(result, slots.places)
    drop_uniform(result, slots.places)
    return result


class _AtomSolver:
    """The constraints (laws) on one factor of axes (atom), as systems of equations. Each occurrence of the factor on an
    axis (slot) is one unknown.
    """

    def __init__(self, atom: Atom, own: list[int], watched: list[int], slots: Slots) -> None:
        self.atom, self.own, self.watched = atom, own, watched
        self.ties, self.places = slots.ties[atom], slots.places
        self.everywhere = list(dict.fromkeys([*own, *(slot for tie in self.ties for slot in tie.slots)]))
        self.blocked = [slot for slot in self.everywhere if slot in slots.blocked]
        self.beside = {slot: self.places[slot].beside for slot in own}
        self.reading: dict[int, list[Tie]] = defaultdict(list)
        for tie in self.ties:
            for slot in tie.slots:
                self.reading[slot].append(tie)

    def run(self) -> Freedom:
        freedom = Freedom(self.atom, self.own, self.watched)
        freedom.is_permuted = self.atom.frozen is None and self.atom.size > 1
        freedom.bases = _common([*self.beside.values(), *_bases(self.ties, self.reading)])
        if self.atom.size > 1:
            freedom.matrices = self._matrices()
        covered = {slot for part in freedom.matrices for slot in (*part.slots, *part.watched)}
        rest = {slot for slot in self.own if slot not in covered}
        kept = rest | {slot for slot in self.watched if slot not in covered}

        translations, periods = self._translations()
        signs, shifts = self._signs(translations, self._steps(translations, periods, rest))
        scales = self._scales().families(self.everywhere)
        for families, chosen, modulus in ((scales, freedom.scales, 0), (signs, freedom.signs, 2)):
            for k in independent([select(family, rest) for family in families], modulus=modulus):
                chosen.append((select(families[k], kept), self._bases_of(families[k])))
        freedom.shifts = [replace(shift, parity=select(shift.parity, kept)) for shift in shifts]
        return freedom

    def _bases_of(self, slots: Collection[int]) -> frozenset[Atom]:
        """Return the axis factors (atoms), such as heads, on whose index a transformation of the given slots may
        depend.
        """
        touching = {id(tie): tie for slot in slots for tie in self.reading.get(slot, ())}
        there = [self.beside[slot] for slot in slots if slot in self.beside]
        return _common([*there, *_bases(touching.values(), slots)])

    def _scales(self) -> Proportions:
        """Return the equations for the logarithms of scales."""
        unknowns = Proportions()
        unknowns.fix(*self.blocked)
        for tie in self.ties:
            if tie.law.scale is None:
                unknowns.fix(*tie.slots)
            for row in tie.law.scale or ():
                unknowns.equate(tie.slots, row)
        return unknowns

    def _matrices(self) -> list[MatrixPart]:
        system = MatrixSlots()
        for slot in self.own:
            system.find(slot)
        for tie in self.ties:
            edges = tie.law.edges or ()
            with_edge = {k for i, j, _ in edges for k in (i, j)}
            system.block(*(slot for k, slot in enumerate(tie.slots) if k not in with_edge))
            for i, j, parity in edges:
                system.tie(tie.slots[i], tie.slots[j], parity)
            if tie.law.is_metric:
                system.rotate(tie.slots[0], keeps_ones=tie.law.keeps_ones)
        system.block(*self.blocked)
        own, seen, members = (self._by_root(system, slots) for slots in (self.own, self.watched, self.everywhere))
        parts = []
        for root, slots in own.items():
            if root in system.blocked:
                continue
            sign = next(iter(slots.values()))
            kind: Literal["orthogonal", "linear"] = "orthogonal" if root in system.metric else "linear"
            parts.append(
                MatrixPart(
                    kind,
                    {s: p * sign for s, p in slots.items()},
                    self._bases_of(members[root]),
                    {s: p * sign for s, p in seen.get(root, {}).items()},
                    root in system.keeps_ones,
                )
            )
        return parts

    @staticmethod
    def _by_root(system: MatrixSlots, slots: Iterable[int]) -> dict[int, dict[int, int]]:
        """Return the slots on which each matrix acts.

        The number of a slot is +1 if the matrix itself acts, and -1 if its inverse transpose acts.
        """
        result: dict[int, dict[int, int]] = defaultdict(dict)
        for slot in slots:
            root, parity = system.find(slot)
            result[root][slot] = int(parity)
        return result

    def _translations(self) -> tuple[Proportions, list[int]]:
        """Return the equations for translations, which add numbers to entries along this axis factor.

        Also return the slots of the arguments of periodic functions, such as sin.
        """
        unknowns = Proportions()
        periods: list[int] = []
        if not any(tie.law.period for tie in self.ties):
            return unknowns, periods
        unknowns.fix(*self.blocked)
        # A translation must be constant along all other axes. Among parameters, only vectors allow this.
        unknowns.fix(*(slot for slot in self.own if self.places[slot].numel_elsewhere > 1))
        for tie in self.ties:
            if tie.law.period is not None:
                x, out = tie.slots
                unknowns.fix(out)
                periods.append(x)
            elif tie.law.shift is None:
                unknowns.fix(*tie.slots)
            else:
                for row in tie.law.shift:
                    unknowns.equate(tie.slots, [quotient(Fraction(c), 1) for c in row])
        unknowns.settle()
        while unknowns.pending:
            # If the model adds two biases, only one of them is shifted.
            unknowns.fix(max(unknowns.pending[0]))
            unknowns.settle()
        return unknowns, periods

    def _steps(self, translations: Proportions, periods: list[int], slots: Iterable[int]) -> dict[int, Rational]:
        """Return the size of one step, in units of pi, for each translation that shifts periodic functions by half
        periods.
        """
        carriers = {translations.find(slot)[0] for slot in slots if translations.value(slot)[1]}
        steps: dict[int, Rational] = {}
        # sin(x + k pi) = (-1)^k sin(x): a step must move the argument of every reader by a multiple of pi.
        for root in carriers:
            read = [translations.value(x) for x in periods]
            weights = [weight for other, weight in read if other == root and weight]
            smallest: Rational = min((w if w > 0 else -w for w in weights), default=1)
            step = quotient(1, smallest)
            if weights and all((w * step).denominator == 1 for w in weights):
                steps[root] = step
        return steps

    def _signs(
        self, translations: Proportions, steps: Mapping[int, Rational]
    ) -> tuple[list[Vector], list[ShiftFamily]]:
        """Return the families of signs and the families of half-period shifts. Each family of shifts includes the signs
        that an odd number of steps flips.
        """
        # A tag is one more unknown of the sign equations, "the number of steps is odd". In the order of elimination
        # tags are last and therefore free, so each solution with a tag is a shift with the signs that it needs.
        tags = {root: -1 - k for k, root in enumerate(steps)}
        carriers = {s for s in self.own if translations.find(s)[0] in steps and translations.value(s)[1]}
        early = [s for s in self.everywhere if s not in carriers]
        order = [*early[::-1], *carriers, *tags.values()]
        unknowns = Proportions({x: k for k, x in enumerate(order)}, modulus=2)
        unknowns.fix(*self.blocked)
        for tie in self.ties:
            if tie.law.sign is None:
                unknowns.fix(*tie.slots)
            for row in tie.law.sign or ():
                slots, coefficients = tie.slots, row
                if tie.law.period is not None:
                    root, weight = translations.value(slots[0])
                    if weight and root in steps and int(weight * steps[root]) % 2:
                        slots, coefficients = (*slots, tags[root]), (*row, 1)
                unknowns.equate(slots, coefficients)
        signs, shifts = [], []
        for vector in unknowns.families(order):
            roots = [root for root, tag in tags.items() if tag in vector]
            own = {slot: 1 for slot in vector if slot >= 0}
            if not roots:
                signs.append(own)
                continue
            amounts = {}
            for slot in (*carriers, *self.watched):
                root, weight = translations.value(slot)
                if weight and root in roots:
                    amounts[slot] = float(weight * steps[root]) * math.pi
            shifts.append(ShiftFamily(amounts, own))
        return signs, shifts


def _bases(ties: Iterable[Tie], touched: Container[int]) -> list[frozenset[Atom]]:
    found = {tie.around(touched) for tie in ties}
    return [frozenset(atom for atom, _ in around) for around in found if around is not None]


def _common(sets: Iterable[frozenset[Atom]]) -> frozenset[Atom]:
    """Return the intersection of sets, or the empty set if no sets are given."""
    found = list(sets)
    return frozenset.intersection(*found) if found else frozenset()
