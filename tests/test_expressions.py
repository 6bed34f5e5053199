"""Regular expressions from files give the results of `re`, in a time that no pattern can make long."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.core.expressions import Expression

PATTERNS = [
    "", "a", "a|b", "(a|aa)+x", "a*", "a+?b", "(?:ab)?c", "[a-c.]+", "[^a]*", r"\w+\.b", r".*\.b", "a{2}", "a{1,3}b",
    "a{2,}", "(a|b){0,2}c", "^a", "a$", "(.*\\.)?(a|b)", r"(.*\.)?(^a\.\w$)", "[]a]", r"[\]b]", "(a*)*", "((a|b)*c|d)*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=60, derandomize=True, deadline=None)
@given(name=st.text(alphabet="abcx.]", max_size=7))
def test_it_matches_as_re_does(pattern: str, name: str) -> None:
    expression = Expression(pattern)
    assert expression.fullmatch(name) == (re.fullmatch(pattern, name) is not None)
    if "$" not in pattern:
        assert expression.match(name) == (re.match(pattern, name) is not None)


@pytest.mark.parametrize("pattern", ["(a|aa)+x", "(a+)+x", "(a|a)*x", ".*.*.*.*.*.*x", "a?" * 40 + "a" * 40, "(a*)*x"])
def test_no_pattern_is_endless(pattern: str) -> None:
    assert not Expression(pattern).fullmatch("a" * 300)


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        "[a",
        "a**",
        r"(a)\1",
        "(?=a)",
        "(?i)a",
        "a{99999}",
        "(((a{99}){99}){99}){99}",
        "a" * 3000,
        "(" * 900 + ")" * 900,
    ],
)
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"pattern|expression"):
        Expression(pattern)
