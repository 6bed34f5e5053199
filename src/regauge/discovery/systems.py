"""The linear systems behind scales, signs, shifts and matrices of one atom.

Log-scales and shifts obey linear equations over the rationals, signs over the field of two elements. Almost all
equations tie two unknowns, so a union-find does most of the work and elimination the rest.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import lcm

Vector = dict[int, int]
"""Exponents by slot."""
Rational = int | Fraction
"""An integer where it is one, because integers are faster and nearly all of these numbers are."""
Row = dict[int, Rational]
"""Coefficients by unknown."""


def quotient(a: Rational, b: Rational) -> Rational:
    """a / b, exactly."""
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b
    result = Fraction(a) / b
    return result.numerator if result.denominator == 1 else result


def select(vector: Mapping[int, int], slots: Container[int]) -> Vector:
    """The exponents at some slots."""
    return {slot: exponent for slot, exponent in vector.items() if slot in slots}


class Proportions:
    """Union-find where each unknown is a rational multiple of its root, and roots can be fixed to zero."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}
        self.weight: dict[int, Rational] = {}
        self.zero: set[int] = set()
        self.pending: list[Row] = []

    def find(self, x: int) -> tuple[int, Rational]:
        if x not in self.parent:
            self.parent[x], self.weight[x] = x, 1
        chain = []
        while self.parent[x] != x:
            chain.append(x)
            x = self.parent[x]
        total: Rational = 1
        for y in reversed(chain):
            total *= self.weight[y]
            self.parent[y], self.weight[y] = x, total
        return x, total

    def value(self, x: int) -> tuple[int, Rational]:
        root, weight = self.find(x)
        return (root, 0) if root in self.zero else (root, weight)

    def fix(self, *unknowns: int) -> None:
        for x in unknowns:
            self.zero.add(self.find(x)[0])

    def equate(self, unknowns: Sequence[int], coefficients: Sequence[Rational]) -> None:
        """Require that the sum of coefficient * unknown is zero; unknowns may occur twice."""
        self._use(zip(unknowns, coefficients, strict=True))

    def settle(self) -> None:
        """Use the longer equations as far as the shorter ones have made them short."""
        changed = True
        while changed:
            rows, self.pending = self.pending, []
            changed = sum(self._use(row.items()) for row in rows) > 0

    def _use(self, row: Iterable[tuple[int, Rational]]) -> bool:
        """Use an equation if it is short, or keep it; whether it says something now."""
        reduced: Row = defaultdict(int)
        for x, coefficient in row:
            if coefficient:
                root, weight = self.value(x)
                reduced[root] += coefficient * weight
        terms = [(x, c) for x, c in reduced.items() if c]
        if len(terms) == 1:
            self.zero.add(terms[0][0])
        elif len(terms) == 2:
            (x, a), (y, b) = terms
            self.parent[y], self.weight[y] = x, quotient(-a, b)
        elif terms:
            self.pending.append(dict(terms))
        return len(terms) in (1, 2)


def scale_families(unknowns: Proportions, slots: Sequence[int]) -> list[Vector]:
    """Independent integer exponent vectors over the given slots that solve all equations."""
    unknowns.settle()
    columns: dict[int, Row] = defaultdict(dict)
    for slot in slots:
        root, weight = unknowns.value(slot)
        if weight:
            columns[root][slot] = weight
    tied = sorted({x for row in unknowns.pending for x in row})
    basis: list[Row] = [{root: 1} for root in columns if root not in set(tied)]
    basis += _null_space(unknowns.pending, tied).values()
    families = []
    for vector in basis:
        exponents = {
            slot: factor * weight for root, factor in vector.items() for slot, weight in columns.get(root, {}).items()
        }
        if exponents:
            scale = lcm(*(e.denominator for e in exponents.values()))
            families.append({slot: int(e * scale) for slot, e in exponents.items() if e})
    return families


