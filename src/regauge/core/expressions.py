"""Regular expressions from files, matched in a time that depends only on the lengths of the pattern and the name.

Python's `re` backtracks: matching `(a|aa)+x` against a name of 60 letters takes impractically long. This module follows
all possible matches at once instead of backtracking.

References:
    Thompson (1968), Regular expression search algorithm.
"""

import re
from typing import Literal

LONGEST_PATTERN = 2_000
"""The largest number of characters of a regular expression."""
MOST_STATES = 5_000
"""The largest number of states of a compiled regular expression.

A counted repetition such as `a{3}` is expanded into separate states.
"""
KEPT = 10_000
"""The largest number of cached steps of the matcher."""
PLAIN = re.compile(r"(?:[\w.-]|\\\.)*")
"""Regular expressions that Python's `re` can match without backtracking."""
Step = re.Pattern[str] | Literal["", "^", "$"]
"""The condition of a transition between two states: a character, nothing, or the beginning or end of the name."""
States = frozenset[int]


class Expression:
    """A regular expression with characters, classes, groups, alternatives and repetitions.

    Args:
        text: The pattern in the syntax of `re`, without backreferences, lookahead and lookbehind.

    Raises:
        ValueError: The text is not a regular expression, or is too long.
    """

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST_PATTERN:
            raise ValueError(
                f"the pattern {text[:40]!r}... has {len(text)} characters, but {LONGEST_PATTERN} at most are read"
            )
        try:
            whole = re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{text!r} is no regular expression: {error}; correct it") from error
        self._plain = whole if PLAIN.fullmatch(text) else None
        self._text, self._place = text, 0
        self._steps: list[list[tuple[Step, int]]] = []
        self._known: dict[tuple[States, str], States] = {}
        try:
            self._first, self._last = self._alternatives()
        except RecursionError as error:
            raise ValueError(f"the pattern {text[:40]!r}... is nested too deeply; write it shorter") from error
        if self._place < len(text):
            raise self._refuse()

    def fullmatch(self, name: str) -> bool:
        """Return whether the expression matches the whole name."""
        if self._plain is not None:
            return self._plain.fullmatch(name) is not None
        states = self._close({self._first}, is_first=True, is_last=not name)
        for place, character in enumerate(name, 1):
            key = (states, character if place < len(name) else character + "$")
            if key not in self._known:
                if len(self._known) > KEPT:
                    self._known.clear()
                found = {
                    to for one in states for step, to in self._steps[one]
                    if isinstance(step, re.Pattern) and step.fullmatch(character)
                }  # fmt: skip
                self._known[key] = self._close(found, is_last=place == len(name))
            states = self._known[key]
        return self._last in states

    def match(self, name: str) -> bool:
        """Return whether the expression matches the beginning of the name."""
        return any(self.fullmatch(name[:end]) for end in range(len(name) + 1))

    def _close(self, states: set[int], *, is_first: bool = False, is_last: bool = False) -> States:
        passed = {"", *("^" if is_first else ""), *("$" if is_last else "")}
        found, left = set(states), list(states)
        while left:
            new = {to for step, to in self._steps[left.pop()] if isinstance(step, str) and step in passed} - found
            found |= new
            left += new
        return frozenset(found)

    def _state(self) -> int:
        if len(self._steps) >= MOST_STATES:
            raise ValueError(f"the pattern {self._text[:40]!r} repeats too much; write it shorter")
        self._steps.append([])
        return len(self._steps) - 1

    def _join(self, start: int, step: Step, end: int) -> None:
        self._steps[start].append((step, end))

    def _refuse(self) -> ValueError:
        return ValueError(
            f"the pattern {self._text!r} cannot be read at character {self._place + 1}; use only characters, classes, "
            "groups, alternatives and repetitions"
        )

    def _next(self, count: int = 1) -> str:
        return self._text[self._place : self._place + count]

    def _alternatives(self) -> tuple[int, int]:
        start, end = self._state(), self._state()
        while True:
            first, last = self._sequence()
            self._join(start, "", first)
            self._join(last, "", end)
            if self._next() != "|":
                return start, end
            self._place += 1

    def _sequence(self) -> tuple[int, int]:
        start = end = self._state()
        while self._next() not in ("", "|", ")"):
            first, last = self._repeated()
            self._join(end, "", first)
            end = last
        return start, end

    def _repeated(self) -> tuple[int, int]:
        begin = self._place
        start, end = self._atom()
        after = self._place
        found = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}").match(self._text, after)
        if found is None or found[0] in ("{}", "{,}"):
            return start, end
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(found[0], (int(found[1] or 0), None))
        if found[2] is not None and not (found[2] and not found[3]):
            most = int(found[3] or found[1])
        self._place = found.end() + (self._text[found.end() : found.end() + 1] == "?")
        behind = self._place
        if self._next() in ("*", "+", "?"):
            raise self._refuse()
        first = last = self._state()
        for k in range(least if most is None else most):
            self._place = begin
            start, end = self._atom()
            self._join(last, "", start)
            out = self._state()
            self._join(end, "", out)
            if k >= least:
                self._join(last, "", out)
            last = out
        if most is None:
            self._place = begin
            start, end = self._atom()
            self._join(last, "", start)
            self._join(end, "", last)
        self._place = behind
        return first, last

    def _atom(self) -> tuple[int, int]:
        if self._next() == "(":
            self._place += 3 if self._next(3) == "(?:" else 1
            if self._next() == "?":
                raise self._refuse()
            pair = self._alternatives()
            self._place += 1
            return pair
        start, end = self._state(), self._state()
        if self._next() in ("^", "$"):
            self._join(start, "^" if self._next() == "^" else "$", end)
            self._place += 1
            return start, end
        found = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\[dDwWsS\W]|[^\\]", re.DOTALL).match(self._text, self._place)
        if found is None:
            raise self._refuse()
        self._join(start, re.compile(found[0] if len(found[0]) > 1 or found[0] == "." else re.escape(found[0])), end)
        self._place = found.end()
        return start, end
