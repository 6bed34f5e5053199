"""Several networks in one file, prefixes of training, names of the hub, and files of another kind."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regauge as rg
from regauge.checkpoints.checkpoint import Checkpoint, load
from regauge.checkpoints.location import find_cached, say_absent
from regauge.checkpoints.names.prefixes import unwrap
from regauge.checkpoints.writing import save
from regauge.cli.main import main

MODEL = """
import torch
from torch import nn


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (torch.ones(2, 4),)
"""
MLP = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
SYMMETRY = rg.discover(MLP, (torch.ones(2, 4),))
Params = dict[str, Tensor]


def _net(seed: int, prefix: str = "") -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {prefix + n: torch.randn(t.shape, generator=generator) for n, t in MLP.state_dict().items()}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    torch.save(_net(0), "a.pt")
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
SEVERAL: dict[str, tuple[dict[str, Any], str, str]] = {
    "timm": (
        {"epoch": 3, "state_dict": _net(1), "state_dict_ema": _net(2), "optimizer": OPTIMIZER},
        "state_dict",
        "state_dict_ema",
    ),
    "detr": (
        {"model": _net(1), "model_ema": _net(2), "lr_scheduler": {"last.lr": torch.ones(1)}},
        "model",
        "model_ema",
    ),
    "basicsr": ({"params": _net(1), "params_ema": _net(2)}, "params", "params_ema"),
    "yolo": ({"model": _net(1), "ema": _net(2), "updates": 5}, "model", "ema"),
    "lightning": (
        {"state_dict": _net(1), "callbacks": {"EMA{'decay': 1}": {"ema_weights": _net(2)}}, "loops": {}},
        "state_dict",
        "callbacks/EMA{'decay': 1}/ema_weights",
    ),
    "nested": ({"state_dict": _net(1), "ema": {"decay": 0.9, "shadow": _net(2)}}, "state_dict", "ema/shadow"),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_the_other_network_is_named_and_can_be_chosen(
    name: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    content, usual, other = SEVERAL[name]
    torch.save(content, "b.pt")
    with caplog.at_level(logging.WARNING):
        found = load("b.pt")
    assert all(torch.equal(found[n], t) for n, t in _net(1).items())
    assert f"'b.pt' contains several networks: {usual!r} is read, but not {other!r}" in caplog.text
    caplog.clear()
    for chosen in (load("b.pt", entry=other), load(f"b.pt:{other}")):
        assert all(torch.equal(chosen[n], t) for n, t in _net(2).items())
    assert all(torch.equal(load("b.pt", entry=usual)[n], t) for n, t in _net(1).items())
    assert not caplog.text
    capsys.readouterr()
    arguments = ["align", "a.pt", "b.pt", "--model", "net.py:mlp", "-o", "out.safetensors", "--overwrite"]
    main(arguments)
    assert capsys.readouterr().err.count(f"{other!r}; to choose another, write b.pt:{other}") == 1
    expected = rg.align(_net(0), _net(1), SYMMETRY).params
    assert all(torch.equal(load("out.safetensors")[n], t) for n, t in expected.items())
    arguments[2] = f"b.pt:{other}"
    main(arguments)
    assert "several networks" not in capsys.readouterr().err
    expected = rg.align("a.pt", f"b.pt:{other}", SYMMETRY).params
    assert all(torch.equal(load("out.safetensors")[n], t) for n, t in expected.items())


def test_entries_that_are_not_known_are_refused() -> None:
    torch.save({"generator": _net(1), "discriminator": _net(2)}, "gan.pt")
    with pytest.raises(ValueError, match=r"contains several networks \('generator', 'discriminator'\); choose one"):
        load("gan.pt")
    assert torch.equal(load("gan.pt:discriminator")["0.bias"], _net(2)["0.bias"])
    with pytest.raises(
        ValueError, match=r"no network called 'ema'; the networks in it are 'generator', 'discriminator'"
    ):
        load("gan.pt", entry="ema")
    with pytest.raises(ValueError, match="no network called 'ema'; it contains only one network"):
        load("a.pt:ema")
    save(_net(0), "a.safetensors")
    with pytest.raises(ValueError, match="contains only one network and has no entry 'ema'; leave out ':ema'"):
        load("a.safetensors", entry="ema")
    torch.save({"net": _net(3), "epoch": 1}, "one.pt")
    assert torch.equal(load("one.pt")["0.bias"], _net(3)["0.bias"])


PREFIXES = ["module.", "_orig_mod.", "model.", "net.", "module._orig_mod.", "_fsdp_wrapped_module.", "model.net."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_are_left_out_told_and_kept_in_the_output(
    prefix: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"state_dict": _net(1, prefix)}, "b.ckpt")
    main(["align", "a.pt", "b.ckpt", "--model", "net.py:mlp", "-o", "out.safetensors"])
    said = capsys.readouterr().err
    assert f"b.ckpt: names such as '{prefix}0.weight' are read as '0.weight', the name in the model" in said
    expected = rg.align(_net(0), _net(1), SYMMETRY).params
    found = load("out.safetensors")
    assert list(found) == [prefix + name for name in expected]
    assert all(torch.equal(found[prefix + n], t) for n, t in expected.items())
    rg.align("a.pt", "b.ckpt", SYMMETRY, out="python.safetensors")
    assert all(torch.equal(found[n], t) for n, t in load("python.safetensors").items())
    main(["align", "b.ckpt", "a.pt", "--model", "net.py:mlp", "-o", "other.safetensors"])
    assert list(load("other.safetensors")) == list(_net(0))


@pytest.mark.usefixtures("unsaved")
@pytest.mark.parametrize("prefix", PREFIXES)
def test_commands_that_judge_leave_prefixes_out(prefix: str) -> None:
    save({"inputs": torch.randn(8, 4), "targets": torch.randint(3, (8,))}, "test.safetensors")
    torch.save(_net(1), "b.pt")
    torch.save({"state_dict": _net(1, prefix)}, "b.ckpt")
    for other in ("b.pt", "b.ckpt"):
        ends = ["a.pt", other, "--model", "net.py:mlp", "--data", "test.safetensors", "--points", "3"]
        main(["line", *ends, "-o", f"{other}.svg"])
    assert Path("b.pt.csv").read_text() == Path("b.ckpt.csv").read_text()


def test_wrappers_within_names_are_left_out() -> None:
    params = {n.replace("0.", "0._checkpoint_wrapped_module."): t for n, t in _net(1).items()}
    save(params, "b.safetensors")
    found = unwrap(Checkpoint.open("b.safetensors"), list(_net(0)))
    assert all(torch.equal(found[n], t) for n, t in _net(1).items())


@pytest.mark.parametrize("names", [["module.0.weight", "0.weight"], ["module.first.weight"], ["0.weight", "2.weight"]])
def test_other_names_stay(names: list[str]) -> None:
    save({name: torch.ones(2) for name in names}, "b.safetensors")
    checkpoint = Checkpoint.open("b.safetensors")
    assert unwrap(checkpoint, list(_net(0))) is checkpoint


def _cached(root: Path, name: str = "org/small") -> Path:
    folder = root / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    save(_net(4), snapshot / "model.safetensors")
    return snapshot


@pytest.mark.parametrize(("variable", "inside"), [("HF_HOME", "hub"), ("HUGGINGFACE_HUB_CACHE", ""), ("HOME", "")])
def test_models_of_the_hub_are_read_from_its_cache(
    variable: str, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache"
    monkeypatch.setenv(variable, str(root))
    _cached(root / (".cache/huggingface/hub" if variable == "HOME" else inside))
    assert torch.equal(load("org/small")["0.bias"], _net(4)["0.bias"])
    main(["align", "a.pt", "org/small", "--model", "net.py:mlp", "-o", "out.safetensors"])
    expected = rg.align(_net(0), _net(4), SYMMETRY).params
    assert all(torch.equal(load("out.safetensors")[n], t) for n, t in expected.items())
    (root / "other").mkdir()


def test_what_is_there_is_no_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = _cached(tmp_path / "cache")
    assert find_cached("org/small") == snapshot
    (snapshot.parents[1] / "refs" / "main").write_text("../../../../elsewhere")
    assert find_cached("org/small") is None
    assert find_cached("../small") is None
    Path("org/small").mkdir(parents=True)
    assert find_cached("org/small") is None


def test_how_a_model_of_the_hub_is_fetched(refused: Any) -> None:
    text = refused("align", "a.pt", "org/model-b", "--model", "net.py:mlp", "-o", "out.safetensors")
    assert "there is no checkpoint 'org/model-b'; check the path" in text
    assert "hf download org/model-b --local-dir model-b" in text
    with pytest.raises(FileNotFoundError, match="hf download org/model-b --local-dir model-b"):
        load("org/model-b")
    assert "hf download gpt2 --local-dir gpt2" in refused("discover", "gpt2")
    assert "hf download" not in say_absent("folder/b.pt")
    assert "hf download" not in say_absent("b")


def test_files_of_another_kind_say_what_reads_them() -> None:
    save(_net(0), "a.safetensors")
    alignment = rg.align("a.safetensors", "a.safetensors", SYMMETRY, out="out.safetensors")
    assert rg.checkpoints.load_alignment("out.alignment.safetensors").element is not None
    assert alignment.element is not None
    for path in ("a.pt", "a.safetensors"):
        with pytest.raises(ValueError, match=r"is not an alignment but the checkpoint of a network, whose path"):
            rg.checkpoints.load_alignment(path)
    with pytest.raises(ValueError, match=r"is no flow but an alignment, which regauge\.load_alignment reads"):
        rg.flow.load_flow("out.alignment.safetensors")
    with pytest.raises(ValueError, match=r"it is an alignment, which regauge\.load_alignment reads"):
        rg.inr.load_inr("out.alignment.safetensors")


def test_a_head_that_an_adapter_stores_beside_a_tied_base_gets_advice() -> None:
    Path("base").mkdir()
    config = {"tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"], "vocab_size": 16}
    Path("base/config.json").write_text(json.dumps(config))
    save({"model.embed_tokens.weight": torch.ones(16, 4)}, "base/model.safetensors")
    Path("adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "init_lora_weights": True}
    Path("adapter/adapter_config.json").write_text(json.dumps(settings))
    save({"base_model.model.lm_head.weight": torch.ones(16, 4)}, "adapter/adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"stores 'lm_head.weight' as a whole.*Give the base a separate head"):
        Checkpoint.open("base+adapter")
