"""The linear systems behind scales, signs, shifts and matrices of one atom.

Log-scales obey linear equations over the rationals, signs over the field of two elements, shifts over the
reals; almost all equations tie two unknowns, so a union-find with weights does most of the work and the
rest is eliminated.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import lcm

Vector = dict[int, int]
"""Exponents by slot."""


class Weighted:
    """Union-find where each unknown is a rational multiple of its root, and roots can be fixed to zero."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}
        self.weight: dict[int, Fraction] = {}
        self.zero: set[int] = set()
        self.pending: list[dict[int, Fraction]] = []

    def find(self, x: int) -> tuple[int, Fraction]:
        if x not in self.parent:
            self.parent[x], self.weight[x] = x, Fraction(1)
        chain = []
        while self.parent[x] != x:
            chain.append(x)
            x = self.parent[x]
        total = Fraction(1)
        for y in reversed(chain):
            total *= self.weight[y]
            self.parent[y], self.weight[y] = x, total
        return x, total

    def value(self, x: int) -> tuple[int, Fraction]:
        root, weight = self.find(x)
        return (root, Fraction(0)) if root in self.zero else (root, weight)

    def fix(self, x: int) -> None:
        self.zero.add(self.find(x)[0])

    def equation(self, row: Mapping[int, Fraction]) -> None:
        """sum of coefficient * unknown = 0."""
        reduced = self._reduced(row)
        if len(reduced) <= 2:
            self._apply(reduced)
        else:
            self.pending.append(reduced)

    def settle(self) -> None:
        """Use the longer equations as far as the shorter ones have made them short."""
        changed = True
        while changed:
            changed = False
            rows, self.pending = self.pending, []
            for row in rows:
                reduced = self._reduced(row)
                if len(reduced) <= 2:
                    changed |= bool(reduced)
                    self._apply(reduced)
                else:
                    self.pending.append(reduced)

    def _reduced(self, row: Mapping[int, Fraction]) -> dict[int, Fraction]:
        result: dict[int, Fraction] = defaultdict(Fraction)
        for x, coefficient in row.items():
            root, weight = self.value(x)
            result[root] += coefficient * weight
        return {x: c for x, c in result.items() if c}

    def _apply(self, row: Mapping[int, Fraction]) -> None:
        if len(row) == 1:
            self.zero.add(next(iter(row)))
        elif len(row) == 2:
            (x, a), (y, b) = row.items()
            self.parent[y], self.weight[y] = x, -a / b


def scale_families(unknowns: Weighted, slots: Sequence[int]) -> list[Vector]:
    """Independent integer exponent vectors over the given slots that solve all equations."""
    unknowns.settle()
    columns: dict[int, dict[int, Fraction]] = defaultdict(dict)
    for slot in slots:
        root, weight = unknowns.value(slot)
        if weight:
            columns[root][slot] = weight
    rows = [dict(row) for row in unknowns.pending]
    tied = sorted({x for row in rows for x in row})
    basis = [{root: Fraction(1)} for root in columns if root not in set(tied)]
    basis += _null_space(rows, tied)
    families = []
    for vector in basis:
        exponents: dict[int, Fraction] = {}
        for root, factor in vector.items():
            for slot, weight in columns.get(root, {}).items():
                exponents[slot] = factor * weight
        if exponents:
            scale = lcm(*(e.denominator for e in exponents.values()))
            families.append({slot: int(e * scale) for slot, e in exponents.items() if e})
    return families


def _null_space(rows: list[dict[int, Fraction]], unknowns: Sequence[int]) -> list[dict[int, Fraction]]:
    """A basis of the solutions; unknowns late in the order stay free where there is a choice."""
    pivots: dict[int, dict[int, Fraction]] = {}
    order = {x: k for k, x in enumerate(unknowns)}
    for row in rows:
        current = dict(row)
        for pivot, equation in pivots.items():
            factor = current.get(pivot)
            if factor:
                current = _combined(current, equation, -factor)
        if not current:
            continue
        pivot = min(current, key=lambda x: order[x])
        lead = current[pivot]
        current = {x: c / lead for x, c in current.items()}
        for other, equation in pivots.items():
            factor = equation.get(pivot)
            if factor:
                pivots[other] = _combined(equation, current, -factor)
        pivots[pivot] = current
    basis = []
    for free in unknowns:
        if free not in pivots:
            vector = {free: Fraction(1)}
            for pivot, equation in pivots.items():
                if free in equation:
                    vector[pivot] = -equation[free]
            basis.append(vector)
    return basis


