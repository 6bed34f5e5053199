"""`regauge learn`: a predictor is trained on a store, with a report, and used again."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import regauge as rg
from regauge import learn
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.nets.siren import Siren
from regauge.storage import Store
from regauge.storage.architecture import Architecture

COUNT = 120
SMALL = ["--width", "8", "--depth", "1", "--epochs", "2", "--batch", "32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of small sine networks with a number, a class and a constant, and a checkpoint of one network."""
    folder = tmp_path_factory.mktemp("learn")
    module = Siren(2, 4, 1, depth=1, omega=3.0, generator=torch.Generator().manual_seed(0))
    chance = torch.Generator().manual_seed(1)
    networks = {name: torch.randn(COUNT, *t.shape, generator=chance) for name, t in module.state_dict().items()}
    architecture = Architecture("SIREN", "regauge.nets.siren:Siren", {"width": 4, "depth": 1, "omega": 3.0})
    store = Store.create(folder / "zoo", architecture, rg.discover(module, (torch.randn(5, 2),)))
    sizes = networks["layers.1.weight"].flatten(1).norm(dim=1).tolist()
    kinds = ["small", "large"]
    store.append(
        networks,
        [{"id": k, "step": 0, "size": v, "kind": kinds[v > 1.8], "same": 1} for k, v in enumerate(sizes)],
    )
    save({name: tensor[0] for name, tensor in networks.items()}, folder / "one.safetensors")
    save({"w": torch.zeros(2)}, folder / "other.safetensors")
    return folder


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.chdir(folder)
    main(["learn", *args])


def test_a_number_is_learned_reported_and_predicted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--inputs",
        "grid:3x3",
        "--render",
        "1",
        "--translate",
        "0.1",
        "--noise",
        "0.01",
        "--logarithms",
        "--moments",
    ]
    run(
        folder,
        monkeypatch,
        "predictor",
        "zoo",
        "--target",
        "size",
        "-o",
        "size.safetensors",
        *SMALL,
        *options,
        "--json",
    )
    report = json.loads(capsys.readouterr().out)
    assert set(report["scores"][0]) == {"name", "R2", "tau", "absolute error"}
    assert report["scores"][0]["name"] == "net"
    assert len(report["history"]) == 2
    assert report["written"] == ["size.safetensors", "size.html", "size.json"]
    page = (folder / "size.html").read_text()
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "size, read from the weights" in page
    assert "with seed 0." in page
    assert report["verdict"].startswith("The predictor is ")
    assert f"<strong>{report['verdict']}</strong>" in page
    results = json.loads((folder / "size.json").read_text())
    made = learn.load_predictor(folder / "size.safetensors")
    assert results["scores"] == made.about["scores"]
    store = Store.open(folder / "zoo")
    run(folder, monkeypatch, "predict", "size.safetensors", "zoo", "one.safetensors", "--json")
    rows = json.loads(capsys.readouterr().out)["predictions"]
    assert len(rows) == COUNT + 1
    assert rows[-1]["network"] == "one.safetensors"
    assert rows[-1]["size"] == pytest.approx(rows[0]["size"], rel=1e-5)
    assert [row["size"] for row in rows[:COUNT]] == pytest.approx(made.predict(store).tolist())


