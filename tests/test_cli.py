"""The command line: its outputs, and one sentence for every mistake."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import regauge as rg
from regauge.checkpoints.alignments import load_alignment
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli import output
from regauge.cli.main import main
from regauge.core.symmetry import Symmetry

MODELS = """
import torch
from torch import nn


def bare():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def model():
    return bare(), torch.ones(2, 4)


def with_kwargs():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = bare()

        def forward(self, x, *, y):
            return {"logits": self.layers(x + y), "inputs": x}

    return Sum(), (torch.ones(2, 4),), {"y": torch.ones(4)}


def branching():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = bare()

        def forward(self, x):
            return self.layers(x) if x.sum() > 0 else x

    return Branching(), (torch.ones(2, 4),)


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        yield torch.randn(16, 4, generator=generator), torch.randint(0, 3, (16,), generator=generator)


def number():
    return 3


def nothing():
    return []


def odd_batches():
    return [1, 2]


def fails():
    raise RuntimeError("broken on purpose")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with models, data and two checkpoints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mynets.py").write_text(MODELS)
    for name, seed in (("a", 0), ("b", 1)):
        generator = torch.Generator().manual_seed(seed)
        shapes = {"0.weight": (8, 4), "0.bias": (8,), "2.weight": (3, 8), "2.bias": (3,)}
        save({k: torch.randn(s, generator=generator) for k, s in shapes.items()}, tmp_path / f"{name}.safetensors")
    return tmp_path


def _function(params: dict[str, torch.Tensor]) -> torch.Tensor:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return torch.func.functional_call(module, params, (inputs,))


