"""Buffers that take part in balancing: gains of frozen normalization, without which scales have no smallest norm."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from regauge.core.remembered import remembered
from regauge.core.symmetry import Symmetry

Exponents = tuple[tuple[int, int], ...]
"""The action of scales on some values of a tensor: numbers of families and exponents."""
Terms = tuple[tuple[str, Exponents], ...]

LENGTH_COST = 1e-4
"""The cost of the length of a way, relative to the gain of a row that shrinks."""


@remembered
def count_frozen_gains(symmetry: Symmetry, buffers: Literal["move", "keep"]) -> Symmetry:
    """The symmetry, with those buffers among the parameters that balancing needs.

    Where gains are buffers, as in a normalization that is not trained, filters around them could be made ever smaller
    at their expense. So the buffers that move along such a way count. Which these are follows from the exponents of the
    scales, not from values: a way is a vector t of logarithms, one for each family, along which no parameter grows,
    `E t <= 0`, and some shrink. Running statistics of trained normalization lie on no such way. Where buffers are kept
    nothing needs them.
    """
    families = [(group.name, k) for group in symmetry.groups for k in range(group.scales)]
    number = {family: k for k, family in enumerate(families)}
    acting: dict[str, dict[int, list[Exponents]]] = {}
    for group in symmetry.groups:
        for place in group.placements:
            if any(place.scale):
                found = tuple((number[group.name, k], e) for k, e in enumerate(place.scale) if e)
                acting.setdefault(place.parameter, {}).setdefault(place.axis, []).append(found)
    if buffers == "keep" or not acting.keys() & set(symmetry.buffers):
        return symmetry
    # The values of a tensor of which each axis has one of several placements.
    terms = tuple(
        dict.fromkeys((name, sum(each, ())) for name, axes in acting.items() for each in product(*axes.values()))
    )
    needed = _needed(terms, frozenset(symmetry.buffers), len(families))
    return replace(symmetry, buffers=tuple(n for n in symmetry.buffers if n not in needed)) if needed else symmetry


def _needed(terms: Terms, buffers: frozenset[str], count: int) -> frozenset[str]:
    needed: frozenset[str] = frozenset()
    while True:
        compared = _rows([term for term in terms if term[0] not in buffers - needed], count)
        way = _shrinking(compared)
        rest = [term for term in terms if term[0] in buffers - needed]
        found = {name for (name, _), change in zip(rest, _rows(rest, count) @ way, strict=True) if abs(change) > 1e-6}
        if not found:
            return needed
        needed |= found


def _rows(terms: Sequence[tuple[str, Exponents]], count: int) -> NDArray[np.float64]:
    rows = np.zeros((len(terms), count))
    for row, (_, exponents) in zip(rows, terms, strict=True):
        for family, exponent in exponents:
            row[family] += exponent
    return rows


def _shrinking(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """A short way along which as many rows as possible shrink, by one at least, and none grows; else zero."""
    terms, count = rows.shape
    # Maximize sum s over 0 <= s <= 1 with rows (up - down) + s <= 0: at the optimum every s is zero or one.
    costs = np.concatenate([np.full(2 * count, LENGTH_COST), -np.ones(terms)])
    limits = np.concatenate([rows, -rows, np.eye(terms)], 1)
    bounds = [(0, None)] * (2 * count) + [(0, 1)] * terms
    found = linprog(costs, A_ub=limits, b_ub=np.zeros(terms), bounds=bounds).x
    if found is None or found[2 * count :].max(initial=0) < 0.5:
        return np.zeros(count)
    return found[:count] - found[count : 2 * count]