def test_a_class_is_learned_and_written_as_csv(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        folder, monkeypatch, "predictor", "zoo", "--target", "kind", "-o", "kind.safetensors", *SMALL,
        "--layer", "message_passing", "--layer-settings", '{"expansion": 1}', "--statistics", "no", "--widening",
    )  # fmt: skip
    assert "accuracy" in capsys.readouterr().out
    assert learn.load_predictor(folder / "kind.safetensors").net.settings.readers
    run(folder, monkeypatch, "predict", "kind.safetensors", "zoo", "-o", "kind.csv")
    with (folder / "kind.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == COUNT
    assert {row["kind"] for row in rows} <= {"small", "large"}
    assert all(0.5 <= float(row["probability"]) <= 1 for row in rows)


def test_networks_are_run_on_probes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--inputs", "grid:3x3", "--probes", "4", "--statistics", "no"]
    run(folder, monkeypatch, "predictor", "zoo", "--target", "size", "-o", "probed.safetensors", *SMALL, *options)
    (folder / "mine.py").write_text(
        "from regauge.nets.siren import Siren\n\n\ndef net():\n    return Siren(2, 4, 1, depth=1, omega=3.0)\n"
    )
    capsys.readouterr()
    both = ["probed.safetensors", "zoo", "one.safetensors"]
    run(folder, monkeypatch, "predict", *both, "--model", "mine.py:net", "--json")
    rows = json.loads(capsys.readouterr().out)["predictions"]
    assert rows[-1]["size"] == pytest.approx(rows[0]["size"], rel=1e-4)
    with pytest.raises(SystemExit):
        run(folder, monkeypatch, "predict", "probed.safetensors", "one.safetensors")
    assert "name their architecture: --model" in capsys.readouterr().err


def test_an_interrupted_training_is_resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predictor", "zoo", "--target", "size", *SMALL, "--statistics", "no"]
    run(folder, monkeypatch, *command, "-o", "whole.safetensors")
    train: Any = learn.predictor_training.train

    def stop(*args: Any, **options: Any) -> Any:
        train(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("regauge.learn.predictor_training.train", stop)
        with pytest.raises(SystemExit):
            run(folder, monkeypatch, *command, "-o", "again.safetensors")
    assert not (folder / "again.safetensors").exists()
    with pytest.raises(SystemExit):
        run(folder, monkeypatch, *command, "-o", "again.safetensors")
    assert "add --resume" in capsys.readouterr().err
    run(folder, monkeypatch, *command, "-o", "again.safetensors", "--resume")
    whole, again = (learn.load_predictor(folder / f"{name}.safetensors") for name in ("whole", "again"))
    for name, tensor in whole.net.state_dict().items():
        assert torch.equal(tensor, again.net.state_dict()[name])
    assert not list(folder.glob("*.partial*"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["predictor", "zoo", "--target", "other", "-o", "x.safetensors"], "no column 'other'"),
        (["predictor", "zoo", "--target", "same", "-o", "x.safetensors"], "nothing to predict"),
        (["predictor", "none", "--target", "size", "-o", "x.safetensors"], "no store"),
        (["predictor", "zoo", "--target", "size", "-o", "x.pt"], "must end in .safetensors"),
        (["predictor", "zoo", "--target", "size", "-o", "x.safetensors", "--layer", "gcn"], "there is no layer 'gcn'"),
        (
            ["predictor", "zoo", "--target", "size", "-o", "x.safetensors", "--layer-settings", '{"a": 1}'],
            "with some of",
        ),
        (["predictor", "zoo", "--target", "size", "-o", "x.safetensors", "--layer-settings", "[1]"], "with some of"),
        (
            ["predictor", "zoo", "--target", "size", "-o", "x.safetensors", "--inputs", "grid:axb"],
            "after 'grid', write",
        ),
        (
            ["predictor", "zoo", "--target", "size", "-o", "x.safetensors", "--inputs", "grid:4", "--render", "1"],
            "cannot be run",
        ),
        (["predictor", "zoo", "--target", "size", "-o", "x.safetensors", "--device", "foo"], "cannot be used here"),
        (["predictor", "zoo", "--target", "size", "-o", "x.safetensors", "--epochs", "0"], "are invalid"),
        (["predictor", "zoo", "--target", "size", "-o", "x.safetensors", "--where", "size=7"], "nothing to learn"),
        (["predictor", "zoo", "--target", "size", "-o", "x.safetensors", "--probes", "4"], "give `inputs`"),
        (["predictor", "zoo", "--target", "size", "-o", "x.safetensors", "--probes", "4y4"], "a grid such as 16x16"),
        (["predict", "one.safetensors", "zoo"], "no net over networks"),
        (
            [
                "predictor",
                "none",
                "--target",
                "size",
                "-o",
                "x.safetensors",
                "--width",
                "7",
                "--layer",
                "dws",
            ],
            "4 heads of attention do not divide a width of 7",
        ),
        (["predictor", "zoo", "--target", "size", "-o", "x.safetensors", "--split-by", "other"], "no column 'other'"),
    ],
)
def test_what_cannot_be_used_gets_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    before = sorted(folder.iterdir())
    with pytest.raises(SystemExit) as stop:
        run(folder, monkeypatch, *args)
    told = capsys.readouterr().err
    assert stop.value.code == 2, told
    assert words in told
    assert len([line for line in told.splitlines() if line.startswith("regauge: ")]) == 1
    assert sorted(folder.iterdir()) == before


def test_other_networks_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        folder, monkeypatch, "predictor", "zoo", "--target", "size", "-o", "p.safetensors", *SMALL, "--statistics", "no"
    )
    with pytest.raises(SystemExit):
        run(folder, monkeypatch, "predict", "p.safetensors", "other.safetensors")
    assert "the networks lack" in capsys.readouterr().err


def test_stores_of_several_architectures_are_learned_from_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chance = torch.Generator().manual_seed(3)
    for name, depth, width in (("deep", 2, 5), ("wide", 1, 7)):
        settings = {"width": width, "depth": depth, "omega": 3.0}
        architecture = Architecture("SIREN", "regauge.nets.siren:Siren", settings)
        store = Store.create(tmp_path / name, architecture, rg.discover(architecture.module(), (torch.randn(5, 2),)))
        networks = {spec.name: torch.randn(80, *spec.shape, generator=chance) for spec in architecture.layout}
        sizes = networks["layers.1.weight"].flatten(1).norm(dim=1).tolist()
        store.append(networks, [{"id": k, "step": 0, "size": size} for k, size in enumerate(sizes)])
    deep, wide = str(tmp_path / "deep"), str(tmp_path / "wide")
    run(folder, monkeypatch, "predictor", "zoo", deep, "--target", "size", "-o", "both.safetensors", *SMALL)
    assert "zoo" in (folder / "both.html").read_text()
    counts = json.loads((folder / "both.json").read_text())["networks"]
    assert sum(counts.values()) == COUNT + 80
    capsys.readouterr()
    run(folder, monkeypatch, "predict", "both.safetensors", "zoo", deep, wide, "--json")
    rows = json.loads(capsys.readouterr().out)["predictions"]
    assert len(rows) == COUNT + 160  # those of another width are read, too
    made = learn.load_predictor(folder / "both.safetensors")
    together = made.predict([Store.open(folder / "zoo"), Store.open(deep), Store.open(wide)])
    assert [row["size"] for row in rows] == pytest.approx(together.tolist(), rel=1e-5)
