"""The linear systems that determine the scales, signs, shifts and matrices of one atom (a factor of an axis).

Log-scales and shifts satisfy linear equations over the rationals. Signs satisfy linear equations over GF(2). Almost all
equations relate only two unknowns. A union-find solves equations with two unknowns, and elimination solves all others.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from fractions import Fraction
from math import lcm

Vector = dict[int, int]
"""A map from slots (single occurrences of an atom on axes) to exponents."""
Rational = int | Fraction
"""A rational number. Integers are stored as `int`, which is faster than a fraction."""
Row = dict[int, Rational]
"""A map from unknowns to coefficients."""


def quotient(a: Rational, b: Rational) -> Rational:
    """Return a / b without rounding."""
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b
    result = Fraction(a) / b
    return result.numerator if result.denominator == 1 else result


def select(vector: Mapping[int, int], slots: Container[int]) -> Vector:
    """Return the exponents at the given slots (occurrences of an atom on axes)."""
    return {slot: exponent for slot, exponent in vector.items() if slot in slots}


class Proportions:
    """A union-find structure for linear equations. Each unknown is a multiple of its root, which is also an unknown.

    If a root is fixed to zero, all unknowns that are multiples of the root are zero.

    Args:
        order: An order of the unknowns. When an equation joins two roots, the root that is later in `order` stays free.
            By default, the first unknown of an equation determines the free root.
        modulus: The modulus of the coefficients: 2 for signs, and 0 for rational numbers.
    """

    def __init__(self, order: Mapping[int, int] | None = None, modulus: int = 0) -> None:
        self.parent: dict[int, int] = {}
        self.weight: dict[int, Rational] = {}
        self.zero: set[int] = set()
        self.pending: list[Row] = []
        self.order, self.modulus = order, modulus

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
        """Require that the sum of all coefficients times their unknowns is zero. An unknown may occur twice in
        the sum.
        """
        self._use(zip(unknowns, coefficients, strict=True))

    def settle(self) -> None:
        """Apply stored equations as soon as other equations have reduced them to at most two unknowns."""
        changed = True
        while changed:
            rows, self.pending = self.pending, []
            changed = sum(self._use(row.items()) for row in rows) > 0

    def _use(self, row: Iterable[tuple[int, Rational]]) -> bool:
        """Apply an equation that has at most two unknowns. Store a longer equation for later.

        Return whether the equation tied or fixed an unknown.
        """
        reduced: Row = defaultdict(int)
        for x, coefficient in row:
            if coefficient:
                root, weight = self.value(x)
                reduced[root] += coefficient * weight
        terms = [(x, c) for x, c in reduced.items() if (c % self.modulus if self.modulus else c)]
        if len(terms) == 1:
            self.zero.add(terms[0][0])
        elif len(terms) == 2:
            if self.order and self.order[terms[0][0]] < self.order[terms[1][0]]:
                terms.reverse()
            (x, a), (y, b) = terms
            self.parent[y], self.weight[y] = x, 1 if self.modulus else quotient(-a, b)
        elif terms:
            self.pending.append(dict(terms))
        return len(terms) in (1, 2)

    def families(self, unknowns: Sequence[int]) -> list[Vector]:
        """Return a basis of the solutions with integer entries, restricted to the given unknowns."""
        self.settle()
        columns: dict[int, Row] = defaultdict(dict)
        for x in unknowns:
            root, weight = self.value(x)
            if weight:
                columns[root][x] = weight
        tied = sorted({x for row in self.pending for x in row}, key=self.order.__getitem__ if self.order else None)
        solutions: dict[int, Row] = {root: {root: 1} for root in columns if root not in set(tied)}
        solutions |= null_space(self.pending, tied, self.modulus)
        families = []
        for vector in (solutions[root] for root in (columns if self.order else solutions) if root in solutions):
            exponents = {
                x: factor * weight for root, factor in vector.items() for x, weight in columns.get(root, {}).items()
            }
            if exponents:
                scale = lcm(*(e.denominator for e in exponents.values()))
                families.append({x: int(e * scale) for x, e in exponents.items() if e})
        return families


def null_space(rows: Iterable[Row], unknowns: Sequence[int], modulus: int = 0) -> dict[int, Row]:
    """Return a basis of the solutions of linear equations, by free unknown.

    If several sets of unknowns could be free, later unknowns are chosen.
    """
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
    sign = 1 if modulus == 2 else -1  # Modulo two, minus one is one.
    return {
        free: {free: 1, **{pivot: sign * equation[free] for pivot, equation in pivots.items() if free in equation}}
        for free in unknowns
        if free not in pivots
    }


def independent(families: Sequence[Row | Vector], known: Sequence[Row | Vector] = (), modulus: int = 0) -> list[int]:
    """Return the indices of those families that are linearly independent of known families and of one another."""
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


def combination(rows: Sequence[Mapping[int, int]], target: Mapping[int, int], modulus: int = 0) -> Row | None:
    """Return coefficients, by row index, with which the rows sum to a target. Return None if no coefficients exist."""
    last = len(rows)
    columns: dict[int, Row] = defaultdict(dict)
    for k, row in enumerate([*rows, {x: -c for x, c in target.items()}]):
        for x, c in row.items():
            columns[x][k] = c
    found = null_space(columns.values(), range(last + 1), modulus).get(last)
    return None if found is None else {k: c for k, c in found.items() if k != last and c}


def _reduce(row: Row | Vector, pivots: Mapping[int, Row], modulus: int) -> Row:
    """Subtract multiples of pivot rows from a row, such that the row becomes zero at every pivot."""
    result: Row = dict(row)
    for pivot, equation in pivots.items():
        factor = result.get(pivot, 0)
        for x, c in equation.items() if factor else ():
            result[x] = result.get(x, 0) - factor * c
    reduced = {x: c % modulus if modulus else c for x, c in result.items()}
    return {x: c for x, c in reduced.items() if c}


class MatrixSlots(Proportions):
    """A union-find of slots on which one matrix may act: directly (+1), or as its inverse transpose (-1)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked: set[int] = set()
        self.metric: set[int] = set()
        self.keeps_ones: set[int] = set()

    def tie(self, x: int, y: int, parity: int) -> None:
        (a, s), (b, t) = self.find(x), self.find(y)
        if a == b:
            if s * t != parity:
                # The ties lead back to the same slot with A in one place and A^-T in the other: A is orthogonal.
                self.metric.add(a)
            return
        self.parent[b], self.weight[b] = a, s * t * parity
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
