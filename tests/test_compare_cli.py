"""`regauge compare`: verdicts about checkpoints in memory or streamed, pages, JSON, and one sentence for every
mistake.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import regauge as rg
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.core.params import Params
from regauge.nets.transformer import Llama

MODELS = """
import torch
from regauge.nets.transformer import Llama


def model(width=16):
    return Llama(12, width=width, layers=1, heads=2, kv_heads=1).eval(), torch.zeros(2, 4, dtype=torch.long)


def wide():
    return model(24)


def batches():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(12, (6, 5), generator=generator)
    return [(tokens[:, :4], tokens[:, 1:])]
"""


def random_network(seed: int) -> Params:
    module, generator = Llama(12, width=16, layers=1, heads=2, kv_heads=1), torch.Generator().manual_seed(seed)
    return {name: 0.3 * torch.randn(t.shape, generator=generator) for name, t in module.state_dict().items()}


@pytest.fixture(scope="module")
def symmetry() -> rg.Symmetry:
    module = Llama(12, width=16, layers=1, heads=2, kv_heads=1).eval()
    return rg.discover(module, (torch.zeros(2, 4, dtype=torch.long),))


@pytest.fixture(scope="module")
def networks(symmetry: rg.Symmetry) -> dict[str, Params]:
    """Return a network and a descendant, both in other gauges, and a stranger."""
    a, noise = random_network(0), random_network(1)
    child = {name: tensor + 0.2 * noise[name] for name, tensor in a.items()}
    moved = [symmetry.act(symmetry.random(torch.Generator().manual_seed(k)), one) for k, one in enumerate((a, child))]
    return {"a": a, "child": child, "copy": moved[0], "moved": moved[1], "stranger": random_network(2)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, networks: dict[str, Params], symmetry: rg.Symmetry) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "symmetry.json").write_text(symmetry.to_json())
    (tmp_path / "nets.py").write_text(MODELS)
    for name, params in networks.items():
        save(params, tmp_path / f"{name}.safetensors")
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    capsys.readouterr()
    main(["compare", *args, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


WORDS = {
    "a": "identical",
    "copy": "same network in another gauge",
    "child": "descended",
    "moved": "descended",
    "stranger": "unrelated",
}


@pytest.mark.usefixtures("folder")
def test_every_relation_has_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    for name, verdict in WORDS.items():
        found = told(capsys, "a.safetensors", f"{name}.safetensors", "--symmetry", "symmetry.json")
        assert found["verdict"] == verdict, found["reason"]
        assert {"layer", "before", "after"} == found["layers"][0].keys()
        assert {row["tensor"] for row in found["tensors"]} >= {"embedding.weight", "head.weight"}


def extended(params: Params) -> Params:
    """Return a network with two additional tokens."""
    return {n: torch.cat([t, t[:2]]) if t.shape[0] == 12 else t for n, t in params.items()}


@pytest.mark.usefixtures("streamed")
def test_an_extended_vocabulary_is_compared_as_far_as_both_have_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(extended(load(folder / "moved.safetensors")), folder / "more.safetensors")
    args = ["a.safetensors", "more.safetensors", "--symmetry", "symmetry.json", "--memory", "2GB"]
    found = told(capsys, *args, "-o", "page.html")
    assert found["verdict"] == "descended"
    assert "where A has 12 and B 14" in found["notes"][-1]
    assert {row["tensor"]: row["size"] for row in found["tensors"]}["head.weight"] == 12 * 16
    assert "where A has 12 and B 14" in (folder / "page.html").read_text()


@pytest.mark.usefixtures("folder", "streamed")
def test_streamed_networks_get_the_same_verdict(
    capsys: pytest.CaptureFixture[str], networks: dict[str, Params]
) -> None:
    module = Llama(12, width=16, layers=1, heads=2, kv_heads=1).eval()
    symmetry = rg.discover(module, (torch.zeros(2, 4, dtype=torch.long),))
    for name in ("moved", "stranger"):
        found = told(capsys, "a.safetensors", f"{name}.safetensors", "--model", "nets.py:model", "--memory", "2GB")
        known = rg.compare(networks["a"], networks[name], symmetry)
        numbers = {row["name"]: row["value"] for row in found["numbers"]}
        assert found["verdict"] == known.verdict
        assert numbers["distance as stored"] == pytest.approx(known.distance, rel=1e-5)
        assert numbers["distance modulo the group"] == pytest.approx(known.orbit_distance, rel=0.02, abs=1e-4)
        assert numbers["p-value of independence, as stored"] == known.p_value
        assert "distance of fingerprints" not in numbers


def test_the_page_has_everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["a.safetensors", "moved.safetensors", "--model", "nets.py:model"]
    main(["compare", *args, "--data", "nets.py:batches", "-o", "page.html"])
    out = capsys.readouterr().out
    assert out.startswith("descended: ")
    assert "loss of the merge" in out
    page = (folder / "page.html").read_text()
    assert "<h1>Descended</h1>" in page
    assert "data:image/svg+xml" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    for word in ("loss of the merge", "blocks.0.attention.query.weight", "p-value of independence", "a.safetensors"):
        assert word in page


@pytest.mark.parametrize(
    ("change", "args", "sentence"),
    [
        (None, ["a", "copy"], "the symmetry is unknown: name the model with --model"),
        (None, ["a"], "1 checkpoints are given, but a comparison needs two or more"),
        (None, ["a", "copy", "--model", "nets.py:wide"], "give the checkpoint and the model of the same architecture"),
        (None, ["a", "copy", "--model", "nets.py:model", "-o", "nets.py"], "must end in .html"),
        (None, ["a", "copy", "--model", "nets.py:model", "--draws", "0"], "at least one random element"),
        ("missing", ["a", "broken", "--model", "nets.py:model"], "lacks 'head.weight'"),
        (
            "extended",
            ["a", "broken", "--model", "nets.py:model", "--data", "nets.py:batches"],
            "their tensors or tokens differ",
        ),
        ("nan", ["a", "broken", "--model", "nets.py:model"], "holds NaN or Inf in"),
        (
            "nan",
            ["broken", "broken2", "a", "--model", "nets.py:model"],
            "of broken.safetensors holds NaN or Inf in",
        ),
        ("quantized", ["a", "broken", "--model", "nets.py:model"], "quantized"),
    ],
)
def test_mistakes_get_a_sentence(
    folder: Path, refused: Callable[..., str], change: str | None, args: list[str], sentence: str
) -> None:
    params = load(folder / "copy.safetensors")
    if change == "missing":
        params = {name: tensor for name, tensor in params.items() if name != "head.weight"}
    elif change == "extended":
        params = extended(params)
    elif change == "nan":
        params = {**params, "head.weight": params["head.weight"] / 0}
    elif change == "quantized":
        params["head.qweight"] = params.pop("head.weight").to(torch.int32)
    for name in ("broken", "broken2"):
        save(params, folder / f"{name}.safetensors")
    files = [f"{word}.safetensors" if (folder / f"{word}.safetensors").exists() else word for word in args]
    assert sentence in refused("compare", *files)
