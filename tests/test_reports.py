"""Reports as JSON: one object on the standard output with the facts of the text, not rounded, and nothing else."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import regauge as rg
from regauge.checkpoints.alignments import Alignment
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli import output
from regauge.cli.main import main
from regauge.core.interpolation import distance

MODELS = """
import torch
from torch import nn

print("printed by the user's code")


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), torch.ones(2, 4)


def batches():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 4, generator=generator), torch.randint(0, 3, (16,), generator=generator))]
"""
MODEL = ["--model", "mynets.py:model"]
DATA = [*MODEL, "--data", "mynets.py:batches"]
PAIR = ["a.safetensors", "b.safetensors"]
COMMANDS: dict[str, tuple[list[str], set[str]]] = {
    "discover": (["mynets.py:model", "-o", "s.json"], {"symmetry", "log10_order", "dimension", "written"}),
    "align": ([*PAIR, *MODEL, "-o", "o.safetensors"], {"gains", "alignment", "written"}),
    "align with data": ([*PAIR, *DATA, "-o", "o.safetensors"], {"gains", "alignment", "written"}),
    "align, the plan": (
        [*PAIR, *MODEL, "-o", "o.safetensors", "--dry-run", "--memory", "500MB"],
        {"memory_bytes"},
    ),
    "merge": ([*PAIR, *MODEL, "-o", "o.safetensors"], {"record", "written"}),
    "canonicalize": (["a.safetensors", *MODEL, "-o", "c.safetensors"], {"spheres", "left", "written"}),
    "apply": (["b.alignment.safetensors", "b.safetensors", "-o", "m.safetensors"], {"written"}),
    "repair": (
        ["a.safetensors", *DATA, "-o", "r.safetensors", "--endpoints", *PAIR],
        {"variances", "networks", "written"},
    ),
    "line": ([*PAIR, *DATA, "--points", "3", "-o", "l.svg"], {"table", "barrier", "raw_barrier", "auc", "written"}),
    "plane": (
        [*PAIR, "c0.safetensors", *DATA, "--resolution", "3", "-o", "p.svg"],
        {"table", "written"},
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a model, data, networks and an alignment."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mynets.py").write_text(MODELS)
    for seed, name in enumerate(("a", "b", "c0")):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        save(module.state_dict(), f"{name}.safetensors")
    symmetry = rg.discover(module.eval(), (torch.ones(2, 4),))
    generator = torch.Generator().manual_seed(0)
    Alignment(symmetry, symmetry.random(generator)).save("b.alignment.safetensors")
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_one_object(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    args, keys = COMMANDS[name]
    command = name.partition(",")[0].split()[0]
    main([command, *args, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert [document.pop(key) for key in ("format", "version", "command")] == ["regauge.report", 1, command]
    assert keys <= document.keys()
    for path in document.get("written", []):
        assert Path(path).exists()
        Path(path).unlink()
    main([command, *args])
    text = capsys.readouterr().out
    assert "printed by the user's code" in text or command == "apply"
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


def test_numbers_are_not_rounded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["align", *PAIR, *MODEL, "-o", "o.safetensors", "--json"])
    document = json.loads(capsys.readouterr().out)
    (gain,) = document["gains"]
    a, b, moved = (load(f"{name}.safetensors") for name in "abo")
    buffers = ("1.running_mean", "1.running_var")
    assert gain["name"] == "distance between A and B"
    assert gain["before"] == pytest.approx(distance(a, b, buffers), rel=1e-12)
    assert gain["after"] == pytest.approx(distance(a, moved, buffers), rel=1e-6)
    assert document["alignment"]["objective"] >= document["alignment"]["initial"]
    main(["discover", "mynets.py:model", "--json"])
    symmetry = json.loads(capsys.readouterr().out)["symmetry"]
    assert rg.Symmetry.from_json(json.dumps(symmetry)).groups


def test_a_refused_command_prints_no_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["align", "a.safetensors", "nothing.safetensors", *MODEL, "-o", "o.safetensors", "--json"])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.strip().splitlines()[-1].startswith("regauge: there is no checkpoint")
    main(["apply", "b.alignment.safetensors", "b.safetensors", "-o", "m.safetensors"])
    assert capsys.readouterr().out == "written: m.safetensors\n"


def test_the_output_does_not_depend_on_how_it_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[dict[str, bytes]] = []
    for args in (["--json"], []):
        main(["merge", *PAIR, *MODEL, "-o", "o.safetensors", "--overwrite", *args])
        written.append({path.name: path.read_bytes() for path in folder.glob("o.*")})
    assert written[0] == written[1]


def test_facts_are_joined_and_plain(capsys: pytest.CaptureFixture[str]) -> None:
    def tell_all() -> None:
        output.tell("a note")
        output.tell("one", values=[1.0, float("nan")], path=Path("x"))
        output.tell("two", values=[2])
        output.tell_table("table", [{"": "row", "x": 1 / 3, "n": 1234}], "a title", digits=3)
        output.tell_written(Path("a/b.txt"), Path("a/c.txt"))

    with output.report("try", as_json=True):
        tell_all()
        sys.stdout.write("something else\n")
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "format": "regauge.report",
        "version": 1,
        "command": "try",
        "notes": ["a note"],
        "values": [1.0, None, 2],
        "path": "x",
        "table": [{"name": "row", "x": 1 / 3, "n": 1234}],
        "written": ["a/b.txt", "a/c.txt"],
    }
    assert err == "something else\n"
    with output.report("try", as_json=False):
        tell_all()
    text = capsys.readouterr().out
    assert [word for word in ("a note", "one", "two", "a title", "0.333", "1,234") if word not in text] == []
    assert text.endswith("written: a/b.txt and c.txt\n")


def test_a_store_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "networks").mkdir()
    for k, path in enumerate(PAIR):
        torch.save(load(path), folder / "networks" / f"{k}.pt")
    main(["zoo", "import", "networks", "-o", "store"])
    capsys.readouterr()
    main(["zoo", "info", "store", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (document["networks"], document["shards"], document["symmetry"]) == (2, 1, None)
    assert {"columns", "bytes", "values", "kept"} <= document.keys()