@pytest.mark.parametrize(
    "args",
    [
        ["mynets.py:model"],
        ["mynets:model"],
        ["mynets.py:bare", "--input-shape", "2x4"],
        ["mynets.py:with_kwargs"],
        ["mynets.py:with_kwargs", "--outputs", "logits"],
        ["mynets.py:bare", "--input-shape", "2x4", "--input-dtype", "float64", "--skip-verification"],
    ],
)
def test_discover(folder: Path, capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    if "float64" in args:
        (folder / "mynets.py").write_text(MODELS.replace("nn.Linear(8, 3))", "nn.Linear(8, 3)).double()"))
    main(["discover", *args, "-o", "found.json"])
    out = capsys.readouterr().out
    symmetry = Symmetry.from_json((folder / "found.json").read_text())
    assert [(group.kind, group.size) for group in symmetry.groups] == [("scaled", 8)]
    assert str(symmetry) in out
    assert ("not verified: --skip-verification" if "--skip-verification" in args else "verified: ") in out


def test_discover_on_the_meta_device(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["discover", "mynets.py:bare", "--input-shape", "2x4", "--meta"])
    out = capsys.readouterr().out
    assert "1 group," in out
    assert "not verified: the model has no values" in out


@pytest.mark.parametrize("scales", ["balance", "keep"])
def test_align_then_apply_then_undo(folder: Path, capsys: pytest.CaptureFixture[str], scales: str) -> None:
    files = ["a.safetensors", "b.safetensors", "-o", "out.safetensors"]
    main(["align", *files, "--model", "mynets.py:model", "--scales", scales])
    assert "distance between A and B" in capsys.readouterr().out
    a, b, moved = (load(folder / f"{name}.safetensors") for name in ("a", "b", "out"))
    assert not torch.equal(moved["0.bias"], b["0.bias"])
    assert torch.allclose(_function(moved), _function(b), atol=1e-5)

    def distance(params: dict[str, torch.Tensor]) -> float:
        return float(sum((a[name] - params[name]).square().sum() for name in a))

    assert distance(moved) < distance(b)
    alignment = load_alignment(folder / "out.alignment.safetensors")
    assert alignment.symmetry.groups[0].size == 8

    main(["apply", "out.safetensors", "b.safetensors", "-o", "again.safetensors"])
    main(["apply", "out.alignment.safetensors", "out.safetensors", "--inverse", "-o", "back.safetensors"])
    for name, tensor in moved.items():
        assert torch.equal(load(folder / "again.safetensors")[name], tensor)
        assert torch.allclose(load(folder / "back.safetensors")[name], b[name], rtol=1e-6, atol=0)
        assert scales == "balance" or torch.equal(load(folder / "back.safetensors")[name], b[name])


def test_align_with_a_symmetry_from_a_file(folder: Path) -> None:
    main(["discover", "mynets.py:model", "-o", "found.json"])
    torch.save({"state_dict": load(folder / "b.safetensors")}, folder / "b.pt")
    main(["align", "a.safetensors", "b.pt", "--symmetry", "found.json", "-o", "one.safetensors"])
    main(["align", "a.safetensors", "b.safetensors", "--model", "mynets.py:model", "-o", "two.safetensors"])
    one, two = load(folder / "one.safetensors"), load(folder / "two.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--refine"],
        ["--restarts", "2"],
        ["--method", "activations", "--statistic", "product"],
        ["--scales", "keep"],
        ["--method", "straight-through"],
        ["--method", "sinkhorn"],
        ["--method", "continuous-descent"],
        ["--method", "frank-wolfe", "--restarts", "1"],
    ],
    ids=" ".join,
)
def test_align_with_data(folder: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    files = ["a.safetensors", "b.safetensors", "-o", "out.safetensors", "--model", "mynets.py:model"]
    main(["align", *files, "--data", "mynets.py:batches", "--test", "mynets.py:batches", *options])
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert torch.allclose(
        _function(load(folder / "out.safetensors")), _function(load(folder / "b.safetensors")), atol=1e-4
    )
    if options == ["--refine"] or options[1:] in (["straight-through"], ["sinkhorn"], ["continuous-descent"]):
        assert float(rows["objective"][1]) <= float(rows["objective"][3])  # on the examples that are kept to choose by
    assert all(float(cell) > 0 for cell in rows["loss"][2:])


def test_align_keeps_half_precision(folder: Path) -> None:
    for name in ("a", "b"):
        params = load(folder / f"{name}.safetensors")
        save({k: t.bfloat16() for k, t in params.items()}, folder / f"{name}16.safetensors")
    options = ["--model", "mynets.py:model", "-o", "out.safetensors"]
    main(["align", "a16.safetensors", "b16.safetensors", *options])
    moved, b = load(folder / "out.safetensors"), load(folder / "b16.safetensors")
    assert {tensor.dtype for tensor in moved.values()} == {torch.bfloat16}
    moved, b = ({k: t.float() for k, t in params.items()} for params in (moved, b))
    assert torch.allclose(_function(moved), _function(b), rtol=0.05, atol=0.05)
    b = load(folder / "b16.safetensors")
    main(["align", "a16.safetensors", "b16.safetensors", *options, "--scales", "keep", "--overwrite"])
    moved = load(folder / "out.safetensors")
    assert torch.equal(moved["0.bias"].sort().values, b["0.bias"].sort().values)


@pytest.mark.parametrize("data", ["mynets.py:batches", "mynets:batches", "data.npz", "data.safetensors"])
def test_line(folder: Path, capsys: pytest.CaptureFixture[str], data: str) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [(torch.randn(16, 4, generator=generator), torch.randint(0, 3, (16,), generator=generator)) for _ in "123"]
    inputs, targets = torch.cat([x for x, _ in drawn]), torch.cat([y for _, y in drawn])
    np.savez(folder / "data.npz", inputs=inputs.numpy(), targets=targets.numpy())
    save({"inputs": inputs, "targets": targets}, folder / "data.safetensors")
    args = ["line", "a.safetensors", "b.safetensors", "--model", "mynets.py:bare", "--data", data, "--points", "5"]
    main([*args, "-o", "plot.svg"])
    out = capsys.readouterr().out
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(_logits(load(folder / "a.safetensors"), inputs), targets))
    assert f"{loss:.4f}" in out
    assert "barrier" in out
    assert (folder / "plot.svg").read_text().startswith("<?xml")


