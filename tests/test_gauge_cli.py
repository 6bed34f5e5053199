"""Folders and files in another gauge on the command line: the function, the other files, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from folder_cases import SMALL_LLAMA, FolderCase, logits, open_clean

from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.core.params import Params

TIED = FolderCase(
    "LlamaForCausalLM", "LlamaConfig", SMALL_LLAMA | {"num_hidden_layers": 1, "tie_word_embeddings": True}
)
MODELS = """
import torch
from torch import nn


def relu():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.ones(2, 4)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("gauge") / "tied"
    return folder, TIED.save(folder, 0)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


pytestmark = pytest.mark.usefixtures("unsaved")


def facts_of(out: str) -> dict[str, Any]:
    path = Path(out, "regauge.gauge.json") if Path(out).is_dir() else Path(out).with_suffix(".gauge.json")
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["certificate"]["ok"]
    assert found["certificate"]["exact"] <= 1e-9
    names = [row["group"] for row in found["rotated"]]
    assert len(names) == len(set(names))
    page = path.with_suffix(".html").read_text()
    assert "The same function, other weights" in page
    assert page.count("data:image/svg") == 3 + min(4, len(found["layers"]))  # by bits; layers by ranges
    return found


def test_a_tied_folder_is_moved_with_and_without_its_tie(made: tuple[Path, Any], capsys: pytest.CaptureFixture) -> None:
    folder, model = made
    before = logits(model)
    main(["gauge", str(folder), "-o", "tied", "--method", "random", "--always"])
    assert "model.norm.weight: the gain is kept: no scale of the symmetry moves it" in capsys.readouterr().out
    main(["gauge", str(folder), "-o", "untied", "--untie", "--method", "hadamard", "--always", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["certificate"]["ok"]
    streams = {}
    for out in ("tied", "untied"):
        facts = facts_of(out)
        moved = open_clean(out)
        assert moved.config.tie_word_embeddings == (out == "tied")
        assert torch.allclose(logits(moved), before, rtol=0, atol=1e-5 * float(before.abs().max()))
        assert any(row["kind"] == "linear" for row in facts["rotated"])
        streams[out] = [row for row in facts["rotated"] if row["kind"] == "orthogonal" and row["size"] == 8]
        weights = moved.state_dict()
        assert not torch.equal(
            weights["model.layers.0.self_attn.v_proj.weight"],
            model.state_dict()["model.layers.0.self_attn.v_proj.weight"],
        )
        assert {len(row["errors"]) for row in facts["layers"]} == {3}
    assert not streams["tied"]
    assert streams["untied"]
    assert "model.norm.weight" in facts_of("untied")["ones"]


def test_rotations_of_what_does_not_fit_in_memory(
    made: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    folder, _ = made
    rotated = ["--untie", "--method", "hadamard", "--always"]
    main(["gauge", str(folder), "-o", "whole", *rotated])
    monkeypatch.setattr("regauge.checkpoints.job.FileJob.fits", False)
    main(["gauge", str(folder), "-o", "pieces", *rotated])
    assert "so its outputs were not compared: the model has no values here" in capsys.readouterr().out
    # Without --always what rounds worse is not kept, also where values are read tensor by tensor.
    main(["gauge", str(folder), "-o", "best", "--untie"])
    facts = json.loads(Path("best/regauge.gauge.json").read_text())
    totals = json.loads(Path("pieces/regauge.gauge.json").read_text())["totals"]
    is_worse = any(row["after"] > row["before"] for row in totals)
    assert facts["trials"]["kept"] == ("as it is" if is_worse else "Hadamard")
    assert all(row["after"] <= row["before"] for row in facts["totals"])
    whole, pieces = load("whole"), load("pieces")
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)
    with pytest.raises(SystemExit):
        main(["gauge", str(folder), "-o", "learned", "--method", "learned"])
    assert "needs all values in memory" in capsys.readouterr().err
    assert not Path("learned").exists()


def test_a_folder_is_smoothed_and_rotated_on_data(made: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = made
    tokens = torch.randint(3, 24, (4, 6), generator=torch.Generator().manual_seed(1))
    save({"inputs": tokens, "targets": tokens}, "data.safetensors")
    main(["gauge", str(folder), "-o", "smooth", "--method", "smooth", "--data", "data.safetensors", "--bits", "3"])
    data = ["--data", "data.safetensors", "--batch", "2", "--bits", "3"]
    learned = ["gauge", str(folder), "-o", "learned", "--method", "learned", "--untie", "--steps", "20", *data]
    main([*learned, "--by", "function"])
    assert "loss with weights rounded to 3 bits per row: " in capsys.readouterr().out
    before = logits(model)
    for out in ("smooth", "learned"):
        facts = facts_of(out)
        trials = facts["trials"]
        assert trials["values"][trials["kept"]] == min(trials["values"].values())
        assert -facts["objective"]["after"] == trials["values"][trials["kept"]] <= trials["values"]["as it is"]
        assert torch.allclose(logits(open_clean(out)), before, rtol=0, atol=1e-5 * float(before.abs().max()))
    # Gradients that move along take more memory than what other methods hold.
    memory = f"{sum(tensor.numel() for tensor in load(folder).values()) * 100}B"
    with pytest.raises(SystemExit):
        main([*learned, "--by", "function", "--overwrite", "--memory", memory])
    assert "learning a gauge by function needs all values in memory" in capsys.readouterr().err


def relu(scale: float = 1.0) -> Params:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    params = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    params["0.weight"][0] *= scale
    return params


def test_a_file_is_equalized() -> None:
    Path("models.py").write_text(MODELS)
    save(relu(100.0), "in.safetensors")
    main(
        [
            "gauge",
            "in.safetensors",
            "-o",
            "out.safetensors",
            "--model",
            "models.py:relu",
            "--method",
            "equalize",
            "--always",
        ]
    )
    facts = facts_of("out.safetensors")
    moved = load("out.safetensors")
    assert torch.allclose(moved["0.weight"].abs().amax(1), moved["2.weight"].abs().amax(0), rtol=1e-4)
    assert facts["trials"]["kept"] == "equalized"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--untie"], "--untie changes config.json of a folder"),
        (["--method", "learned", "--bits", "1"], "bits is 1, but values are rounded to 2 to 16 bits"),
        (["--group", "-1"], "--group is -1"),
        (["--method", "smooth"], "the method 'smooth' needs the inputs of layers: give --data"),
        (["--method", "learned", "--by", "function"], "--by function needs --method learned and --data"),
    ],
)
def test_what_cannot_be_done_says_why(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("models.py").write_text(MODELS)
    save(relu(), "in.safetensors")
    with pytest.raises(SystemExit):
        main(["gauge", "in.safetensors", "-o", "out.safetensors", "--model", "models.py:relu", *arguments])
    assert sentence in capsys.readouterr().err
    assert not Path("out.safetensors").exists()


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (torch.full((8, 4), torch.nan), "'0.weight' of in.safetensors holds NaN or Inf in 32 of 32 entries"),
        (torch.ones(8, 4, dtype=torch.int8), "if it is quantized, dequantize the network first"),
        (torch.ones(8, 4).to(torch.float8_e4m3fn), "but only values in float16, bfloat16"),
        (torch.ones(8, 5), "'0.weight' has shape (8, 5) in in.safetensors, but (8, 4) in the model"),
        (None, "in.safetensors lacks '0.weight', which the model has"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["gauge", "in.safetensors", "-o", "out.safetensors"],
        ["gauge", "in.safetensors", "-o", "out.safetensors", "--memory", "1KB"],
        ["audit", "in.safetensors", "--mappings", "table.json"],
    ],
    ids=["gauge", "streamed", "audit"],
)
def test_a_checkpoint_that_cannot_be_used_says_why(
    command: list[str], value: torch.Tensor | None, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("models.py").write_text(MODELS)
    Path("table.json").write_text('[["2", "0"]]')
    params = {name: tensor for name, tensor in (relu() | {"0.weight": value}).items() if tensor is not None}
    save(params, "in.safetensors")
    with pytest.raises(SystemExit):
        main([*command, "--model", "models.py:relu"])
    assert sentence in capsys.readouterr().err
    assert not Path("out.safetensors").exists()
