"""Files and folders that somebody else made: what is not regauge's stays, and what a file holds gets one sentence."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from regauge.cli.main import main
from regauge.core.symmetry import Symmetry
from regauge.storage.checkpoints.outputs.ledger import PARTS, claim, remove_own, write_ledger
from regauge.storage.checkpoints.outputs.staging import Staging
from regauge.storage.checkpoints.writing import save

PARAMS = {"w": torch.ones(8, 4), "b": torch.zeros(8), "v": torch.ones(3, 8)}
SYMMETRY = Symmetry.from_axes({"w": ("h", None), "b": ("h",), "v": (None, "h")}, kinds={"h": "permutation"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a network in a file, the same in a folder, and its symmetry."""
    monkeypatch.chdir(tmp_path)
    save(PARAMS, tmp_path / "net.safetensors")
    (tmp_path / "hf").mkdir()
    save(PARAMS, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "s.json").write_text(SYMMETRY.bind(PARAMS).to_json())
    return tmp_path


def _align(out: str = "out.safetensors", *more: str) -> list[str]:
    return ["align", "net.safetensors", "net.safetensors", "--symmetry", "s.json", "-o", out, *more]


def _into(folder: Path, name: str, content: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content)


def _link(folder: Path, target: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.symlink_to(target)


OTHERS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "a file": (lambda place, home: _into(place, "thesis.txt", "mine"), "holds 'thesis.txt', which is not of regauge"),
    "a folder": (lambda place, home: _into(place / "docs", "t", "mine"), "holds 'docs', which is not of regauge"),
    "an output": (lambda place, home: _into(place / "output", "t", "mine"), "no ledger 'run.json'"),
    "progress": (lambda place, home: _into(place, "progress.safetensors", "mine"), "no ledger 'run.json'"),
    "a full lock": (lambda place, home: _into(place, "lock", "mine"), "in the place of regauge's lock"),
    "no folder": (lambda place, home: _into(place.parent, place.name, "mine"), "is a symbolic link, or no folder"),
    "a link": (lambda place, home: _link(place, home), "is a symbolic link, or no folder"),
    "a link to nothing": (lambda place, home: _link(place, home / "none"), "is a symbolic link, or no folder"),
    "a link within": (lambda place, home: _link(place / "output", home), "holds the symbolic link 'output'"),
    "a linked lock": (lambda place, home: _link(place / "lock", home / "t"), "holds the symbolic link 'lock'"),
    "a linked ledger": (
        lambda place, home: _link(place / "run.json", home / "t"),
        "holds the symbolic link 'run.json'",
    ),
    "no ledger": (lambda place, home: _into(place, "run.json", '{"loss": 3}'), "that is no ledger of regauge"),
    "a list": (lambda place, home: _into(place, "run.json", "[]"), "that is no ledger of regauge"),
    "damaged": (lambda place, home: _into(place, "run.json", '{"format": "reg'), "holds a damaged ledger 'run.json'"),
    "numbers": (
        lambda place, home: _into(place, "run.json", '{"format": "regauge.run", "inputs": 5, "shards": 5}'),
        "that is no ledger of regauge",
    ),
}


@pytest.mark.parametrize("more", [(), ("--overwrite",), ("--resume",)], ids=["", "overwrite", "resume"])
@pytest.mark.parametrize("out", ["out.safetensors", "out"])
@pytest.mark.parametrize("kind", OTHERS)
def test_folders_of_others_stay(
    kind: str, out: str, more: tuple[str, ...], folder: Path, refused: Callable[..., str]
) -> None:
    put, sentence = OTHERS[kind]
    _into(folder / "home", "t", "mine")
    put(folder / f"{out}.partial", folder / "home")
    told = refused(*_align(out, *more))
    assert f"{out}.partial" in told
    assert sentence in told
    assert (folder / "home" / "t").read_text() == "mine"


def test_what_comes_into_a_folder_while_it_is_used_stays(folder: Path) -> None:
    with Staging(folder / "out", None, resume=False, overwrite=False) as staging:
        (staging.folder / "thesis.txt").write_text("mine")
    assert [path.name for path in staging.folder.iterdir()] == ["thesis.txt"]


