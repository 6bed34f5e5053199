"""`regauge transport`: folders and files get the result of Python, in memory and streamed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import regauge as rg
from regauge.checkpoints.outputs.provenance import read_provenance
from regauge.cli.main import main

transformers = pytest.importorskip("transformers")

from folder_cases import SMALL_LLAMA, logits, open_clean  # noqa: E402

DATA = """
import torch


def batches():
    tokens = torch.randint(3, 24, (8, 6), generator=torch.Generator().manual_seed(0))
    return [(tokens[k : k + 1], tokens[k : k + 1]) for k in range(8)]
"""
FOLDERS = ("a", "tuned", "b")
USED = ["--data", "mydata.py:batches", "--outputs", "logits"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a base, its fine-tune, and another base, in shards."""
    folder = tmp_path_factory.mktemp("folders")
    for seed, name in enumerate(FOLDERS):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(**SMALL_LLAMA | {"num_hidden_layers": 1}, tie_word_embeddings=False)
        network = transformers.LlamaForCausalLM(config).eval()
        if name == "tuned":
            state = rg.load(folder / "a")
            network.load_state_dict({n: state[n] + 0.1 * t for n, t in network.state_dict().items()})
        network.save_pretrained(folder / name, max_shard_size="2KB")
    (folder / "mydata.py").write_text(DATA)
    return folder


@pytest.fixture(autouse=True)
def _here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*FOLDERS, "mydata.py"):
        (tmp_path / name).symlink_to(made / name)
    monkeypatch.chdir(tmp_path)


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    main(["transport", *FOLDERS, *words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("where", ["in memory", "streamed"])
def test_a_folder_gets_what_python_gives(
    where: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if where == "streamed":
        request.getfixturevalue("streamed")
    said = report(capsys, "--scale", "0.8", "-o", "out")
    assert (said["mode"], said["scale"], said["is_element"]) == ("weights", 0.8, True)
    symmetry = rg.open_model("a").symmetry
    networks = [rg.load(name) for name in FOLDERS]
    expected = rg.transport(*networks, symmetry, scale=0.8)
    state = open_clean("out").state_dict()
    for name, tensor in expected.params.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-5)
    written, known = (rg.Checkpoint.open(one) for one in ("out", "b"))
    assert [(n, t.file.name, t.dtype) for n, t in written.stored.items()] == [
        (n, t.file.name, t.dtype) for n, t in known.stored.items()
    ]
    origin = read_provenance(Path("out"))
    assert origin is not None
    assert [(one["as"], one["path"]) for one in origin["inputs"]] == [
        ("base_a", "a"), ("tuned_a", "tuned"), ("base_b", "b")
    ]  # fmt: skip
    assert origin["command"] == "transport"
    assert not torch.equal(logits(open_clean("out")), logits(open_clean("b")))
    main(["transport", *FOLDERS, "--scale", "0.8", "-o", "out.safetensors", "--dtype", "bfloat16"])
    assert {t.dtype for t in rg.load("out.safetensors").values()} == {torch.bfloat16}


def test_data_choose_the_scale_and_others_judge(capsys: pytest.CaptureFixture[str]) -> None:
    said = report(capsys, *USED, "--steps", "4", "-o", "out")
    assert said["mode"] == "task"
    assert 0 <= said["steps"] <= 4
    base, result = said["losses"]
    assert (base["name"], result["name"]) == ("base B", "result")
    model = rg.open_model("a")
    task = rg.hub.open_task(model, "mydata.py:batches", outputs=("logits",))
    choosing, judging = task.split(generator=torch.Generator().manual_seed(0))
    networks = [rg.load(name) for name in FOLDERS]
    expected = rg.transport(
        *networks, model.symmetry, task=choosing, steps=4, generator=torch.Generator().manual_seed(0)
    )
    assert said["scale"] == pytest.approx(expected.scale, rel=1e-3)
    assert result["loss"] == pytest.approx(judging.evaluate(expected.params)["loss"], rel=1e-3)


def test_a_dry_run_writes_nothing(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert report(capsys, "-o", "out", "--dry-run")["memory_bytes"] > 0
    request.getfixturevalue("streamed")
    assert report(capsys, "-o", "out", "--dry-run")["sweep_bytes"] > 0
    assert not (tmp_path / "out").exists()


def test_what_does_not_go_together_is_refused(refused: Callable[..., str], request: pytest.FixtureRequest) -> None:
    given = ["transport", *FOLDERS, "-o", "out"]
    assert "--steps 3: training needs a task" in refused(*given, "--steps", "3")
    assert "there is no checkpoint 'c'" in refused("transport", "a", "tuned", "c", "-o", "out")
    assert "the method 'activations' needs data" in refused(*given, "--method", "activations")
    request.getfixturevalue("streamed")
    assert "--data runs the model and needs the networks in memory" in refused(*given, *USED)