def _logits(params: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return torch.func.functional_call(module, params, (inputs,))


def test_line_with_squared_errors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs, targets = torch.ones(6, 4), torch.zeros(6, 3)
    save({"inputs": inputs, "targets": targets}, folder / "data.safetensors")
    args = ["line", "a.safetensors", "a.safetensors", "--model", "mynets.py:bare", "--data", "data.safetensors"]
    main([*args, "--loss", "mse", "--points", "3", "--batch", "4"])
    expected = float(_logits(load(folder / "a.safetensors"), inputs).square().mean())
    assert f"{expected:.4f}" in capsys.readouterr().out


def test_line_recomputes_batch_normalization(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "normed.py").write_text(MODELS.replace("nn.ReLU()", "nn.BatchNorm1d(8), nn.ReLU()"))
    for seed, name in enumerate("cd"):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        save(module.state_dict(), folder / f"{name}.safetensors")
    main(["line", "c.safetensors", "d.safetensors", "--model", "normed.py:bare", "--data", "normed.py:batches"])
    assert "statistics of batch normalization were recomputed" in capsys.readouterr().out


def _hugging_face(folder: Path, seed: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=30, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(seed)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


def test_hugging_face_folders(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("one", 0), ("two", 1)):
        _hugging_face(folder / name, seed)
    capsys.readouterr()
    main(["discover", "one", "--outputs", "logits"])
    out = capsys.readouterr().out
    assert "transformer.h.0.mlp.c_fc" in out
    assert "verified: " in out
    main(["align", "one", "two", "--model", "one", "--outputs", "logits", "-o", "out.safetensors"])
    assert load(folder / "out.safetensors").keys() == load(folder / "two").keys()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["discover", "whatever"], "MODEL 'whatever' is neither a folder nor a factory"),
        (
            ["discover", "mynets.py"],
            "MODEL 'mynets.py' is a file: name the function or class in it that makes it, mynets.py:NAME",
        ),
        (["discover", "absent.py:model"], "there is no file 'absent.py'"),
        (["discover", "absent_package:model"], "cannot be imported: ModuleNotFoundError"),
        (["discover", "mynets.py:absent"], "has no function or class 'absent'; it has "),
        (["discover", "mynets.py:fails"], "failed: RuntimeError: broken on purpose"),
        (["discover", "mynets.py:number"], "returned a int; it must return a torch.nn.Module"),
        (["discover", "mynets.py:bare"], "gives no example inputs: let the factory return"),
        (["discover", "mynets.py:bare", "--input-shape", "2y4"], "the input shape '2y4' cannot be read"),
        (["discover", "mynets.py:bare", "--input-shape", "2x4", "--input-dtype", "real"], "dtype 'real' is unknown"),
        (["discover", "mynets.py:bare", "--input-shape", "2x5"], "Sequential fails on the example inputs"),
        (["discover", "mynets.py:branching"], "Symmetry.from_axes"),
        (["discover", "mynets.py:model", "-o", "found.txt"], "must end in .json"),
        (["discover", "mynets.py:model", "-o", "absent/found.json"], "does not exist; create it first"),
        (["discover", "."], "has no config.json, so its model is unknown"),
        (["discover", "https://hub/model"], "MODEL 'https://hub/model' is an address, and regauge fetches nothing"),
        (["discover", "mynets.py:modle"], "has no function or class 'modle'; did you mean 'model'? it has "),
    ],
)
def test_discover_refuses(folder: Path, refused: Callable[..., str], args: list[str], sentence: str) -> None:
    assert sentence in refused(*args)


