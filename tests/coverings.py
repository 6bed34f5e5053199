"""Coverings: the part of a product of settings that runs in CI. `make thorough` runs all remaining cases."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def covering(
    first: Iterable[str],
    second: Iterable[str],
    third: Iterable[str] | None = None,
    *,
    part: int = 0,
    of: int = 3,
    own: Collection[tuple[str, ...]] = (),
) -> list[Any]:
    """Return the product of two or three settings as cases. All cases outside of one part are marked as thorough.

    The diagonals of the table of the first two settings are assigned to the parts in turn. Therefore every pair is in
    one part, and laws over the same settings that take different parts together test every pair. Each pair is combined
    with one value of the third setting, in turn along the diagonals. In every part, each value of a setting is combined
    with every value of the third setting.

    Args:
        first: Names of the values of one setting.
        second: Names of the values of a second setting.
        third: Names of the values of a third setting, if there is a third setting.
        part: The part that runs in CI, from 0.
        of: Number of parts.
        own: Cases with a separate path through the code, which run in CI for any part.

    Raises:
        ValueError: The part would miss a value, or a pair of a value with a value of the third setting. Also raised if
            an entry of `own` is not a case.
    """
    rows, columns = list(first), list(second)
    depths: list[tuple[str, ...]] = [()] if third is None else [(name,) for name in third]
    diagonals = {(row, column): i + j for (i, row), (j, column) in product(enumerate(rows), enumerate(columns))}
    chosen = {(*pair, *depths[k // of % len(depths)]) for pair, k in diagonals.items() if k % of == part}
    for place, values in enumerate((rows, columns)):
        met = {(case[place], *case[2:]) for case in chosen}
        missed = [(value, *depth) for value, depth in product(values, depths) if (value, *depth) not in met]
        if missed:
            raise ValueError(f"part {part} of {of} has no case with {' and '.join(missed[0])}; take fewer parts")
    cases = [(*pair, *depth) for pair in diagonals for depth in depths]
    if unknown := set(own).difference(cases):
        raise ValueError(f"{sorted(unknown)[0]} is no case")
    return [
        pytest.param(*case, marks=() if case in chosen or case in own else pytest.mark.thorough, id="-".join(case))
        for case in cases
    ]


def every_other(names: Iterable[str], *, part: int, among: Iterable[str] | None = None) -> list[Any]:
    """Return the values of one setting, of which every second value runs in CI: the even or the odd values.

    Two laws over the same values that take both parts together test every value. If laws have different values, the
    values are counted `among` a common list.
    """
    names = list(names)
    place = {name: k for k, name in enumerate(names if among is None else among)}
    return [
        pytest.param(name, marks=() if place[name] % 2 == part else pytest.mark.thorough, id=name) for name in names
    ]
