"""Values that a dtype cannot represent are refused with the name of the tensor, by every writing command and its
function.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regauge as rg
from regauge.checkpoints.alignments import Alignment
from regauge.checkpoints.checkpoint import Checkpoint, load
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.core.element import Value
from regauge.core.params import require_held, round_alike, round_to
from regauge.merging import WeightedSum

MODEL = """
import torch
from torch import nn


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (torch.ones(2, 4),)
"""
MLP = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
SYMMETRY = rg.discover(MLP, (torch.ones(2, 4),))
BATCHES = [(1e-3 * torch.randn(64, 4, generator=torch.Generator().manual_seed(3)), torch.zeros(64, 3))]
Params = dict[str, Tensor]


def _net(seed: int = 0, **values: Tensor) -> Params:
    """Return a random network with other values of the tensors `w0`, `b0` and `w2`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"0.weight": (8, 4), "0.bias": (8,), "2.weight": (3, 8), "2.bias": (3,)}
    given = {"0.weight": "w0", "0.bias": "b0", "2.weight": "w2"}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: values.get(given.get(name, ""), tensor) for name, tensor in made.items()}


def _task() -> rg.Task:
    return rg.Task(MLP, BATCHES, nn.functional.mse_loss)


EYE = torch.eye(4).repeat(2, 1)
NETWORKS = {
    "large": _net(0, w0=torch.full((8, 4), 5e4), w2=torch.ones(3, 8)),
    "small head": _net(0, w0=torch.full((8, 4), 5e4), w2=torch.full((3, 8), 1e-3)),
    "moving": _net(1, w0=EYE * 3e4),
    "steep": _net(0, w0=torch.full((8, 4), 1e-4), b0=torch.full((8,), 5e4), w2=torch.full((3, 8), 1e3)),
    "twins": _net(0, w0=torch.ones(8, 4), b0=torch.ones(8), w2=torch.full((3, 8), 4e4)),
    "narrow": _net(0, w0=EYE * 5e4, w2=torch.ones(3, 8)),
}
(GROUP,) = SYMMETRY.groups
FACTORS = SYMMETRY.identity().replace(
    GROUP.name, Value(perm=torch.arange(8), scale=torch.full((1, 8), 1e4, dtype=torch.float64))
)


@dataclass(frozen=True)
class Case:
    """A command and its function, the networks that they read, and the tensor that float16 cannot represent."""

    command: str
    networks: tuple[str, ...]
    options: str
    tensor: str
    function: Callable[..., Any]


MODELED, DATA = "--model net.py:mlp", "--data data.npz --loss mse"
CASES = [
    Case("align", ("small head", "moving"), MODELED, "0.weight", lambda a, b: rg.align(a, b, SYMMETRY)),
    Case(
        "merge",
        ("large", "large"),
        f"--rule sum {MODELED}",
        "0.weight",
        lambda *p: rg.merge(p, SYMMETRY, rule=WeightedSum()),
    ),
    Case("apply", ("moving",), "", "0.weight", lambda a: SYMMETRY.act(FACTORS, a)),
    Case("canonicalize", ("large",), MODELED, "2.weight", lambda a: rg.canonicalize(a, SYMMETRY)),
    Case(
        "gauge",
        ("steep",),
        f"--method equalize --always {MODELED}",
        "0.bias",
        lambda a: rg.gauge(a, SYMMETRY, method=rg.gauging.Equalize()),
    ),
    Case("prune", ("twins",), f"{MODELED} {DATA}", "2.weight", lambda a: rg.prune(a, SYMMETRY, task=_task())),
    Case(
        "repair",
        ("narrow", "large", "large"),
        f"{MODELED} {DATA} --always",
        "0.weight",
        lambda a, *ends: rg.repair(a, MLP, ends, [x for x, _ in BATCHES]),
    ),
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    for name, network in NETWORKS.items():
        save({key: tensor.half() for key, tensor in network.items()}, _file(name))
    Alignment(SYMMETRY, FACTORS).save("factors.alignment.safetensors")
    (x, y), *_ = BATCHES
    np.savez("data.npz", inputs=x.numpy(), targets=y.numpy())


def _file(name: str) -> str:
    return f"{name.replace(' ', '-')}.safetensors"


def _command(case: Case, out: str) -> list[str]:
    """Return the command, which writes to `out`."""
    files = [_file(name) for name in case.networks]
    if case.command == "apply":
        files.insert(0, "factors.safetensors")
    if case.command == "repair":
        files.insert(1, "--endpoints")
    return [case.command, *files, *case.options.split(), "-o", out]


@pytest.mark.parametrize("out", ["out.safetensors", "folder"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.command)
def test_commands_refuse_and_leave_nothing(case: Case, out: str, refused: Callable[..., str]) -> None:
    text = refused(*_command(case, out))
    assert f"{case.tensor!r} would exceed 6.55e+04, the largest number of float16, in" in text
    assert "; use wider tensors, such as bfloat16 (in files: --dtype bfloat16), or smaller weights" in text


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.command)
def test_the_remedy_helps(case: Case, dtype: str) -> None:
    main([*_command(case, "out.safetensors"), "--dtype", dtype])
    found = load("out.safetensors")
    assert all(t.dtype == getattr(torch, dtype) and bool(t.isfinite().all()) for t in found.values())
    assert float(found[case.tensor].abs().max()) > torch.finfo(torch.float16).max


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.command)
def test_functions_say_the_same(case: Case) -> None:
    networks = [{n: t.half() for n, t in NETWORKS[name].items()} for name in case.networks]
    with pytest.raises(ValueError, match=rf"'{case.tensor}' would exceed 6.55e\+04, the largest number of float16"):
        case.function(*networks)
    case.function(*({n: t.float() for n, t in one.items()} for one in networks))


