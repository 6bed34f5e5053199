"""Distributions: the wheel has every file of its package, and the source archive has no file of the other package."""

import os
import tarfile
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"regauge": ROOT, "regauge_papers": ROOT / "papers"}
"""The project folder of each package."""
BESIDE_CODE = {"py.typed", "__init__.pyi", "*.html.j2"}
"""Files of a package that are not code: the type marker, stubs, and page templates."""


def _settings(project: Path) -> Any:
    return tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]


def _files(package: str) -> set[str]:
    """Return the paths of a package's files, as in a wheel."""
    source = PACKAGES[package] / "src"
    found = (path for path in (source / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(source).as_posix() for path in found}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_has_the_whole_package(package: str) -> None:
    """Hatch includes all files of a package except files that git ignores."""
    assert _settings(PACKAGES[package])["wheel"] == {"packages": [f"src/{package}"]}
    ignored = [line.strip() for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()]
    names = [pattern.strip("/") for pattern in ignored if pattern and not pattern.startswith(("/", "#"))]
    for path in _files(package):
        assert not [name for name in names if any(fnmatch(part, name) for part in path.split("/"))], path
        last = path.rpartition("/")[2]
        assert last.endswith(".py") or any(fnmatch(last, kind) for kind in BESIDE_CODE), path


def test_types_stubs_and_templates_are_in_the_package() -> None:
    files = _files("regauge")
    assert "regauge/py.typed" in files
    for stub in [path for path in files if path.endswith(".pyi")]:
        assert stub.removesuffix("i") in files
    pages = [path for path in files if path.endswith(".html.j2")]
    assert {path.rpartition("/")[0] for path in pages} == {"regauge/report/templates"}


def test_the_archive_of_sources_has_folders_of_the_root_alone() -> None:
    """A pattern without a leading slash would also include `papers/src`."""
    included = _settings(ROOT)["sdist"]["include"]
    assert all(pattern.startswith("/") and (ROOT / pattern[1:]).exists() for pattern in included)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_hatch_builds(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = pytest.importorskip("hatchling.build")
    monkeypatch.chdir(PACKAGES[package])
    with zipfile.ZipFile(tmp_path / build.build_wheel(os.fspath(tmp_path))) as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == _files(package)
    with tarfile.open(tmp_path / build.build_sdist(os.fspath(tmp_path))) as archive:
        inside = [name.partition("/")[2] for name in archive.getnames()]
        assert {f"src/{path}" for path in _files(package)} <= {*inside}
        assert not [name for name in inside if name.startswith(("papers/", "benchmarks/"))]
