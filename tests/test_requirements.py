"""constraints.txt has a version of every direct dependency that fits pyproject.toml."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
DIRECT = [
    one
    for text in (
        *PROJECT["dependencies"],
        *(text for name, extra in EXTRAS.items() if name != "bench" for text in extra),
    )
    if (one := Requirement(text)).name != PROJECT["name"]
]
KNOWN = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)


@pytest.mark.parametrize("wanted", DIRECT, ids=lambda one: one.name)
def test_a_good_version_of_every_direct_dependency_is_known(wanted: Requirement) -> None:
    assert KNOWN[canonicalize_name(wanted.name)] in wanted.specifier