def _combined(row: Mapping[int, Fraction], other: Mapping[int, Fraction], factor: Fraction) -> dict[int, Fraction]:
    result = dict(row)
    for x, c in other.items():
        result[x] = result.get(x, Fraction(0)) + factor * c
    return {x: c for x, c in result.items() if c}


def sign_families(rows: Iterable[frozenset[int]], zero: Iterable[int], unknowns: Sequence[int]) -> list[frozenset[int]]:
    """A basis of the solutions over two elements; unknowns late in the order stay free where there is a choice."""
    parent: dict[int, int] = {}

    def find(x: int) -> int:
        parent.setdefault(x, x)
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    longer, singles = [], list(zero)
    order = {x: k for k, x in enumerate(unknowns)}
    for row in rows:
        if len(row) == 1:
            singles.extend(row)
        elif len(row) == 2:
            x, y = (find(v) for v in row)
            if x != y:
                early, late = sorted((x, y), key=lambda v: order.get(v, -1))
                parent[early] = late
        elif row:
            longer.append(row)
    dead = {find(x) for x in singles}
    equations: list[frozenset[int]] = []
    for row in longer:
        current: frozenset[int] = frozenset()
        for x in row:
            root = find(x)
            if root not in dead:
                current ^= {root}
        equations.append(current)
    pivots: dict[int, frozenset[int]] = {}
    for current in equations:
        for pivot, equation in pivots.items():
            if pivot in current:
                current ^= equation
        if not current:
            continue
        pivot = min(current, key=lambda x: order.get(x, -1))
        for other, equation in list(pivots.items()):
            if pivot in equation:
                pivots[other] = equation ^ current
        pivots[pivot] = current
    members: dict[int, list[int]] = defaultdict(list)
    for x in unknowns:
        members[find(x)].append(x)
    roots = [root for root in dict.fromkeys(find(x) for x in unknowns) if root not in dead]
    involved = {x for equation in pivots.values() for x in equation}
    roots = list(dict.fromkeys([*roots, *involved]))
    basis = []
    for free in roots:
        if free in pivots:
            continue
        support = {free} | {pivot for pivot, equation in pivots.items() if free in equation}
        vector = frozenset(x for root in support for x in members[root])
        if vector:
            basis.append(vector)
    return basis


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

    def block(self, x: int) -> None:
        self.blocked.add(self.find(x)[0])

    def rotate(self, x: int, *, keeps_ones: bool = False) -> None:
        self.metric.add(self.find(x)[0])
        if keeps_ones:
            self.keeps_ones.add(self.find(x)[0])


def independent(families: Sequence[Vector], known: Sequence[Vector] = ()) -> list[int]:
    """Which families are linearly independent, over the rationals, of the known ones and of earlier ones."""
    pivots: dict[int, dict[int, Fraction]] = {}
    result = []
    for k, vector in enumerate([*known, *families]):
        current = {x: Fraction(c) for x, c in vector.items()}
        for pivot, row in pivots.items():
            if current.get(pivot):
                current = _combined(current, row, -current[pivot])
        if current:
            pivot = next(iter(current))
            lead = current[pivot]
            pivots[pivot] = {x: c / lead for x, c in current.items()}
            if k >= len(known):
                result.append(k - len(known))
    return result


def independent_signs(families: Sequence[frozenset[int]], known: Sequence[frozenset[int]] = ()) -> list[int]:
    """The same over two elements."""
    pivots: dict[int, frozenset[int]] = {}
    result = []
    for k, vector in enumerate([*known, *families]):
        current = vector
        for pivot, row in pivots.items():
            if pivot in current:
                current ^= row
        if current:
            pivots[next(iter(current))] = current
            if k >= len(known):
                result.append(k - len(known))
    return result
