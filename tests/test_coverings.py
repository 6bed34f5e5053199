"""Coverings: the part in CI has every value of both settings, and all parts together are the whole product."""

from itertools import product
from typing import Any

import pytest
from coverings import covering, every_other


def in_ci(cases: list[Any]) -> list[tuple[Any, ...]]:
    return [tuple(case.values) for case in cases if not case.marks]


@pytest.mark.parametrize(("rows", "columns", "of"), [(5, 3, 3), (3, 7, 2), (4, 4, 4), (6, 2, 1)])
def test_each_part_has_every_value_and_all_parts_every_pair(rows: int, columns: int, of: int) -> None:
    first, second = [f"a{i}" for i in range(rows)], [f"b{j}" for j in range(columns)]
    parts = [covering(first, second, part=part, of=of) for part in range(of)]
    for cases in parts:
        assert [tuple(case.values) for case in cases] == list(product(first, second))
        assert {one for one, _ in in_ci(cases)} == set(first)
        assert {other for _, other in in_ci(cases)} == set(second)
        assert all(mark.name == "thorough" for case in cases for mark in case.marks)
    met = [pair for cases in parts for pair in in_ci(cases)]
    assert sorted(met) == sorted(product(first, second))


@pytest.mark.parametrize(("rows", "columns", "of"), [(16, 6, 1), (16, 6, 2), (7, 3, 1)])
def test_a_third_setting_meets_both_others(rows: int, columns: int, of: int) -> None:
    settings = [[f"{letter}{k}" for k in range(count)] for letter, count in (("a", rows), ("b", columns), ("c", 3))]
    met = []
    for part in range(of):
        cases = covering(*settings, part=part, of=of)
        assert [tuple(case.values) for case in cases] == list(product(*settings))
        found = in_ci(cases)
        assert {(one, third) for one, _, third in found} == set(product(settings[0], settings[2]))
        assert {(other, third) for _, other, third in found} == set(product(settings[1], settings[2]))
        met += [(one, other) for one, other, _ in found]
    assert sorted(met) == sorted(product(settings[0], settings[1]))


@pytest.mark.parametrize(("part", "of", "missed"), [(0, 3, "d"), (4, 5, "a")])
def test_what_leaves_values_out_is_refused(part: int, of: int, missed: str) -> None:
    with pytest.raises(ValueError, match=f"part {part} of {of} has no case with {missed}; take fewer parts"):
        covering("ab", "cdef", part=part, of=of)
    with pytest.raises(ValueError, match=r"part 0 of 2 has no case with a and z; take fewer parts"):
        covering("ab", "cdef", "xyz", part=0, of=2)


def test_cases_with_a_path_of_their_own_are_in_every_part() -> None:
    added = [in_ci(covering("ab", "cde", part=part, of=2, own=[("a", "c")])) for part in range(2)]
    plain = [in_ci(covering("ab", "cde", part=part, of=2)) for part in range(2)]
    assert added == [plain[0], [("a", "c"), *plain[1]]]
    with pytest.raises(ValueError, match=r"\('a', 'f'\) is no case"):
        covering("ab", "cde", of=2, own=[("a", "f")])


def test_one_setting_is_dealt_out() -> None:
    parts = [in_ci(every_other("abcde", part=part)) for part in range(2)]
    assert parts == [[("a",), ("c",), ("e",)], [("b",), ("d",)]]
    assert in_ci(every_other("adb", part=1, among="abcde")) == [("d",), ("b",)]
