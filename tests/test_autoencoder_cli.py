"""`regauge learn autoencoder` and its users: encode, decode, nearest, and a map by latent vectors."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import regauge as rg
from regauge import learn
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.nets.siren import Siren
from regauge.storage import Store
from regauge.storage.architecture import Architecture

COUNT = 60
SMALL = ["--width", "8", "--depth", "1", "--latent", "3", "--decoder-widths", "8", "--epochs", "2", "--batch", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a store of small sine networks, a checkpoint of one network, and an autoencoder."""
    folder = tmp_path_factory.mktemp("autoencoder")
    module = Siren(2, 4, 1, depth=1, omega=3.0, generator=torch.Generator().manual_seed(0))
    chance = torch.Generator().manual_seed(1)
    networks = {name: torch.randn(COUNT, *t.shape, generator=chance) for name, t in module.state_dict().items()}
    architecture = Architecture("SIREN", "regauge.nets.siren:Siren", {"width": 4, "depth": 1, "omega": 3.0})
    store = Store.create(folder / "zoo", architecture, rg.discover(module, (torch.randn(5, 2),)))
    store.append(networks, [{"id": 100 + k, "step": 7, "kind": "ab"[k % 2]} for k in range(COUNT)])
    save({name: tensor[5] for name, tensor in networks.items()}, folder / "one.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        run(folder, patch, "autoencoder", "zoo", "-o", "auto.safetensors", "--inputs", "grid:4x3", *SMALL)
    return folder


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.chdir(folder)
    main(["learn", *args])


def fail(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as error:
        run(folder, monkeypatch, *args)
    assert error.value.code
    return capsys.readouterr().err


def test_an_autoencoder_is_written_with_its_report(folder: Path) -> None:
    results = json.loads((folder / "auto.json").read_text())
    page = (folder / "auto.html").read_text()
    assert len(results["history"]) == 2
    assert torch.tensor(results["pictures"]["decoded"]).shape == (results["networks"]["test"], 4, 3, 1)
    assert page.count("data:image") == 3
    assert not list(folder.glob("*.partial*"))
    auto = learn.load_autoencoder(folder / "auto.safetensors")
    store = Store.open(folder / "zoo")
    assert auto.architecture == store.architecture
    assert auto.encode(store).shape == (COUNT, 3)


def test_networks_are_encoded_and_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder, monkeypatch, "encode", "auto.safetensors", "zoo", "one.safetensors", "-o", "latents.csv")
    with (folder / "latents.csv").open() as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [*map(str, range(100, 100 + COUNT)), ""]
    assert [rows[5][f"z{k}"] for k in range(3)] == [rows[-1][f"z{k}"] for k in range(3)]
    for source, name in (("zoo", "twins"), ("latents.csv", "again"), ("one.safetensors", "twin.safetensors")):
        run(folder, monkeypatch, "decode", "auto.safetensors", source, "-o", name)
    twins, again = (Store.open(folder / name) for name in ("twins", "again"))
    assert twins.rows.dicts([3]) == Store.open(folder / "zoo").rows.dicts([3])
    twin = load(folder / "twin.safetensors")
    for name, tensor in twins.read(range(COUNT)).items():
        torch.testing.assert_close(tensor, again.read(range(COUNT))[name])
        torch.testing.assert_close(tensor[5], twin[name])


def test_nearest_networks_and_a_map(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["nearest", "auto.safetensors", "one.safetensors", "--among", "zoo", "--count", "2", "--json"]
    run(folder, monkeypatch, *args)
    first, second = json.loads(capsys.readouterr().out)["nearest networks"]
    assert (first["nearest"], first["of step"], first["rank"]) == (105, 7, 1)
    assert first["distance"] < 1e-6 < second["distance"]
    main(["zoo", "map", "zoo", "-o", "map.svg", "--by", "latent", "--autoencoder", "auto.safetensors"])
    auto = learn.load_autoencoder("auto.safetensors")
    latents = auto.encode(Store.open("zoo"))
    with Path("map.csv").open() as file:
        rows = list(csv.DictReader(file))
    places = torch.tensor([[float(row["x"]), float(row["y"])] for row in rows])
    order = [int(row["id"]) - 100 for row in rows]
    # The plane shows no distance larger than it is.
    assert bool((torch.cdist(places, places) <= torch.cdist(latents[order], latents[order]) + 1e-4).all())


def test_what_is_typed_wrongly_gets_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["autoencoder", "zoo", "-o", "other.safetensors"]
    for args, text in (
        (start, "give --inputs"),
        ([*start, "--inputs", "points:12"], "after 'points', write"),
        ([*start, "--inputs", "grid:3"], "cannot be run on the inputs"),
        ([*start, "--inputs", "grid:3x3", "--temperature", "2"], "--loss distillation"),
        ([*start, "--inputs", "grid:3x3", "--decoder", "template", "--decoder-widths", "3"], "leave it out"),
        ([*start, "--inputs", "grid:3x3", "--latent", "0"], "must be positive"),
        (["encode", "one.safetensors", "zoo", "-o", "z.csv"], "is no autoencoder"),
        (["decode", "auto.safetensors", "zoo", "-o", "zoo"], "exists; name a new folder"),
        (["nearest", "auto.safetensors", "--among", "zoo"], "no networks are named"),
    ):
        assert text in " ".join(fail(folder, monkeypatch, capsys, *args).split())
    assert not list(folder.glob("other*"))
    (folder / "bad.csv").write_text("id,z0,z1,z2\n1,0.5,x,2\n")
    assert "not a latent vector" in fail(
        folder, monkeypatch, capsys, "decode", "auto.safetensors", "bad.csv", "-o", "n"
    )
    with pytest.raises(SystemExit):
        main(["zoo", "map", "zoo", "-o", "map2.svg", "--by", "latent"])
    assert "belong together" in capsys.readouterr().err
