"""`regauge learn matching`, and the use of its matcher on the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import regauge as rg
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.nets.mlp import mlp
from regauge.storage import Store
from regauge.storage.architecture import Architecture

SMALL = ["--width", "8", "--depth", "1", "--vectors", "8", "--epochs", "1", "--checked", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of small networks, data, and two of the networks as checkpoints."""
    folder = tmp_path_factory.mktemp("matching")
    module, chance = mlp(4, 6, 3), torch.Generator().manual_seed(0)
    networks = {name: torch.randn(20, *t.shape, generator=chance) for name, t in module.state_dict().items()}
    architecture = Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [4, 6, 3]})
    store = Store.create(folder / "zoo", architecture, rg.discover(module, (torch.zeros(2, 4),)))
    store.append(networks, [{"id": k, "step": 0} for k in range(20)])
    for k, name in enumerate(("a", "b")):
        save({key: tensor[k] for key, tensor in networks.items()}, folder / f"{name}.safetensors")
    inputs, targets = np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) % 3
    np.savez(folder / "data.npz", inputs=inputs.astype(np.float32), targets=targets)
    return folder


def test_a_matcher_is_trained_and_aligns_and_merges(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    data = ["--data", "data.npz"]
    main(["learn", "matching", "zoo", "-o", "m.safetensors", *data, "--probes", "4", *SMALL, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in report["scores"]} == {
        "no alignment",
        "weight matching",
        "vectors alone",
        "vectors and sweeps",
    }
    learned = ["--method", "learned", "--matcher", "m.safetensors"]
    with pytest.raises(SystemExit):
        main(["align", "a.safetensors", "b.safetensors", "-o", "c.safetensors", *learned])
    assert "--model" in capsys.readouterr().err
    main(["learn", "matching", "zoo", "-o", "plain.safetensors", *SMALL])
    with pytest.raises(SystemExit):
        main(["align", "a.safetensors", "b.safetensors", "-o", "c.safetensors", "--method", "learned"])
    assert "--matcher FILE" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["align", "a.safetensors", "b.safetensors", "-o", "c.safetensors", "--matcher", "plain.safetensors"])
    assert "--method learned" in capsys.readouterr().err
    symmetry = folder / "symmetry.json"
    symmetry.write_text(Store.open("zoo").symmetry.to_json())
    for command in (["align"], ["merge"]):
        out = f"{command[0]}.safetensors"
        named = ["--method", "learned", "--matcher", "plain.safetensors", "--symmetry", "symmetry.json"]
        main([*command, "a.safetensors", "b.safetensors", "-o", out, *named])
        assert load(folder / out).keys() == load(folder / "a.safetensors").keys()
