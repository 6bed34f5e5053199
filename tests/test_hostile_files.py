"""Files and folders from other people: files that do not belong to regauge are not touched, and bad contents give one
sentence.
"""

import errno
import io
import json
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regauge.checkpoints.outputs.ledger import PARTS, claim, remove_own, write_ledger
from regauge.checkpoints.outputs.staging import Staging
from regauge.checkpoints.plain_files import short_paths
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.core.escaping import UNSEEN
from regauge.core.symmetry import Symmetry
from regauge.merging.merge_record import MergeRecord
from regauge.report.figures import draw_figure

PARAMS = {"w": torch.ones(8, 4), "b": torch.zeros(8), "v": torch.ones(3, 8)}
SYMMETRY = Symmetry.from_axes({"w": ("h", None), "b": ("h",), "v": (None, "h")}, kinds={"h": "permutation"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a network in a file, the same network in a folder, and its symmetry."""
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
    "a file": (
        lambda place, home: _into(place, "thesis.txt", "mine"),
        "contains 'thesis.txt', which regauge did not write",
    ),
    "a folder": (
        lambda place, home: _into(place / "docs", "t", "mine"),
        "contains 'docs', which regauge did not write",
    ),
    "an output": (lambda place, home: _into(place / "output", "t", "mine"), "no ledger 'run.json'"),
    "progress": (lambda place, home: _into(place, "progress.safetensors", "mine"), "no ledger 'run.json'"),
    "a full lock": (
        lambda place, home: _into(place, "lock", "mine"),
        "has the name of a lock of regauge, but is no lock; move it away",
    ),
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
    """If the removal ends at any point, regauge may still remove the folder later."""
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
    with pytest.raises(FileExistsError, match=r"map\.svg\.parts' contains 'thesis\.txt', which regauge did not write"):
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


ESCAPES = "\x1b[31mred\x9b2J\norigin: faked\r\u202e\u2028"
"""Characters that would color or clear a terminal, begin a line, or reverse the direction of a text."""


def test_what_files_say_is_escaped_in_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    origin = {"command": ESCAPES, "regauge": ESCAPES}
    origin |= {"inputs": [{"as": ESCAPES, "path": ESCAPES, "sha256": {ESCAPES: ESCAPES}}]}
    metadata = {"k": ESCAPES, ESCAPES: "k", "regauge": json.dumps(origin)}
    save(
        {ESCAPES: torch.ones(1), "[bold]w": torch.ones(1), "[/red]:smile:": torch.ones(1)},
        "e.safetensors",
        metadata=metadata,
    )
    for more in ((), ("--tensors",), ("--json", "--tensors")):
        main(["info", "e.safetensors", *more])
        told = "".join(capsys.readouterr())
        assert not UNSEEN.search(told.replace("\n", ""))
        assert not any(line.startswith("origin: faked") for line in told.splitlines())
        assert "[bold]w" in told or not more
        assert "[/red]:smile:" in told or not more
    document = json.loads(SYMMETRY.bind(PARAMS).to_json())
    document["groups"][0]["name"] = ESCAPES
    document["notes"] = [ESCAPES]
    assert "\x1b" not in str(Symmetry.from_json(json.dumps(document)))


def test_cards_show_names_as_they_are(folder: Path) -> None:
    name = "<b>![x](http:y)`a`|b"
    numbers = {"weights": (1.0, 2.0), "initial": 0.0, "objective": 1.0, "before": (0.0, 1.0), "after": (0.0, 1.0)}
    networks, base, origin = (name, "/home/me/secret/n"), "/home/me/secret/base", ((name, "`x` 0123"),)
    record = MergeRecord(networks, base, name, name, notes=(name,), origin=origin, **numbers)
    card = record.card
    assert not re.search(r"<b>|/home|secret", card)
    assert not re.search(r"(?<!\\)\[x", card.replace("`&lt;b&gt;![x](http:y)'a'\\|b`", ""))
    assert "| n | 2 |" in card
    assert "| base | base |" in card


def test_paths_in_cards_and_provenance_are_short(folder: Path) -> None:
    main(
        [
            "merge",
            str(folder / "net.safetensors"),
            str(folder / "hf"),
            "--symmetry",
            str(folder / "s.json"),
            "-o",
            "out",
        ]
    )
    for name in ("regauge.md", "regauge.json"):
        text = (folder / "out" / name).read_text()
        assert str(folder) not in text
        assert "net.safetensors" in text
    assert short_paths(["/x/seed0/m.pt", "/x/seed1/m.pt", "a/b"]) == ["seed0/m.pt", "seed1/m.pt", "a/b"]
    assert short_paths(["/x/base+/y/adapter"]) == ["x/base+y/adapter"]
    assert short_paths(["/x/base/"]) == ["base"]


def test_figures_show_names_as_they_are() -> None:
    with draw_figure(8, 6) as figure:
        axes = figure.subplots()
        axes.set_title(r"$\frac$ \x1b")
        axes.set_yscale("log")
        axes.set_xticks([0, 1, 2], labels=[r"$\x$", ESCAPES, "two\nlines"])
        axes.plot([0, 1], [1e-3, 1e3], label=r"$\none$")
        axes.legend()
    assert "10^{" in "".join(one.get_text() for one in axes.get_yticklabels())
    labels = [one.get_text() for one in axes.get_xticklabels()]
    assert "\x1b" not in labels[1]
    assert labels[2] == "two\nlines"


PROVENANCES: dict[str, object] = {
    "inputs": {"command": "x", "regauge": "1", "inputs": 5},
    "no inputs": {"command": "x"},
    "hashes": {"command": "x", "regauge": "1", "inputs": [{"as": "a", "path": "b", "sha256": [1]}]},
    "a hash": {"command": "x", "regauge": "1", "inputs": [{"as": "a", "path": "b", "sha256": {"c": 1}}]},
    "an input": {"command": "x", "regauge": "1", "inputs": [3]},
    "a number": {"command": 5, "regauge": "1", "inputs": []},
    "ancestors": {"command": "x", "regauge": "1", "inputs": [], "ancestors": [1]},
    "an ancestor": {"command": "x", "regauge": "1", "inputs": [], "ancestors": {"a": 1}},
    "nested": "[" * 200_000,
}


@pytest.mark.parametrize("kind", PROVENANCES)
def test_malformed_provenance_is_ignored(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = PROVENANCES[kind]
    text = found if isinstance(found, str) else json.dumps(found)
    save(PARAMS, "net.safetensors", overwrite=True, metadata={"regauge": text})
    main(["info", "net.safetensors"])
    told = capsys.readouterr()
    assert "origin: not recorded" in told.out
    assert ("is malformed and is ignored" in told.err) == (kind != "nested")
    main(_align())


def test_a_long_descent_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def one(k: int) -> dict[str, object]:
        own = {"as": "a", "path": f"p{k}", "sha256": {}, "provenance": str(k + 1)}
        return {"regauge": "1", "command": "x", "inputs": [own, {**own, "as": "b"}]}

    text = json.dumps({**one(-1), "ancestors": {str(k): one(k) for k in range(3000)}})
    save(PARAMS, "net.safetensors", overwrite=True, metadata={"regauge": text})
    main(["info", "net.safetensors"])
    told = capsys.readouterr().out
    assert told.count("regauge 1, x") == 3001
    assert len(told) < 10**6


def _header(header: object, values: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


def _one(name: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {name: {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}}


def _symmetry(change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(SYMMETRY.bind(PARAMS).to_json())
    change(document)
    return json.dumps(document).encode()


def _long(document: dict[str, Any]) -> None:
    """Return two consecutive groups on a parameter of a billion values."""
    n = 10**9
    places = [{"parameter": "w", "axis": 0, "start": start} for start in (0, n // 2)]
    groups = [{"name": str(k), "size": n // 2, "placements": [place]} for k, place in enumerate(places)]
    document.update(shapes={"w": [n]}, groups=groups)


def _overlapping(document: dict[str, Any]) -> None:
    _long(document)
    document["groups"][1]["placements"][0]["start"] = 0


def _torch(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _deflated(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return buffer.getvalue()


def _with_pickle(pickled: bytes) -> bytes:
    """Return a torch file with other bytes instead of its pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(_torch(PARAMS))) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else old.read(name))
    return buffer.getvalue()


