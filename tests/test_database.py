"""Databases of fingerprints: relatives are found among many networks, and compared as `rg.compare` does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from symmetries import drawn, generator, mlp_symmetry

import regauge as rg
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.comparison import Database, database, fingerprint
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry

SYMMETRY = mlp_symmetry(8, 16, 12, 4, kind="scaled")
OTHER = mlp_symmetry(8, 10, 4, kind="scaled")


def near(params: Params, share: float, seed: int) -> Params:
    noise = drawn(SYMMETRY, seed)
    return {name: tensor + share * noise[name] for name, tensor in params.items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with twenty strangers, a child and a transformed copy of the third stranger, and a network of
    another architecture.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zoo").mkdir()
    for seed in range(20):
        save(drawn(SYMMETRY, seed), tmp_path / "zoo" / f"{seed}.safetensors")
    third = drawn(SYMMETRY, 3)
    save(SYMMETRY.act(SYMMETRY.random(generator(1)), third), tmp_path / "copy.safetensors")
    save(SYMMETRY.act(SYMMETRY.random(generator(2)), near(third, 0.1, 99)), tmp_path / "child.safetensors")
    save(drawn(OTHER, 0), tmp_path / "other.safetensors")
    (tmp_path / "symmetry.json").write_text(SYMMETRY.to_json())
    return tmp_path


def made(folder: Path) -> Database:
    known = Database(folder / "known.safetensors")
    assert known.add(sorted((folder / "zoo").iterdir()), symmetry=SYMMETRY) == []
    return known


def test_relatives_are_the_nearest_and_get_the_verdict_of_a_comparison(folder: Path) -> None:
    known = made(folder)
    for name, verdict in (("copy", "same network in another gauge"), ("child", "descended")):
        found = known.search(folder / f"{name}.safetensors", 3)
        assert found.neighbors[0].path == "zoo/3.safetensors"
        files = folder / f"{name}.safetensors", folder / "zoo" / "3.safetensors"
        alone = rg.compare(*files, SYMMETRY)
        assert found.rows[0]["verdict"] == alone.verdict == verdict
        assert found.rows[0]["distance"] == alone.relative_distance
        assert found.rows[0]["p-value"] == alone.p_value
        assert [row["verdict"] for row in found.rows[1:]] == ["unrelated"] * 2
        assert found.rows[0]["fingerprints"] < 0.5 * found.rows[1]["fingerprints"]
        assert not found.notes


def test_the_file_holds_all_that_a_search_needs(folder: Path) -> None:
    known, again = made(folder), Database(folder / "known.safetensors")
    assert len(again) == len(known) == 20
    assert again.nearest(folder / "child.safetensors") == known.nearest(folder / "child.safetensors")
    first = fingerprint(drawn(SYMMETRY, 0), SYMMETRY).float()
    assert torch.equal(again.networks["zoo/0.safetensors"].numbers, first)


def test_a_network_is_no_neighbor_of_itself(folder: Path) -> None:
    names = [one.path for one in made(folder).nearest(folder / "zoo" / "3.safetensors", 20)]
    assert len(names) == 19
    assert "zoo/3.safetensors" not in names


def test_networks_are_read_once_until_their_files_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, measured = made(folder), list[str]()

    def counted(params: Checkpoint, symmetry: Symmetry, **ways: Any) -> torch.Tensor:
        measured.append(Path(params.label).name)
        return fingerprint(params, symmetry, **ways)

    monkeypatch.setattr(database, "fingerprint", counted)
    known.add(sorted((folder / "zoo").iterdir()))
    assert measured == []
    save(near(drawn(SYMMETRY, 3), 1.0, 98), folder / "zoo" / "3.safetensors", overwrite=True)
    assert "changed since" in known.search(folder / "copy.safetensors", 1).notes[0]
    measured.clear()
    known.add(sorted((folder / "zoo").iterdir()))
    assert measured == ["3.safetensors"]
    assert known.nearest(folder / "copy.safetensors", 1)[0].distance > 0.01


def test_architectures_stay_apart(folder: Path) -> None:
    known = made(folder)
    assert known.add([folder / "other.safetensors"], symmetry=OTHER) == []
    assert len(known.nearest(folder / "copy.safetensors", 100)) == 20
    save(drawn(OTHER, 1), folder / "second.safetensors")
    assert [one.path for one in known.nearest(folder / "second.safetensors", 100)] == ["other.safetensors"]


def test_a_damaged_network_leaves_the_others(folder: Path) -> None:
    params = drawn(SYMMETRY, 30)
    save({**params, "0.bias": params["0.bias"] / 0}, folder / "broken.safetensors")
    known = Database(folder / "known.safetensors")
    failures = known.add(
        [folder / "broken.safetensors", folder / "gone.safetensors", folder / "copy.safetensors"], symmetry=SYMMETRY
    )
    assert ["broken" in str(failures[0]), "gone" in str(failures[1]), len(failures)] == [True, True, 2]
    assert list(known.networks) == ["copy.safetensors"]


def test_what_two_processes_add_is_kept(folder: Path) -> None:
    one, two = Database(folder / "known.safetensors"), Database(folder / "known.safetensors")
    one.add([folder / "copy.safetensors"], symmetry=SYMMETRY)
    two.add([folder / "child.safetensors"], symmetry=SYMMETRY)
    assert len(Database(folder / "known.safetensors")) == 2


def test_an_interrupt_costs_nothing_that_was_computed(folder: Path) -> None:
    known = Database(folder / "known.safetensors")

    def interrupted(label: str, total: int) -> Callable[..., None]:
        steps = iter(range(5))

        def advance(count: int = 1) -> None:
            if next(steps) == 4:
                raise KeyboardInterrupt

        return advance

    with pytest.raises(KeyboardInterrupt):
        known.add(sorted((folder / "zoo").iterdir()), symmetry=SYMMETRY, progress=interrupted)
    assert len(Database(folder / "known.safetensors")) == 5


def test_files_that_are_gone_are_named(folder: Path) -> None:
    known = made(folder)
    (folder / "zoo" / "3.safetensors").unlink()
    found = known.search(folder / "copy.safetensors", 2)
    assert found.comparisons[0] is None
    assert "'zoo/3.safetensors' no longer exists" in found.notes[0]
    assert found.rows[1]["verdict"] == "unrelated"


def test_a_damaged_neighbor_leaves_the_others(folder: Path) -> None:
    known = made(folder)
    third = folder / "zoo" / "3.safetensors"
    third.write_bytes(third.read_bytes()[:-100])
    found = known.search(folder / "copy.safetensors", 2)
    assert found.comparisons[0] is None
    assert "'zoo/3.safetensors' is not compared" in found.notes[0]
    assert found.rows[1]["verdict"] == "unrelated"


def test_the_command_says_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", "zoo", "--database", "known.safetensors", "--add", "--symmetry", "symmetry.json", "--json"])
    assert json.loads(capsys.readouterr().out)["networks"] == 20
    main(["compare", "child.safetensors", "--database", "known.safetensors", "--nearest", "2", "--json"])
    said = json.loads(capsys.readouterr().out)["nearest"]
    rows = Database("known.safetensors").search("child.safetensors", 2).rows
    assert said == [{"checkpoint": "child.safetensors", **row} for row in rows]
    main(["compare", "child.safetensors", "copy.safetensors", "--database", "known.safetensors"])
    assert "descended" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["copy.safetensors", "--database", "none.safetensors"], "contains no networks"),
        (["other.safetensors", "--database", "known.safetensors"], "none of the 20 networks"),
        (["copy.safetensors", "--database", "copy.safetensors"], "not a database"),
        (["copy.safetensors", "--add"], "--add needs --database FILE"),
        (
            ["copy.safetensors", "--database", "known.safetensors", "-o", "page.html"],
            "--database excludes --data and -o",
        ),
        (["copy.safetensors", "--database", "known.safetensors", "--nearest", "0"], "at least 1"),
        (["copy.safetensors", "--database", "known.bin", "--add", "--symmetry", "symmetry.json"], ".safetensors"),
    ],
)
def test_mistakes_get_a_sentence(folder: Path, refused: Callable[..., str], args: list[str], sentence: str) -> None:
    made(folder)
    assert sentence in refused("compare", *args)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "9"},
        {"networks": "[]"},
        {"networks": "not JSON"},
        {"architectures": "[]"},
        {"architectures": '[{"symmetry": "{}", "shapes": {}}]'},
        {"networks": "[" + ", ".join(['{"path": "x", "stamp": "1", "architecture": 7}'] * 20) + "]"},
    ],
)
def test_a_changed_file_is_refused_by_name(folder: Path, change: dict[str, str]) -> None:
    made(folder)
    with Checkpoint.open(folder / "known.safetensors") as one:
        tensors, header = one.params, {**one.header, **change}
    save(tensors, folder / "changed.safetensors", metadata=header)
    with pytest.raises(ValueError, match=r"changed.safetensors"):
        Database(folder / "changed.safetensors")
