"""Provenance of outputs: every command records it, hashes match the files, and equal runs write equal bytes."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.outputs import provenance
from regauge.checkpoints.outputs.provenance import hash_file, hashed_on_the_way, read_provenance
from regauge.checkpoints.writing import save
from regauge.cli.main import main

MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), torch.ones(2, 4)

def batches():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 4, generator=generator), torch.randint(0, 3, (16,), generator=generator))]
"""
MERGE = ["merge", "a.safetensors", "b.safetensors", "--model", "m.py:model"]
COMMANDS = {
    "align": ["align", "a.safetensors", "b.safetensors", "--model", "m.py:model"],
    "align, streamed": ["align", "a.safetensors", "b.safetensors", "--symmetry", "s.json", "--memory", "50MB"],
    "merge": MERGE,
    "merge with a base": [*MERGE, "--rule", "task-arithmetic", "--base", "c.safetensors"],
    "merge by chance": [*MERGE, "--rule", "dare", "--base", "c.safetensors", "--seed", "3"],
    "canonicalize": ["canonicalize", "a.safetensors", "--model", "m.py:model"],
    "repair": ["repair", "a.safetensors", "--model", "m.py:model", "--data", "m.py:batches"],
    "apply": ["apply", "moved.safetensors", "b.safetensors"],
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODEL)
    for seed, name in enumerate("abc"):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        save(module.state_dict(), f"{name}.safetensors", metadata={"regauge": "of another file", "kept": "yes"})
    main(["discover", "m.py:model", "-o", "s.json"])
    main(["align", "a.safetensors", "b.safetensors", "--symmetry", "s.json", "-o", "moved.safetensors"])


def origin(path: str) -> dict[str, Any]:
    found = read_provenance(path)
    assert found is not None
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_where_its_output_comes_from(name: str) -> None:
    arguments = COMMANDS[name]
    main([*arguments, "-o", "one.safetensors"])
    found = origin("one.safetensors")
    assert found["command"] == arguments[0]
    assert not found["settings"].keys() & {"output", "memory", "resume", "overwrite", "dry-run", "seed"}
    files = {"moved.alignment.safetensors" if word == "moved.safetensors" else word for word in arguments[1:]}
    files = {word.partition(":")[0] for word in files if word.endswith((".safetensors", ".json", ":model", ":batches"))}
    hashes = {file: digest for one in found["inputs"] for file, digest in one["sha256"].items()}
    assert hashes == {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}
    if "--seed" in arguments:
        assert found["seed"] == 3
    assert ("element" in found) == (arguments[0] in ("align", "canonicalize"))
    with Checkpoint.open("one.safetensors") as checkpoint:
        assert checkpoint.header["kept"] == "yes"
    if arguments[0] == "merge":
        assert hashes["a.safetensors"][:12] in Path("one.md").read_text()
    main([*arguments, "-o", "two.safetensors"])
    assert Path("one.safetensors").read_bytes() == Path("two.safetensors").read_bytes()


def test_a_chain_can_be_followed() -> None:
    main([*MERGE, "-o", "merged.safetensors"])
    main(["align", "merged.safetensors", "moved.safetensors", "--model", "m.py:model", "-o", "last.safetensors"])
    main(["apply", "last.safetensors", "merged.safetensors", "-o", "again.safetensors"])
    found = origin("last.safetensors")
    first, second = (found["ancestors"][one["provenance"]] for one in found["inputs"] if one["as"] in "ab")
    assert (first["command"], second["command"]) == ("merge", "align")
    assert [one["path"] for one in first["inputs"] if one["as"] == "checkpoints"] == ["a.safetensors", "b.safetensors"]
    merged = next(one for one in origin("again.safetensors")["inputs"] if one["as"] == "checkpoint")
    assert origin("again.safetensors")["ancestors"][merged["provenance"]] == first


