"""Files with random damage: documents with changed values, and bounds that their readers must keep."""

import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

SECONDS, NBYTES = 10, 3 << 30
"""The limits for reading one file: processor seconds, which other work on the machine does not lengthen, and memory."""
PHASES = [Phase.generate]
"""Settings without a search for a smaller failing example, because there are few changes and reading may be slow."""
EXAMPLES = [pytest.param(40), pytest.param(2000, marks=pytest.mark.thorough)]
"""The number of files that are tried."""
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**12, 10**400, 0.5, -0.0, 1e308, "", "w", "\x1b[31m", "(a|aa)+x", "../../x",
    "/dev/zero", [], [[]], {}, {"a": {}}, ["w"] * 50, [10**9, 10**9],
]  # fmt: skip
"""The values that replace a value of a document."""
VALUES = st.sampled_from([*ODD, "remove"]) | st.integers() | st.text(max_size=5)
LIMITED = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited on Linux alone")
"""A mark for tests in which memory is bounded."""


@dataclass(frozen=True)
class Kind:
    """A kind of document.

    Attributes:
        read: A function that puts a document into a folder, and reads the document.
        right: A function that returns a valid document, made in a folder.
        named: The part of an error message that names the document's place; empty if the document is not read from a
            file.
        is_refused: Whether damaged documents are ever refused. Some kinds are ignored with a note.
        use: A function that uses the result of reading.
    """

    read: Callable[[Path, Any], object]
    right: Callable[[Path], Any]
    named: str = ""
    is_refused: bool = True
    use: Callable[[Any], object] = repr


def check_kind(kind: Kind, folder: Path, examples: int) -> None:
    """Read a valid document, and many documents with changed values. Each changed document is read, or refused with its
    name, and some documents are refused.

    Reading the valid document shows that the changed documents reach the code under test.
    """
    document = json.loads(json.dumps(kind.right(folder)))
    kind.use(kind.read(folder, document))
    refused: list[str] = []
    unusable: list[str] = []
    count = len(list(_places(document)))

    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, phases=PHASES,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(
        changes=st.lists(
            st.tuples(
                st.sampled_from(range(count)), st.sampled_from([*ODD, "remove"]) | st.integers() | st.text(max_size=5)
            ),
            max_size=3,
        )
    )
    def check(changes: list[tuple[int, Any]]) -> None:
        other = _changed(document, [place for place, _ in changes], [value for _, value in changes])
        found = None
        with bounded(refused):
            found = kind.read(folder, other)
        with bounded(unusable):
            kind.use(found) if found is not None else None

    check()
    assert bool(refused) == kind.is_refused
    assert all(kind.named in told for told in refused), [told for told in refused if kind.named not in told][:3]


def damage_bytes(read: Callable[[Path], object], path: Path, examples: int) -> list[str]:
    """Read a file many times with changed bytes or a missing end. Return the messages of refusals, of which there must
    be some.
    """
    content, refused = path.read_bytes(), list[str]()

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None, phases=PHASES)
    @given(
        changes=st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=6),
        end=st.just(len(content)) | st.integers(0, len(content)),
    )
    def check(changes: list[tuple[int, int]], end: int) -> None:
        damaged = bytearray(content)
        for place, value in changes:
            damaged[place] = value
        path.write_bytes(damaged[:end])
        with bounded(refused):
            read(path)

    check()
    assert refused
    return refused


@contextmanager
def bounded(refused: list[str]) -> Iterator[None]:
    """Check that memory above the current memory and time stay small. The sentence of a refusal is added to a list."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + NBYTES, before[1]))
    begin = time.process_time()
    try:
        yield
    except (ValueError, KeyError, OSError) as error:
        assert " " in str(error)  # noqa: PT017
        refused.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - begin < SECONDS


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths of the values of a document."""
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from _places(one, (*place, key))


def _changed(document: Any, places: list[int], values: list[Any]) -> Any:
    """Return a document with changed values in some places."""
    document = json.loads(json.dumps(document))
    for number, value in zip(places, values, strict=True):
        found = list(_places(document))
        *above, last = found[number % len(found)] or ("",)
        if last == "":
            continue
        inner = document
        for key in above:
            inner = inner[key]
        if value == "remove" and isinstance(inner, dict):
            del inner[last]
        else:
            inner[last] = deepcopy(value)
    return document
