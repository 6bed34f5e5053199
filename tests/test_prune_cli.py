"""Folders and files pruned on the command line: the result runs, config.json has its sizes, and refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from folder_cases import DENSE, SMALL_LLAMA, FolderCase, first_tensor, logits, open_clean

import regauge as rg
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.core.params import Params

LLAMA = FolderCase(
    "LlamaForCausalLM", "LlamaConfig", SMALL_LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 2}
)
MODELS = """
import torch
from torch import nn


def relu():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.ones(2, 4)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def facts_of(out: str) -> dict[str, Any]:
    path = Path(out, "regauge.prune.json") if Path(out).is_dir() else Path(out).with_suffix(".prune.json")
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["certificate"]["ok"]
    page = path.with_suffix(".html").read_text()
    assert "A smaller network" in page
    assert page.count("data:image/svg") >= 1
    return found


def test_a_llama_loses_hidden_units_and_heads_and_its_config_says_so() -> None:
    replace(LLAMA, settings={**LLAMA.settings, "num_hidden_layers": 1}).save(Path("model"), 0)
    main(["prune", "model", "-o", "small", "--share", "0.5"])
    facts, small = facts_of("small"), open_clean("small")
    assert {key.rpartition(".")[2] for key in facts["config"]} == {
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    }
    assert small.config.num_key_value_heads == 1
    assert logits(small).isfinite().all()
    assert facts["values"]["after"] == sum(p.numel() for p in small.parameters())
    assert any("config.json cannot describe it" in row["reason"] for row in facts["fixed"])
    assert facts["certificate"]["cut"] <= 1e-9


def test_units_of_a_llama_that_are_not_needed_go_and_the_function_stays() -> None:
    model = LLAMA.save(Path("model"), 0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[:, 3] = 0.0
            layer.mlp.gate_proj.weight[5] = layer.mlp.gate_proj.weight[4]
            layer.mlp.up_proj.weight[5] = -2 * layer.mlp.up_proj.weight[4]
    model.save_pretrained("model")
    main(["prune", "model", "-o", "small"])
    facts, small = facts_of("small"), open_clean("small")
    size = model.config.intermediate_size
    assert facts["config"] == {"intermediate_size": {"before": size, "after": size - 2}}
    assert {why: len(names) for why, names in facts["exact"].items()} == {"unread": 2, "duplicate": 2}
    before = logits(model)
    assert torch.allclose(logits(small), before, rtol=0, atol=1e-5 * float(before.abs().max()))


@pytest.mark.parametrize(
    ("family", "kind", "layers", "number"),
    [
        ("gpt2", transformers.AutoModelForCausalLM, "n_layer", "n_inner"),
        ("bert", transformers.AutoModelForMaskedLM, "num_hidden_layers", "intermediate_size"),
    ],
)
def test_what_a_config_cannot_say_is_left_with_the_reason(
    family: str, kind: Any, layers: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In families where the head size is the stream width divided by the number of heads, no head can be removed."""
    replace(DENSE[family], settings={**DENSE[family].settings, layers: 1}).save(Path("model"), 0)
    main(["prune", "model", "-o", "small", "--share", "0.25"])
    facts = facts_of("small")
    assert set(facts["config"]) == {number}
    assert "config.json cannot describe it" in capsys.readouterr().out
    small = open_clean("small", kind)
    assert sum(p.numel() for p in small.parameters()) < facts["values"]["before"]
    with torch.no_grad():
        assert first_tensor(small(torch.ones(1, 4).long())).isfinite().all()


def relu() -> Params:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def test_the_default_needs_data_and_is_that_of_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    """A Llama is cut to a half with data, and the page states the change of the outputs and the removed share."""
    replace(LLAMA, settings={**LLAMA.settings, "num_hidden_layers": 1}).save(Path("model"), 0)
    tokens = torch.randint(3, 24, (12, 6), generator=torch.Generator().manual_seed(1))
    save({"inputs": tokens, "targets": tokens}, "data.safetensors")
    main(["prune", "model", "-o", "small", "--share", "0.5", "--data", "data.safetensors", "--batch", "8"])
    facts = facts_of("small")
    assert facts["criterion"] == "output"
    assert facts["certificate"]["given"] > 1e-3
    assert "outputs differ from those of the given network by " in capsys.readouterr().out
    page = Path("small/regauge.prune.html").read_text()
    cut = sum(row["after"] < row["before"] for row in facts["groups"])
    assert f"{cut} of " in page
    assert "groups lost units: 50% were asked for" in page
    assert "differ from those of the given one by" in page
    main(["prune", "model", "-o", "again", "--share", "0.5"])
    assert facts_of("again")["criterion"] == "magnitude"
    assert "With data, those units are removed that others can replace" in " ".join(capsys.readouterr().out.split())


def test_the_command_and_the_function_prune_alike() -> None:
    Path("models.py").write_text(MODELS)
    save(relu(), "in.safetensors")
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(32) % 3
    save({"inputs": inputs, "targets": targets}, "data.safetensors")
    options = ["--model", "models.py:relu", "--data", "data.safetensors", "--share", "0.5"]
    main(["prune", "in.safetensors", "-o", "out.safetensors", *options])
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    result = rg.prune(relu(), rg.discover(module, (inputs[:2],)), share=0.5, task=rg.Task(module, [(inputs, targets)]))
    found = load("out.safetensors")
    assert all(torch.equal(found[key], result.params[key]) for key in result.params)
    losses = facts_of("out.safetensors")["losses"]
    assert losses == {when: dict(row) for when, row in result.losses.items()}


@pytest.mark.parametrize("criterion", ["taylor", "output", "random"])
def test_a_file_is_pruned_by_data(criterion: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("models.py").write_text(MODELS)
    save(relu(), "in.safetensors")
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    save({"inputs": inputs, "targets": torch.arange(32) % 3}, "data.safetensors")
    options = ["--model", "models.py:relu", "--data", "data.safetensors", "--share", "0.5", "--criterion", criterion]
    main(["prune", "in.safetensors", "-o", "out.safetensors", *options, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["losses"]] == ["as it was", "exact removals", "at the end"]
    facts = facts_of("out.safetensors")
    assert facts["groups"] == [{"group": "0", "before": 8, "after": 4}]
    found = load("out.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "0.weight": (4, 4),
        "0.bias": (4,),
        "2.weight": (3, 4),
        "2.bias": (3,),
    }
    kept = facts["kept"]["0"]
    assert torch.equal(found["0.weight"], relu()["0.weight"][kept])
    assert torch.equal(found["2.weight"], relu()["2.weight"][:, kept]) == (criterion != "output")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--share", "1"], "--share is 1.0, but must be at least 0 and below 1"),
        (["--criterion", "taylor"], "the criterion 'taylor' needs data: give --data"),
        (["--groups", "5"], "there is no group '5'"),
        (["--memory", "1KB"], "pruning needs all values in memory"),
    ],
)
def test_what_cannot_be_done_says_why(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("models.py").write_text(MODELS)
    save(relu(), "in.safetensors")
    with pytest.raises(SystemExit):
        main(["prune", "in.safetensors", "-o", "out.safetensors", "--model", "models.py:relu", *arguments])
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not Path("out.safetensors").exists()