def sign_families(rows: Iterable[Sequence[int]], zero: Iterable[int], unknowns: Sequence[int]) -> list[frozenset[int]]:
    """A basis of the solutions over two elements; unknowns late in the order stay free where there is a choice.

    Args:
        rows: Unknowns that add up to zero; one that occurs twice cancels.
        zero: Unknowns that are zero.
        unknowns: All of them, those last that should stay free.
    """
    order = {x: k for k, x in enumerate(unknowns)}
    parent: dict[int, int] = {}

    def find(x: int) -> int:
        """The latest of the unknowns that equations of two have made equal to this one."""
        parent.setdefault(x, x)
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    longer, none = [], list(zero)
    for row in rows:
        if len(row) > 2:
            row = [x for x in row if row.count(x) % 2]
        if len(row) == 1:
            none.extend(row)
        elif len(row) == 2:
            early, late = sorted(map(find, row), key=lambda x: order.get(x, -1))
            parent[early] = late
        else:
            longer.append(row)
    dead = {find(x) for x in none}
    equations: list[Row] = []
    for row in longer:
        counts: Row = defaultdict(int)
        for root in map(find, row):
            if root not in dead:
                counts[root] += 1
        equations.append({root: 1 for root, count in counts.items() if count % 2})
    members: dict[int, list[int]] = defaultdict(list)
    for x in unknowns:
        if find(x) not in dead:
            members[find(x)].append(x)
    roots = dict.fromkeys([*members, *(root for row in equations for root in row)])
    solutions = _null_space(equations, sorted(roots, key=lambda x: order.get(x, -1)), modulus=2)
    families = [frozenset(x for y in solutions[root] for x in members[y]) for root in roots if root in solutions]
    return [family for family in families if family]


def _null_space(rows: Iterable[Row], unknowns: Sequence[int], modulus: int = 0) -> dict[int, Row]:
    """A basis of the solutions by their free unknown; unknowns late in the order stay free where there is a choice."""
    order = {x: k for k, x in enumerate(unknowns)}
    pivots: dict[int, Row] = {}
    for row in rows:
        current = _reduce(row, pivots, modulus)
        if current:
            pivot = min(current, key=order.__getitem__)
            current = {x: quotient(c, current[pivot]) for x, c in current.items()}
            for other, equation in pivots.items():
                if pivot in equation:
                    pivots[other] = _reduce(equation, {pivot: current}, modulus)
            pivots[pivot] = current
    return {
        free: {free: 1, **{pivot: -equation[free] for pivot, equation in pivots.items() if free in equation}}
        for free in unknowns
        if free not in pivots
    }


def independent(families: Sequence[Row | Vector], known: Sequence[Row | Vector] = (), modulus: int = 0) -> list[int]:
    """Which families are linearly independent, over the rationals, of the known ones and of earlier ones."""
    pivots: dict[int, Row] = {}
    result = []
    for k, vector in enumerate([*known, *families]):
        current = _reduce(vector, pivots, modulus)
        if current:
            pivot = next(iter(current))
            pivots[pivot] = {x: quotient(c, current[pivot]) for x, c in current.items()}
            if k >= len(known):
                result.append(k - len(known))
    return result


def independent_signs(families: Sequence[frozenset[int]], known: Sequence[frozenset[int]] = ()) -> list[int]:
    """Which families are linearly independent over two elements."""
    return independent([dict.fromkeys(f, 1) for f in families], [dict.fromkeys(f, 1) for f in known], modulus=2)


def _reduce(row: Row | Vector, pivots: Mapping[int, Row], modulus: int) -> Row:
    """A row minus the multiples of others that make it zero where these have their pivots."""
    result: Row = dict(row)
    for pivot, equation in pivots.items():
        factor = result.get(pivot, 0)
        for x, c in equation.items() if factor else ():
            result[x] = result.get(x, 0) - factor * c
            if modulus:
                result[x] %= modulus
    return {x: c for x, c in result.items() if c}


@dataclass
class Matrices:
    """Union-find with parity for the slots on which one matrix may act: the same, or its inverse transpose."""

    parent: dict[int, tuple[int, int]] = field(default_factory=dict)
    blocked: set[int] = field(default_factory=set)
    metric: set[int] = field(default_factory=set)
    keeps_ones: set[int] = field(default_factory=set)

    def find(self, x: int) -> tuple[int, int]:
        sign = 1
        self.parent.setdefault(x, (x, 1))
        while self.parent[x][0] != x:
            up, s = self.parent[x]
            sign *= s
            x = up
        return x, sign

    def tie(self, x: int, y: int, parity: int) -> None:
        (a, s), (b, t) = self.find(x), self.find(y)
        if a == b:
            if s * t != parity:
                self.metric.add(a)
            return
        self.parent[b] = (a, s * t * parity)
        for flags in (self.blocked, self.metric, self.keeps_ones):
            if b in flags:
                flags.add(a)

    def block(self, *slots: int) -> None:
        for x in slots:
            self.blocked.add(self.find(x)[0])

    def rotate(self, x: int, *, keeps_ones: bool = False) -> None:
        self.metric.add(self.find(x)[0])
        if keeps_ones:
            self.keeps_ones.add(self.find(x)[0])