def test_info_counts_values_that_are_not_finite(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = load(folder / "b.safetensors")
    params["0.weight"][0, 0], params["2.bias"][:2] = torch.nan, torch.tensor([torch.inf, -torch.inf])
    save(params, folder / "bad.safetensors")
    torch.save(params, folder / "bad.pt")
    for name in ("bad.safetensors", "bad.pt"):
        main(["info", name])
        assert "NaN or Inf: 3 values in 2 tensors: 0.weight, 2.bias" in capsys.readouterr().out
    main(["info", "bad.safetensors", "--json"])
    assert json.loads(capsys.readouterr().out)["not_finite"] == {"0.weight": 1, "2.bias": 2}
    save({"0.weight": params["0.weight"]}, folder / "one.safetensors")
    main(["info", "one.safetensors"])
    assert "NaN or Inf: 1 value in 1 tensor: 0.weight" in capsys.readouterr().out
    main(["info", "b.safetensors"])
    assert "NaN" not in capsys.readouterr().out
    monkeypatch.setattr(rg.Checkpoint.count_not_finite, "__defaults__", (8,))
    main(["info", "bad.safetensors"])
    assert "NaN and Inf: not checked, because the checkpoint is large" in capsys.readouterr().out


def test_outputs_that_exist_are_kept(folder: Path, refused: Callable[..., str]) -> None:
    main(["discover", "mynets.py:model", "-o", "found.json"])
    before = Symmetry.from_json((folder / "found.json").read_text())
    assert "exists already" in refused("discover", "mynets.py:model", "-o", "found.json")
    main(["discover", "mynets.py:model", "-o", "found.json", "--overwrite"])
    assert Symmetry.from_json((folder / "found.json").read_text()).groups == before.groups

    align = ["align", "a.safetensors", "b.safetensors", "--model", "mynets.py:model", "-o"]
    assert "'b.safetensors' exists already" in refused(*align, "b.safetensors")
    main([*align, "out.safetensors"])
    (folder / "out.safetensors").unlink()
    assert "out.alignment.safetensors' exists already" in refused(*align, "out.safetensors")
    main([*align, "out.safetensors", "--overwrite"])
    assert "exists already" in refused("apply", "out.safetensors", "b.safetensors", "-o", "a.safetensors")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"extra": torch.zeros(1)}, "has 'extra', which the model lacks"),
        ({"0.bias": None}, "lacks '0.bias', which the model has"),
        ({"0.bias": torch.zeros(9)}, "'0.bias' has shape (9,) in bad.safetensors, but (8,) in the model"),
        ({"0.bias": torch.full((8,), float("nan"))}, "holds NaN or Inf in 8 of"),
    ],
)
def test_align_refuses_bad_checkpoints(
    folder: Path, refused: Callable[..., str], change: dict[str, torch.Tensor | None], sentence: str
) -> None:
    params = {**load(folder / "b.safetensors"), **change}
    save({name: tensor for name, tensor in params.items() if tensor is not None}, folder / "bad.safetensors")
    args = ["align", "a.safetensors", "bad.safetensors", "--model", "mynets.py:model", "-o", "out.safetensors"]
    assert sentence in refused(*args)
    assert not (folder / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--refine"], "--refine lowers the loss halfway between A and B, which needs data: give --data"),
        (
            ["--method", "activations", "--restarts", "2"],
            "--restarts cannot be used with the method 'activations'",
        ),
        (["--statistic", "product"], "--statistic is for matching activations, not WeightMatching"),
        (["--method", "mixed"], "the method 'mixed' needs data: give --data"),
        (["--data", "mynets.py:number"], "returned a int, but batches are needed"),
    ],
)
def test_align_refuses_options(folder: Path, refused: Callable[..., str], options: list[str], sentence: str) -> None:
    files = ["a.safetensors", "b.safetensors", "-o", "out.safetensors", "--model", "mynets.py:model"]
    assert sentence in refused("align", *files, *options)
    assert not (folder / "out.safetensors").exists()


