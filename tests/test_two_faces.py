"""A command and its Python function: the same files give the same numbers and the same tensors."""

import math
from typing import Any

import pytest
from coverings import covering
from torch import Tensor
from two_faces import FACES, MODULES, Case


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {name: Case.make(name, tmp_path_factory.mktemp(name)) for name in MODULES}


OWN = [("merge", "normed"), ("repair", "normed"), ("canonicalize", "normed"), ("prune", "masked"), ("gauge", "halved")]
"""Networks with recomputed or stored running statistics, units tied by masks, and 16-bit numbers."""


@pytest.mark.parametrize(("verb", "name"), covering(FACES, MODULES, part=2, own=OWN))
def test_both_faces_agree(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, verb: str, name: str
) -> None:
    monkeypatch.chdir(cases[name].folder)
    if "compare" not in verb:  # Pages of other verbs are not compared.
        request.getfixturevalue("unsaved")
    said, computed = FACES[verb](cases[name])
    said, computed = flat(said), flat(computed)
    assert said.keys() == computed.keys()
    assert {place: (said[place], computed[place]) for place in said if not agree(said[place], computed[place])} == {}


def agree(x: Any, y: Any) -> bool:
    return math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9) if isinstance(x, float) else x == y


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return all numbers and texts of nested values, by their paths."""
    if isinstance(value, Tensor):
        return flat(value.double().flatten().tolist(), name) | {f"{name} dtype": str(value.dtype)}
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    else:
        return {name: value}
    return {place: one for key, part in parts for place, one in flat(part, f"{name}.{key}").items()}