@pytest.mark.parametrize("out", ["out.safetensors", "folder"])
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.command)
def test_streamed_networks_are_refused_and_leave_nothing(
    case: Case, out: str, refused: Callable[..., str], streamed: None
) -> None:
    assert f"{case.tensor!r} would exceed" in refused(*_command(case, out))
    shards = ["--shard-size", "100"] if out == "folder" else []
    assert f"{case.tensor!r} would exceed" in refused(*_command(case, out), *shards)
    main([*_command(case, out), "--dtype", "bfloat16"])
    assert all(bool(tensor.isfinite().all()) for tensor in load(out).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_dtype_has_an_end(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    network = {name: tensor.to(dtype) for name, tensor in NETWORKS["moving"].items()}
    network["0.weight"] = torch.full((8, 4), largest / 2, dtype=dtype)
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"'0.weight' would exceed .* number of {kind}, in 32 entries"):
        SYMMETRY.act(FACTORS, network)
    network = {name: tensor.to(dtype) for name, tensor in NETWORKS["moving"].items()}
    network["2.bias"] = torch.full((3,), largest / 2, dtype=dtype)
    summed = "float32" if dtype == torch.bfloat16 else kind  # what sums of it are taken in ends where it ends
    with pytest.raises(ValueError, match=rf"'2.bias' would exceed .* number of {summed}, in 3 entries"):
        rg.merge([network] * 3, SYMMETRY, rule=WeightedSum())


def test_what_was_infinite_stays_so() -> None:
    network = NETWORKS["moving"] | {"0.bias": torch.full((8,), -torch.inf)}
    moved = SYMMETRY.act(FACTORS, network)
    assert torch.equal(moved["0.bias"], network["0.bias"])
    save({name: tensor.half() for name, tensor in network.items()}, "masked.safetensors")
    main(["apply", "factors.safetensors", "masked.safetensors", "-o", "out.safetensors", "--dtype", "bfloat16"])
    assert torch.equal(load("out.safetensors")["0.bias"].float(), network["0.bias"])


def test_adapters_are_added_within_the_dtype() -> None:
    save({"model.fc.weight": torch.full((4, 3), 4e4).half()}, "base.safetensors")
    Path("adapter").mkdir()
    prefix = "base_model.model.model.fc.lora_"
    factors = {f"{prefix}A.weight": torch.ones(1, 3), f"{prefix}B.weight": torch.full((4, 1), 4e4)}
    save(factors, "adapter/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "init_lora_weights": True}
    Path("adapter/adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"'model.fc.weight' would exceed .* number of float16, in 12 entries"):
        Checkpoint.open("base.safetensors+adapter").write("out.safetensors")
    assert not Path("out.safetensors").exists()


def test_one_place_rounds() -> None:
    wide = {"x": torch.tensor([1e5, 1.0]), "n": torch.tensor([3])}
    with pytest.raises(ValueError, match=r"'x' would exceed .* number of float16, in 1 entry;"):
        round_to(wide["x"], torch.float16, "x")
    with pytest.raises(ValueError, match=r"'x' would exceed .* number of float16, in 1 entry;"):
        round_alike(wide, {"x": torch.ones(2).half(), "n": torch.tensor([2])})
    rounded = round_alike(wide, {"x": torch.ones(2).bfloat16(), "n": torch.tensor([2])})
    assert rounded["x"].dtype == torch.bfloat16
    assert rounded["n"] is wide["n"]
    infinite = torch.tensor([torch.inf, torch.nan])
    require_held("x", infinite.half(), (infinite,))
    with pytest.raises(ValueError, match=r"'x' would exceed .* number of float64, in 2 entries; use smaller weights"):
        require_held("x", infinite.double(), ())