def test_align_refuses(folder: Path, refused: Callable[..., str]) -> None:
    pair = ["align", "a.safetensors", "b.safetensors", "-o", "out.safetensors"]
    assert "the symmetry is unknown: name the model with --model" in refused(*pair)
    assert "there is no symmetry 'absent.json'" in refused(*pair, "--symmetry", "absent.json")
    (folder / "empty.json").write_text(json.dumps({}))
    assert "is not a symmetry" in refused(*pair, "--symmetry", "empty.json")
    absent = ["align", "a.safetensors", "absent.pt", "--model", "mynets.py:model", "-o", "out.safetensors"]
    assert "there is no checkpoint 'absent.pt'" in refused(*absent)
    assert "there is no alignment" in refused("apply", "a.safetensors", "b.safetensors", "-o", "out.safetensors")


def test_merge_writes_a_checkpoint_and_its_card(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["a.safetensors", "b.safetensors", "-o", "out.safetensors", "--model", "mynets.py:model"]
    main(["merge", *files, "--weights", "1", "3"])
    printed = capsys.readouterr().out
    card = (folder / "out.md").read_text()
    assert "| a.safetensors | 0.25 |" in card
    assert re.search(r"^a\.safetensors +0\.25 +0 +0$", printed, re.MULTILINE)
    assert "rule: Average()\n" in printed
    assert "|" not in printed
    a, b = load(folder / "a.safetensors"), load(folder / "b.safetensors")
    symmetry = rg.discover(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (torch.ones(2, 4),))
    expected, merged = rg.merge([a, b], symmetry, weights=[1, 3]).params, load(folder / "out.safetensors")
    assert all(torch.allclose(merged[n], t) for n, t in expected.items())
    main(["merge", "a.safetensors", "a.safetensors", "a.safetensors", *files[2:], "--overwrite"])
    assert all(torch.allclose(t, a[n]) for n, t in load(folder / "out.safetensors").items())


@pytest.mark.parametrize(
    "options",
    [
        ["--rule", "greedy", "--data", "mynets.py:batches"],
        ["--rule", "greedy", "--data", "mynets.py:batches", "--method", "mixed"],
        ["--restarts", "1", "--scales", "keep"],
        ["--method", "weights"],
        ["--rule", "task-arithmetic", "--base", "a.safetensors", "--scale", "0.5"],
        ["--rule", "ties", "--base", "a.safetensors", "--density", "0.5", "--data", "mynets.py:batches"],
        ["--rule", "dare", "--base", "a.safetensors", "--drop", "0.9"],
        ["--rule", "dare-ties", "--base", "a.safetensors", "--data", "mynets.py:batches", "--scales", "keep"],
    ],
    ids=" ".join,
)
def test_merge_rules(folder: Path, options: list[str]) -> None:
    files = ["a.safetensors", "b.safetensors", "-o", "out.safetensors", "--model", "mynets.py:model"]
    main(["merge", *files, *options])
    merged, card = load(folder / "out.safetensors"), (folder / "out.md").read_text()
    assert all(bool(t.isfinite().all()) for t in merged.values())
    assert ("loss" in card) == ("--data" in options)
    assert ("| base |" in card) == ("--base" in options)
    assert ("scales='keep'" in card) == ("keep" in options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rule", "ties"], "--rule ties combines differences from a base checkpoint: give --base"),
        (["--base", "a.safetensors"], "--rule average has no --base"),
        (["--rule", "greedy"], "--rule greedy chooses networks by their loss, which needs --data"),
        (["--density", "0.1"], "--density is for --rule ties, dare-ties, della"),
        (["--method", "mixed"], "the method 'mixed' needs data: give --data"),
        (["--weights", "1"], "give one finite weight for each"),
        (["-o", "absent/out.safetensors"], "the folder 'absent' of the output does not exist"),
    ],
)
def test_merge_refuses(folder: Path, refused: Callable[..., str], options: list[str], sentence: str) -> None:
    out = [] if "-o" in options else ["-o", "out.safetensors"]
    assert sentence in refused("merge", "a.safetensors", "b.safetensors", "--model", "mynets.py:model", *out, *options)
    assert not (folder / "out.safetensors").exists()
    assert not (folder / "out.md").exists()
    (folder / "out.md").write_text("mine")
    files = ["a.safetensors", "b.safetensors", "-o", "out.safetensors", "--model", "mynets.py:model"]
    assert "'out.md' exists already" in refused("merge", *files)
    assert "no checkpoints are named" in refused("merge", "-o", "out.safetensors")
    (folder / "recipe.yaml").write_text("models: []")
    assert "or a recipe with --recipe" in refused("merge", "recipe.yaml", "-o", "out.safetensors")