def test_info_follows_the_chain(capsys: pytest.CaptureFixture[str]) -> None:
    main([*MERGE, "-o", "merged.safetensors"])
    main(["align", "merged.safetensors", "moved.safetensors", "--model", "m.py:model", "-o", "last.safetensors"])
    capsys.readouterr()
    main(["info", "last.safetensors", "--tensors"])
    said = capsys.readouterr().out
    assert "last.safetensors: 9 tensors of 100 values (1 int64, 99 float32)" in said
    assert "header: kept = yes" in said
    digest = hashlib.sha256(Path("a.safetensors").read_bytes()).hexdigest()[:12]
    assert f"      checkpoints a.safetensors: `a.safetensors` {digest}" in said
    assert "3.weight" in said
    main(["info", "last.safetensors", "--json"])
    assert json.loads(capsys.readouterr().out)["provenance"] == origin("last.safetensors")
    main(["info", "a.safetensors"])
    assert "origin: not recorded" in capsys.readouterr().out


def test_what_is_no_provenance_is_none() -> None:
    assert read_provenance("a.safetensors") is None
    assert read_provenance("nothing") is None
    Path("folder").mkdir()
    Path("folder/regauge.json").write_text(json.dumps({"other": 1}))
    assert read_provenance("folder") is None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


READS: dict[str, Callable[[Checkpoint], object]] = {
    "in order": lambda one: [one.read(name) for name in one.stored],
    "in pieces": lambda one: [one.read("x", rows=rows) for rows in ((0, 300), (300, 1000))],
    "pieces twice": lambda one: [one.read("x", rows=rows) for rows in ((0, 300), (0, 300), (200, 1000))],
    "backwards": lambda one: [one.read(name) for name in reversed(list(one.stored))],
    "the second half": lambda one: one.read("y", rows=(500, 1000)),
    "nothing": lambda one: None,
}
"""Orders in which two tensors of a file are read."""


@pytest.mark.parametrize("name", READS)
def test_files_are_hashed_while_they_are_read_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "NEAR", 1 << 12)
    path = save({n: torch.randn(1000, 50) for n in "xy"}, "large.safetensors")
    with Checkpoint.open(path) as one, hashed_on_the_way([one, one]):
        READS[name](one)
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "sha256", lambda: pytest.fail("it is hashed once more"))
        found = hash_file(path)
    assert found == _sha256(path)


def test_a_file_that_is_written_while_it_is_read_is_hashed_anew() -> None:
    path = save({"x": torch.ones(1000)}, "large.safetensors")
    with Checkpoint.open(path) as one, hashed_on_the_way([one]):
        one.read("x")
        save({"x": torch.zeros(1000)}, path, overwrite=True)
    assert hash_file(path) == _sha256(path)


def test_folders_are_merged_and_hashed_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in "de":
        Path(folder).mkdir()
        (Path(folder) / "config.json").write_text("{}")
        save({n: torch.randn(700, 900).bfloat16() for n in ("x", "y")}, Path(folder) / "model.safetensors")
    models = "".join(f"  - {{model: {folder}, parameters: {{weight: 1}}}}\n" for folder in "de")
    Path("plain.yml").write_text(f"merge_method: linear\nmodels:\n{models}dtype: bfloat16\nregauge: {{align: false}}\n")
    apart: list[int] = []
    read = provenance._RunningHash._read

    def count(self: provenance._RunningHash, end: int) -> None:
        apart.append(end - self._end)
        read(self, end)

    monkeypatch.setattr(provenance._RunningHash, "_read", count)
    main(["merge", "--recipe", "plain.yml", "-o", "out"])
    assert 0 < sum(apart) < 2000  # the headers
    hashes = {file: digest for one in origin("out")["inputs"] for file, digest in one["sha256"].items()}
    assert hashes["model.safetensors"] == _sha256(Path("e") / "model.safetensors")
    x, y = (Checkpoint.open(folder).read("x").float() for folder in "de")
    assert torch.equal(Checkpoint.open("out").read("x"), (x * 0.5 + y * 0.5).bfloat16())
