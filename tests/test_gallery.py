"""A short script makes every picture of the docs, and runs with small settings; the notebooks run, too."""

import json
import runpy
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
SCRIPTS = sorted((DOCS / "gallery").glob("*.py"))
PAGE = (DOCS / "gallery.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def made() -> set[str]:
    """Return the names of the pictures that the scripts made."""
    return set()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_run_in_small(script: Path, made: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path), "--quick"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(script), run_name="__main__")
    pictures = {path.name for path in tmp_path.iterdir()}
    assert pictures
    assert all(f"({name})" in PAGE for name in pictures)
    assert f":::{{literalinclude}} gallery/{script.name}\n" in PAGE
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 40
    made |= pictures


def test_every_picture_has_a_script(made: set[str], request: pytest.FixtureRequest) -> None:
    if request.session.testscollected < len(SCRIPTS):
        pytest.skip("the scripts did not run")
    assert made == {path.name for path in DOCS.rglob("*.png") if "_build" not in path.parts}


@pytest.mark.parametrize("notebook", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run_and_are_stored_without_results(notebook: Path) -> None:
    names: dict[str, object] = {"__name__": "notebook"}
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert cells
    for cell in cells:
        assert not cell["outputs"]
        assert cell["execution_count"] is None
        exec("".join(line for line in cell["source"] if not line.startswith("%")), names)