def test_the_ledger_goes_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the removal ends, the folder is still one that regauge may remove."""
    with Staging(folder / "out", {}, resume=False, overwrite=False) as staging:
        (staging.content / "x").write_text("made")

    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    for name in ("unlink", "rmdir"):
        with monkeypatch.context() as patch:
            patch.setattr(os if name == "unlink" else Path, name, killed)
            with pytest.raises(KeyboardInterrupt):
                remove_own(staging.folder)
        Staging(folder / "out", {}, resume=False, overwrite=True).close(is_kept=name == "unlink")
    assert not staging.folder.exists()


def test_links_in_what_is_resumed_are_not_followed(folder: Path) -> None:
    _into(folder / "home", "t", "mine")
    with Staging(folder / "out", {}, resume=False, overwrite=False) as staging:
        (staging.content / "regauge.md").symlink_to(folder / "home" / "t")
    with Staging(folder / "out", {}, resume=True, overwrite=False) as staging:
        (staging.content / "regauge.md").write_text("card")
    assert (folder / "home" / "t").read_text() == "mine"


def test_folders_of_matrices_of_others_stay(folder: Path) -> None:
    place = folder / "map.svg.parts"
    _into(place, "thesis.txt", "mine")
    with pytest.raises(FileExistsError, match=r"map\.svg\.parts' holds 'thesis\.txt', which is not of regauge"):
        claim(place, PARTS)
    shutil.rmtree(place)
    claim(place, PARTS)
    _into(place / ("0" * 16), "block", "made")
    _into(place, "thesis.txt", "mine")
    remove_own(place, PARTS)
    assert [path.name for path in place.iterdir()] == ["thesis.txt"]


def test_a_ledger_lets_a_folder_be_removed(folder: Path) -> None:
    _into(folder / "out.safetensors.partial" / "output", "half.safetensors", "made")
    write_ledger(folder / "out.safetensors.partial", {"inputs": None, "shards": {}})
    main(_align())
    assert not (folder / "out.safetensors.partial").exists()


def _secret(folder: Path) -> Path:
    _into(folder / "private", "key", "SECRET")
    return folder / "private"


OUTWARD: dict[str, Callable[[Path, Path], None]] = {
    "file": lambda place, private: (place / "notes.txt").symlink_to(private / "key"),
    "relative": lambda place, private: (place / "notes.txt").symlink_to("../private/key"),
    "two steps": lambda place, private: (
        (place / "notes.txt").symlink_to("other.txt"),
        (place / "other.txt").symlink_to(private / "key"),
    ),
    "subfolder": lambda place, private: _link(place / "sub" / "notes.txt", private / "key"),
    "folder": lambda place, private: (place / "notes").symlink_to(private),
    "folder within": lambda place, private: _link(place / "sub" / "notes", private),
    "provenance": lambda place, private: (
        (private / "key").write_text('{"command": "SECRET", "inputs": []}'),
        (place / "regauge.json").symlink_to(private / "key"),
    ),
}


@pytest.mark.parametrize("command", ["align", "merge", "canonicalize"])
@pytest.mark.parametrize("kind", OUTWARD)
def test_links_out_of_a_folder_are_left_and_named(
    kind: str, command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    OUTWARD[kind](folder / "hf", _secret(folder))
    networks = ["hf"] if command == "canonicalize" else ["hf", "hf"]
    main([command, *networks, "--symmetry", "s.json", "-o", "out"])
    assert all(b"SECRET" not in path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file())
    assert (folder / "out" / "config.json").is_file()
    if kind != "provenance":
        told = capsys.readouterr().err
        names = {"subfolder": "sub", "folder": "notes", "folder within": "sub"}
        assert "left" in told
        assert f"in 'hf': '{names.get(kind, 'notes.txt')}'" in told


def test_links_within_a_folder_and_into_the_blobs_of_a_hub_are_followed(folder: Path) -> None:
    place = folder / "hub" / "models--a--b"
    snapshot = place / "snapshots" / "0123"
    for name, content in (("config.json", "{}"), ("tokenizer.json", "[]"), ("sub/x.json", "{}")):
        blob = place / "blobs" / name.replace("/", "-")
        _into(blob.parent, blob.name, content)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    (snapshot / "again.json").symlink_to("tokenizer.json")
    shutil.copy(folder / "net.safetensors", place / "blobs" / "weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/weights")
    main(["canonicalize", str(snapshot), "--symmetry", "s.json", "-o", "out"])
    found = {path.relative_to(folder / "out").as_posix() for path in (folder / "out").rglob("*") if path.is_file()}
    assert {"config.json", "tokenizer.json", "again.json", "sub/x.json"} < found
    assert not any(path.is_symlink() for path in (folder / "out").rglob("*"))
    assert json.loads((folder / "out" / "again.json").read_text()) == []