def test_apply_to_another_architecture(folder: Path, refused: Callable[..., str]) -> None:
    main(["align", "a.safetensors", "b.safetensors", "--model", "mynets.py:model", "-o", "out.safetensors"])
    save(
        {"0.weight": torch.zeros(5, 4), "0.bias": torch.zeros(5), "2.weight": torch.zeros(3, 5)},
        folder / "c.safetensors",
    )
    assert "another architecture" in refused("apply", "out.safetensors", "c.safetensors", "-o", "d.safetensors")
    save({"0.weight": torch.zeros(8, 4)}, folder / "e.safetensors")
    assert "lack '0.bias', '2.weight'" in refused("apply", "out.safetensors", "e.safetensors", "-o", "d.safetensors")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("mynets.py:nothing", "returned no batches"),
        ("mynets.py:number", "returned a int, but batches are needed"),
        ("mynets.py:odd_batches", "returned a int as a batch"),
        ("mynets.py:absent", "DATA 'mynets.py:absent': 'mynets.py' has no function or class 'absent'"),
        ("absent.npz", "there is no data file 'absent.npz'"),
        ("broken.npz", "cannot be read as arrays"),
        ("a.safetensors", "but needs 'inputs' and 'targets'"),
        ("uneven.safetensors", "has 3 inputs and 2 targets"),
        ("classes.safetensors", "a target is class 7, but the model has 3 outputs"),
    ],
)
def test_line_refuses_data(folder: Path, refused: Callable[..., str], data: str, sentence: str) -> None:
    (folder / "broken.npz").write_bytes(b"no archive")
    save({"inputs": torch.zeros(3, 4), "targets": torch.zeros(2)}, folder / "uneven.safetensors")
    save({"inputs": torch.zeros(2, 4), "targets": torch.tensor([0, 7])}, folder / "classes.safetensors")
    line = ["line", "a.safetensors", "b.safetensors", "--model", "mynets.py:bare", "--data"]
    assert sentence in refused(*line, data)


def test_help_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for args, code in ((["--help"], 0), (["line", "--help"], 0), (["absent"], 2), ([], 2)):
        with pytest.raises(SystemExit) as stop:
            main(args)
        assert (stop.value.code or 0) == code
    assert "usage: regauge" in capsys.readouterr().out


def test_progress_in_a_file_is_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    console = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(output, "STDERR", console)
    monkeypatch.setattr(output.time, "monotonic", lambda: clock[0])
    with output.show_progress() as progress:
        advance = progress("training MLP 784-512-512-512-10 on MNIST, which has a very long name", 8)
        for _ in range(4):
            clock[0] += 40
            advance()
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 2
    for line, share in zip(lines, ("25.0%", "50.0%"), strict=True):
        assert line.startswith(f"training MLP 784-512-512-512-10 on MNIST, which has a very long name: {share} in ")
        assert ", left: " in line
    with output.show_progress(is_transient=True) as progress:
        clock[0] += 100
        progress("hidden", 2)()
    assert "hidden" not in console.file.getvalue()  # type: ignore[attr-defined]
