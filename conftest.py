"""Fixtures and the environment of all tests, of regauge and of the papers."""

import atexit
import gc
import importlib.metadata
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

if os.environ.get("REGAUGE_CHECK_SHAPES"):
    import shape_checks

    shape_checks.install()

# Tests read data sets from REGAUGE_DATA alone: what a user once downloaded must not change what they do.
os.environ["REGAUGE_OFFLINE"] = "1"
os.environ["REGAUGE_DEBUG"] = "1"  # bugs are raised
os.environ["REGAUGE_CACHE"] = tempfile.mkdtemp(prefix="regauge-tests-")
atexit.register(shutil.rmtree, os.environ["REGAUGE_CACHE"], ignore_errors=True)


def announce_papers() -> None:
    """Announce the entry points of `papers/` if its source is on the path but not installed, in this and in child
    processes.
    """
    try:
        importlib.metadata.distribution("regauge-papers")
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads((Path(__file__).parent / "papers" / "pyproject.toml").read_text())["project"]
        folder = Path(os.environ["REGAUGE_CACHE"]) / "entry_points"
        about = folder / f"regauge_papers-{project['version']}.dist-info"
        about.mkdir(parents=True)
        about.joinpath("METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
        about.joinpath("entry_points.txt").write_text(
            "".join(
                f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
                for group, points in project["entry-points"].items()
            )
        )
        sys.path.append(str(folder))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))


announce_papers()


def pytest_collection_finish() -> None:
    """Exclude imported objects from later garbage collections, each of which would visit millions of objects."""
    import hypothesis  # noqa: F401  its plugin imports it in the end, and then looks for objects that are frozen

    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that a quick demo on scikit-learn's digits writes."""
    from regauge.cli.main import main

    folder = tmp_path_factory.mktemp("demo")
    main(["demo", "--quick", "--data", "digits", "--out", str(folder)])
    return folder


@pytest.fixture
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove user-defined rules and leaf modules before the test, and remove the test's own registrations
    afterwards.
    """
    from regauge.discovery import registry

    monkeypatch.setattr(registry, "_RULES", {})
    monkeypatch.setattr(registry, "_LEAVES", {})


@pytest.fixture(params=["BLAS", "oneDNN"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return a function that selects one of torch's libraries for matrix products in single precision, for any size."""
    from regauge.core import products

    if request.param == "oneDNN" and not products.has_onednn():
        pytest.skip("this torch was built without oneDNN")
    count, by_onednn = 0, products._by_onednn

    def counted(a: "Tensor", b: "Tensor", bias: "Tensor | None" = None) -> "Tensor":
        nonlocal count
        count += 1
        return by_onednn(a, b, bias)

    monkeypatch.setattr(products, "LARGE_PRODUCT", 1)
    monkeypatch.setattr(products, "_by_onednn", counted)
    with products.use_library("onednn" if request.param == "oneDNN" else "blas"):
        yield request.param
    assert (count > 0) == (request.param == "oneDNN")


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep networks in files on the disk, for any size."""
    monkeypatch.setattr("regauge.checkpoints.job.FileJob.fits", False)


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make figures without layout, and save a word instead of each, for tests that read only numbers."""

    def save(figure: object, file: Any, **options: object) -> None:
        file.write(b"picture") if hasattr(file, "write") else Path(file).write_bytes(b"picture")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)
    monkeypatch.setattr("matplotlib.figure.Figure.draw_without_rendering", lambda figure: None)


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command, which must be refused and write nothing, and returns the error
    sentence.
    """
    from regauge.cli.main import main

    def written() -> list[Path]:
        return [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts]

    def run(*args: str) -> str:
        before = written()
        with pytest.raises(SystemExit) as stop:
            main(args)
        assert stop.value.code == 2
        lines = capsys.readouterr().err.strip().splitlines()
        (text,) = (line.strip() for line in lines if line.strip() and " left: " not in line)  # that is progress
        assert text.startswith("regauge: ")
        assert "Traceback" not in text
        assert written() == before
        return text

    return run


@pytest.fixture
def resident() -> Callable[[str], int]:
    """Reset the peak of the resident memory. Return a function that reads the peak and the current memory in bytes."""
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not reset.exists():
        pytest.skip("the peak of the resident memory can be reset on Linux only")

    def read(field: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return 1024 * int(line.split()[1])

    try:
        reset.write_text("5")
    except OSError:
        pytest.skip("the peak of the resident memory cannot be reset here")
    return read
