"""The commands on populations continue interrupted work, and report errors in one sentence."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from regauge.cli.main import main
from regauge.nets.mlp import mlp
from regauge.storage import Store
from regauge.storage.architecture import Architecture

CONFIG = """
from regauge.storage.architecture import Architecture
from regauge.zoo import PopulationConfig

def small() -> PopulationConfig:
    architecture = Architecture("MLP 30-4-2", "regauge.nets.mlp:mlp", {"widths": [30, 4, 2]})
    return PopulationConfig(architecture, "breast-cancer", 12, steps=3, group=4)

def failing() -> PopulationConfig:
    return PopulationConfig(small().architecture, "no such set", 12, steps=3)

def wrong() -> int:
    return 3
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "zoo_config.py").write_text(CONFIG)
    return f"{tmp_path / 'zoo_config.py'}"


def checkpoints(folder: Path) -> None:
    folder.mkdir()
    for k in range(3):
        for step in (10, 20):
            state = mlp(4, 3, 2).state_dict()
            if (k, step) == (2, 20):
                state["layers.0.bias"][0] = torch.nan
            torch.save(state, folder / f"net{k}_step{step}.pt")


def test_a_population_is_trained_and_a_second_run_goes_on(
    tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["zoo", "train", f"{config}:small", "-o", str(tmp_path / "zoo"), "--shard", "4", "--networks", "10"]
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setenv("WORLD_SIZE", "2")
        main(command)
    assert "4 networks" in (said := capsys.readouterr()).out
    assert "trained now: 1 of 3 shards" in said.out
    assert "this process trains part 1 of 2" in said.err
    main(command)
    assert "10 networks of 'MLP 30-4-2'; trained now: 2 of 3 shards" in capsys.readouterr().out
    main(command)
    assert "0 of 3 shards" in capsys.readouterr().out
    main(["zoo", "info", str(tmp_path / "zoo")])
    told = capsys.readouterr().out
    assert "shards: 3, " in told
    assert "validation_accuracy" in told
    assert "permutation" in told or "scaled" in told
    with pytest.raises(SystemExit):
        main([*command, "--seed", "5"])
    assert "other networks or settings" in capsys.readouterr().err


def test_a_store_is_no_checkpoint_and_the_sentence_says_what_it_is(
    tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "zoo")
    main(["zoo", "train", f"{config}:small", "-o", folder, "--networks", "2"])
    with pytest.raises(SystemExit):
        main(["info", folder])
    assert f"is a store of networks, not a checkpoint; `regauge zoo info {folder}`" in capsys.readouterr().err


def test_a_store_is_extended(tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["zoo", "train", f"{config}:small", "-o", str(tmp_path / "zoo"), "--shard", "4", "--networks"]
    main([*command, "6"])
    main([*command, "12"])
    assert "12 networks" in (said := capsys.readouterr().out)
    assert "trained now: 2 of 4 shards" in said
    with pytest.raises(SystemExit):
        main([*command, "6"])
    assert "is for 12 networks of this population already, and 6 are wanted" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    Store.create(tmp_path / "zoo", Architecture("MLP 4-3-2", "regauge.nets.mlp:mlp", {"widths": [4, 3, 2]}))
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "regauge", "zoo", "info", str(tmp_path / "zoo")]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode in (1, 141)  # as rich ends where a table breaks off, and as we do elsewhere


def test_no_networks_name_the_option(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "--networks is 0; it must be at least 1" in refused(
        "zoo", "train", "uci-mlps", "-o", str(tmp_path / "zoo"), "--networks", "0"
    )
    assert not (tmp_path / "zoo").exists()


def test_a_preset_is_known_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["zoo", "train", "uci-mlps", "-o", str(tmp_path / "zoo"), "--networks", "2", "--seed", "3"])
    said = capsys.readouterr().out
    assert "2 networks, 82 of each stored: 164 checkpoints of about 0.5 MiB" in said
    assert "164 checkpoints of 2 networks of 'MLP 30-16-16-2'; trained now: 1 of 1 shards" in said
    assert Store.open(tmp_path / "zoo").about["training"]["seed"] == 3


def test_networks_are_imported_exported_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints(tmp_path / "raw")
    options = ["--template", "net{id}_step{step}.pt", "--model", "regauge.nets.mlp:mlp", "--input-shape", "2x4"]
    options += ["--settings", json.dumps({"widths": [4, 3, 2]}), "--storage", "bfloat16"]
    main(["zoo", "import", str(tmp_path / "raw"), "-o", str(tmp_path / "zoo"), *options])
    told = "6 checkpoints of 3 networks of 'mlp'; marked because of NaN or Inf: 1"
    assert f"{told}; 6 were imported now" in capsys.readouterr().out
    main(["zoo", "import", str(tmp_path / "raw"), "-o", str(tmp_path / "zoo"), *options])
    assert f"{told}; 0 were imported now" in capsys.readouterr().out
    checkpoints(tmp_path / "other")
    with pytest.raises(SystemExit):
        main(["zoo", "import", str(tmp_path / "other"), "-o", str(tmp_path / "zoo"), *options])
    assert f"of '{tmp_path / 'raw'}', not of '{tmp_path / 'other'}'; choose another" in capsys.readouterr().err
    store = Store.open(tmp_path / "zoo")
    assert store.symmetry is not None
    assert store.storage == "bfloat16"
    main(["zoo", "export", str(tmp_path / "zoo"), "-o", str(tmp_path / "out"), "--where", "is_finite=true"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "0-20.safetensors",
        "1-20.safetensors",
        "2-10.safetensors",
    ]
    main(["zoo", "export", str(tmp_path / "zoo"), "-o", str(tmp_path / "all"), "--checkpoints", "all"])
    assert len(list((tmp_path / "all").iterdir())) == 6
    main(["zoo", "verify", str(tmp_path / "zoo")])
    assert "1 shards with 6 networks are intact, 0 are damaged" in capsys.readouterr().out
    path = store.shards[0].path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        main(["zoo", "verify", str(tmp_path / "zoo")])
    assert stopped.value.code == 1
    assert "checksum does not match" in capsys.readouterr().out


PLUGIN = """
import torch
from regauge.storage.architecture import Architecture
from regauge.zoo import Imported, Source

def read_mine(path, *, dataset="ones"):
    values = {"ones": 1.0, "twos": 2.0}[dataset]
    architecture = Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [4, 3, 2]})
    rows = [{"id": k, "step": 0} for k in range(3)]

    def read(numbers):
        shapes = {spec.name: (len(numbers), *spec.shape) for spec in architecture.layout}
        return Imported({name: torch.full(shape, values) for name, shape in shapes.items()}, [rows[k] for k in numbers])

    return Source(path, architecture, rows, read, (torch.zeros(2, 4),))
"""


def test_another_package_adds_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site"
    (package / "mine-1.0.dist-info").mkdir(parents=True)
    (package / "mine-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (package / "mine-1.0.dist-info" / "entry_points.txt").write_text("[regauge.formats]\nmine = mine:read_mine\n")
    (package / "mine.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(package)
    options = ["--format", "mine", "--dataset", "twos"]
    main(["zoo", "import", str(tmp_path / "anything"), "-o", str(tmp_path / "zoo"), *options])
    store = Store.open(tmp_path / "zoo")
    assert len(store) == 3
    assert store.symmetry is not None
    assert all(bool((tensor == 2).all()) for tensor in store.read([2]).values())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["train", "CONFIG:wrong", "-o", "OUT"], "returned a int; it must return a regauge.zoo PopulationConfig"),
        (["train", "CONFIG:absent", "-o", "OUT"], "has no function or class 'absent'"),
        (["train", "CONFIG:small", "-o", "OUT", "--on", "ray"], "is not a place for training; choose here, processes"),
        (["train", "CONFIG:small", "-o", "OUT", "--on", "processes:0"], "is not a place for training"),
        (["train", "CONFIG:small", "-o", "OUT", "--shard", "0"], "must be at least 1"),
        (["train", "uci-mlp", "-o", "OUT"], "no preset 'uci-mlp'; did you mean 'uci-mlps'? there are uci-mlps, "),
        (["train", "CONFIG:failing", "-o", "OUT"], "'no such set' is no data set"),
        (["info", "OUT"], "there is no store in"),
        (["import", "RAW", "-o", "OUT", "--template", "{id}.ckpt"], "no file below"),
        (["import", "RAW", "-o", "OUT", "--format", "dwsnets"], "no files of DWSNets"),
        (["import", "RAW", "-o", "OUT", "--format", "hdf5"], "give --model and its --settings"),
        (["import", "RAW", "-o", "OUT", "--format", "dwsnets", "--model", "regauge.nets.mlp:mlp", "--settings",
          '{"widths": [2, 2]}'], "--model cannot be used with --format dwsnets"),
        (["import", "RAW", "-o", "OUT", "--format", "folder", "--dataset", "x"], "--dataset cannot be used with"),
        (["import", "RAW", "-o", "OUT", "--format", "onnx"], "no format 'onnx'; choose from folder, dwsnets, nfn, "),
        (["import", "RAW", "-o", "OUT", "--model", f"{__file__}:f"], "put it into a package"),
        (["import", "RAW", "-o", "OUT", "--model", "regauge.nets.mlp:mlp", "--settings", "{"], "is not JSON"),
        (["import", "RAW", "-o", "OUT", "--model", "regauge.nets.mlp:mlp", "--settings", "3"], "is not a mapping"),
        (["export", "OUT", "-o", "OUT2"], "there is no store in"),
        (["verify", "OUT"], "there is no store in"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(
    tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str], arguments: list[str], match: str
) -> None:
    checkpoints(tmp_path / "raw")
    places = {"CONFIG": config, "RAW": str(tmp_path / "raw"), "OUT2": str(tmp_path / "b"), "OUT": str(tmp_path / "a")}
    for short, long in places.items():
        arguments = [text.replace(short, long) for text in arguments]
    with pytest.raises(SystemExit) as stopped:
        main(["zoo", *arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert match in error
    assert error.splitlines()[-1].startswith("regauge: ")
    assert not (tmp_path / "a").exists()


def test_nothing_is_exported_where_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints(tmp_path / "raw")
    main(["zoo", "import", str(tmp_path / "raw"), "-o", str(tmp_path / "zoo"), "--template", "net{id}_step{step}.pt"])
    for where, match in (("step=7", "no network of 6 has 'step=7'"), ("step", "write COLUMN=VALUE")):
        with pytest.raises(SystemExit):
            main(["zoo", "export", str(tmp_path / "zoo"), "-o", str(tmp_path / "out"), "--where", where])
        assert match in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