RECIPE = "merge_method: ties\nbase_model: hf\nmodels:\n - {model: hf2, parameters: {weight: 1, density: %s}}\n"
SLICE = "merge_method: passthrough\nslices:\n - sources:\n   - {model: hf, layer_range: %s}\n"
X = "   - &x {model: hf, layer_range: [0, 1], parameters: {weight: 1}}\n"
ALIASES = "merge_method: linear\nslices:\n - &s\n  sources:\n" + X + "   - *x\n" * 2000 + " - *s\n" * 2000
NAMED = (
    "merge_method: linear\nmodels:\n - {model: %s, parameters: {weight: %s}}\n - {model: hf, parameters: {weight: 1}}\n"
)
CONFIG = {"model_type": "llama", "hidden_size": 4, "num_attention_heads": 2, "num_hidden_layers": 1}
SHARD = {**_one("a", [1], 0, 4), **_one("b", [1], 4, 8)}
INDEX = "hf/model.safetensors.index.json"
INFO, MERGE = ("info", "x.pt"), ("merge", "--recipe", "r.yml", "-o", "out", "--dry-run")
ADAPTED = ("info", "net.safetensors+ad")
HOSTILE: dict[str, tuple[dict[str, bytes | str], tuple[str, ...], str]] = {
    "overflowing shape": (
        {"x.safetensors": _header(_one("z", [1 << 40, 1 << 40, 0], 0, 0))},
        ("info", "x.safetensors"),
        "x.safetensors",
    ),
    "names twice": (
        {
            "x.safetensors": _header(
                b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
                b'"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
            )
        },
        ("info", "x.safetensors"),
        "it contains 'a' twice",
    ),
    "an incomplete character": (
        {"x.safetensors": _header(_one("\ud800", [0], 0, 0))},
        ("info", "x.safetensors"),
        "an incomplete character",
    ),
    "long integer": ({"x.safetensors": _header(b'{"a":' + b"9" * 5000 + b"}")}, ("info", "x.safetensors"), "malformed"),
    "left out": (
        {"hf/x.safetensors": _header(SHARD, bytes(8)), INDEX: '{"weight_map": {"a": "x.safetensors"}}'},
        ("info", "hf"),
        "leaves out 'b'",
    ),
    "in two shards": (
        {
            "hf/x.safetensors": _header(SHARD, bytes(8)),
            "hf/y.safetensors": _header(_one("b", [1], 0, 4), b"1234"),
            INDEX: '{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}',
        },
        ("info", "hf"),
        "'b' is in 'x.safetensors', 'y.safetensors'",
    ),
    "equal names": (
        {"x.pt": _torch({1: torch.zeros(2), "1": torch.ones(3)})},
        INFO,
        "'x.pt' contains two tensors with the same",
    ),
    "deflated": ({"x.pt": _deflated(_torch(PARAMS))}, INFO, "'x.pt' holds the compressed record"),
    "repeated": ({"x.pt": _torch({"w": torch.zeros(1).expand(10**12)})}, INFO, "'w' in 'x.pt' expands 4 bytes"),
    "no pickle": ({"x.pt": _with_pickle(b"")}, INFO, "'x.pt' is not a readable"),
    "cut pickle": ({"x.pt": _with_pickle(b"\x80\x02}q\x00(X")}, INFO, "'x.pt'"),
    "empty stack": ({"x.pt": _with_pickle(b"\x80\x02R.")}, INFO, "'x.pt'"),
    "wrong memo": ({"x.pt": _with_pickle(b"\x80\x02h\x05.")}, INFO, "'x.pt'"),
    "wrong persistent": ({"x.pt": _with_pickle(b"\x80\x02K\x01Q.")}, INFO, "'x.pt'"),
    "wrong build": ({"x.pt": _with_pickle(b"\x80\x02K\x01K\x02b.")}, INFO, "'x.pt'"),
    "endless pattern": (
        {
            "ad/adapter_config.json": json.dumps({"peft_type": "LORA", "alpha_pattern": {"(a|aa)+x": 1}}),
            "ad/adapter_model.safetensors": _header(
                {
                    **_one(f"base_model.model.{'a' * 60}.lora_A.weight", [2, 4], 0, 32),
                    **_one(f"base_model.model.{'a' * 60}.lora_B.weight", [8, 2], 32, 96),
                },
                bytes(96),
            ),
        },
        ADAPTED,
        "the adapter 'ad' changes",
    ),
    "bad pattern": (
        {
            "ad/adapter_config.json": json.dumps({"peft_type": "LORA", "alpha_pattern": {"(": 1}}),
            "ad/adapter_model.safetensors": _header(SHARD, bytes(8)),
        },
        ADAPTED,
        "ad/adapter_config.json' is not a configuration",
    ),
    "large alpha": (
        {
            "ad/adapter_config.json": '{"peft_type": "LORA", "lora_alpha": ' + "9" * 400 + "}",
            "ad/adapter_model.safetensors": _header(SHARD, bytes(8)),
        },
        ADAPTED,
        "ad/adapter_config.json' is not a configuration",
    ),
    "billions of units": ({"s.json": _symmetry(_long)}, tuple(_align()), ""),
    "billions of units together": ({"s.json": _symmetry(_overlapping)}, tuple(_align()), "'s.json' is no symmetry"),
    "families": ({"s.json": _symmetry(lambda d: d["groups"][0].update(scales=-1))}, tuple(_align()), "'s.json' is no"),
    "large": (
        {"s.json": _symmetry(lambda d: d["groups"][0].update(size=1 << 40))},
        tuple(_align()),
        "more units",
    ),
    "within itself": (
        {"s.json": _symmetry(lambda d: d["groups"][0].update(within=["h"]))},
        tuple(_align()),
        "'s.json' is no symmetry",
    ),
    "exponent": (
        {
            "s.json": _symmetry(
                lambda d: d["groups"][0].update(scales=1) or d["groups"][0]["placements"][0].update(scale=[10**400])
            )
        },
        tuple(_align()),
        "'s.json' is no symmetry",
    ),
    "deep notes": (
        {
            "s.json": _symmetry(lambda d: None).replace(b'"notes"', b'"_"')[:-1]
            + b', "notes": '
            + b"[" * 800
            + b"]" * 800
            + b"}"
        },
        tuple(_align()),
        "'s.json' is no symmetry",
    ),
    "negative density": ({"r.yml": RECIPE % -1}, MERGE, "line 4: 'density' is -1"),
    "density above one": ({"r.yml": RECIPE % 1.5}, MERGE, "line 4: 'density' is 1.5"),
    "many layers": ({"r.yml": SLICE % "[0, 1000000000000]"}, MERGE, "r.yml, line 4: 'layer_range'"),
    "aliases": ({"r.yml": ALIASES}, MERGE, "'r.yml' has more than"),
    "itself": ({"r.yml": "&a [*a]"}, MERGE, "'r.yml' refers to itself"),
    "empty integer": ({"r.yml": NAMED % ("hf", '!!int ""')}, MERGE, "r.yml, line 3: 'weight'"),
    "no time": ({"r.yml": NAMED % ("hf", "!!timestamp foo")}, MERGE, "r.yml, line 3: 'weight'"),
    "digits": ({"r.yml": NAMED % ("hf", "9" * 400)}, MERGE, "r.yml, line 3: 'weight'"),
    "user": ({"r.yml": NAMED % ("~nosuchuser/x", "1")}, MERGE, "r.yml, line 3: '~nosuchuser/x' is no folder"),
    "layers": (
        {"hf/config.json": json.dumps({**CONFIG, "num_hidden_layers": 10**7})},
        ("discover", "hf"),
        "'num_hidden_layers'",
    ),
    "remote code": (
        {"hf/config.json": json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}})},
        ("discover", "hf"),
        "it needs code from its own folder, which is never run",
    ),
    "class": (
        {"hf/config.json": json.dumps({**CONFIG, "architectures": ["Trainer"]})},
        ("discover", "hf"),
        "no model class",
    ),
}
"""Files, the command that reads them, and a part of its error message."""


@pytest.mark.parametrize("kind", HOSTILE)
def test_whatever_a_file_holds_the_answer_is_a_sentence(kind: str, folder: Path, refused: Callable[..., str]) -> None:
    files, command, sentence = HOSTILE[kind]
    if "discover" in command or kind == "user":
        pytest.importorskip("transformers")
    shutil.copytree("hf", "hf2")
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    begin = time.monotonic()
    assert sentence in refused(*command)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
@pytest.mark.parametrize("out", ["place/out.safetensors", "place/out"])
def test_places_that_take_no_output_are_told(
    out: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    """The test also works for root, whom permissions do not stop: creating the first folder or file is refused."""
    (folder / "place").mkdir()
    make = os.mkdir

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        if "place" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        make(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", mkdir)
    told = refused(*_align(out))
    assert "place" in told
    assert os.strerror(number).lower() in told.lower()
    assert not any((folder / "place").iterdir())
