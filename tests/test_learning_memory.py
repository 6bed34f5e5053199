"""The memory for learning an element is announced beforehand, is never too small, and is refused if it is too large."""

import logging
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from live_tensors import Live
from symmetries import generator
from torch import Tensor, nn

import regauge as rg
from regauge.alignment.descent_method import DescentMethod, held_by_batch
from regauge.checkpoints.job import LIBRARIES
from regauge.checkpoints.memory_limit import read_size, size_text
from regauge.cli.main import main
from regauge.nets.transformer import GPT, Llama, ViT, initialize_transformer

METHODS = {
    "data": rg.alignment.DataMatching(),
    "activations": rg.ActivationMatching(),
    "straight-through": rg.StraightThrough(steps=2, every=1),
    "Sinkhorn": rg.Sinkhorn(steps=2, every=1),
    "descent": rg.ContinuousDescent(steps=2, every=1),
    "descent, halfway, from weights": rg.ContinuousDescent("midpoint", rg.WeightMatching(), steps=2, every=1),
    "descent from Sinkhorn": rg.ContinuousDescent(init=rg.Sinkhorn("random", steps=2, every=1), steps=2, every=1),
}
MODULES = {
    "ViT": lambda: ViT(14, 7, width=32, layers=2, heads=2),
    "GPT": lambda: GPT(20, 8, width=32, layers=2, heads=2),
    "Llama": lambda: Llama(20, width=32, layers=2),
}
SAID = re.compile(r"(\w+) holds up to ([\d.]+ \w+) at once, with the activations of one batch")


@cache
def _symmetry(name: str) -> rg.Symmetry:
    inputs = torch.zeros(2, 1, 14, 14) if name == "ViT" else torch.zeros(2, 8, dtype=torch.long)
    return rg.discover(MODULES[name]().eval(), (inputs,), verify=False)


def case(name: str, folder: Path) -> tuple[list[Path], rg.Symmetry, rg.Task]:
    """Return two networks in files, their symmetry, and a task of four batches of one shape; a method may keep one."""
    module = MODULES[name]().eval()
    if name == "ViT":
        inputs, targets = torch.randn(48, 1, 14, 14, generator=generator(0)), torch.arange(48) % 10
    else:
        inputs, targets = (torch.randint(20, (48, 8), generator=generator(k)) for k in range(2))
    paths = [folder / "a.safetensors", folder / "b.safetensors"]
    for seed, path in enumerate(paths):
        rg.save(initialize_transformer(module, generator(seed)), path)
    return paths, _symmetry(name), rg.Task(module, list(zip(inputs.split(12), targets.split(12), strict=True)))


def kept(task: rg.Task, params: Mapping[str, Tensor], batch: Any) -> int:
    """Return the bytes that a graph holds while it is alive, without parameters."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    own = {tensor.data_ptr() for tensor in leaves.values()}
    found: dict[int, int] = {}

    def hold(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        loss = task.loss(leaves, batch)
    assert loss.requires_grad
    return sum(found.values())


@pytest.mark.parametrize("name", MODULES)
def test_a_batch_holds_what_its_graph_holds(name: str, tmp_path: Path) -> None:
    paths, _, task = case(name, tmp_path)
    params = rg.load(paths[0])
    x, y = task.batches[0]
    batches = [(x[:2], y[:2]), (x, y), (x[:5], y[:5])]
    held = held_by_batch(rg.Task(task.module, batches), params)
    assert held == kept(task, params, (x, y)) > kept(task, params, batches[2])
    alone = held_by_batch(rg.Task(task.module, [(x, None)], has_targets=False), params)
    assert 0 < alone <= held
    assert held_by_batch(rg.Task(task.module, []), params) == 0


@pytest.mark.parametrize(
    ("name", "style"),
    [*((name, "GPT") for name in METHODS), ("Sinkhorn", "Llama"), ("straight-through", "ViT")],
)
def test_no_tensors_beyond_what_is_announced(
    name: str, style: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths, symmetry, task = case(style, tmp_path)
    method = METHODS[name]
    with caplog.at_level(logging.INFO, "regauge.checkpoints"), Live() as live:
        rg.align(*paths, symmetry, method=method, task=task, out=tmp_path / "out.safetensors", rotate="always")
    (said,) = SAID.findall(caplog.text)
    assert said[0] == type(method).__name__
    assert live.peak <= read_size(said[1], "memory") - LIBRARIES


def test_what_needs_more_is_refused_before_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, symmetry, task = case("GPT", tmp_path)
    method, out = rg.ContinuousDescent(steps=1, every=1), tmp_path / "out.safetensors"
    ways: dict[str, Any] = {"method": method, "task": task, "out": out}
    found = []
    match = DescentMethod.match
    monkeypatch.setattr(DescentMethod, "match", lambda *args: found.append(args) or match(*args))
    message = (
        r"ContinuousDescent holds up to .* MB at once.* more than the 40 MB that are allowed: allow more `memory=`"
    )
    for call in (
        lambda: rg.align(*paths, symmetry, memory="40MB", **ways),
        lambda: rg.merge(paths, symmetry, memory="40MB", **ways),
        lambda: rg.align_many(paths, symmetry, method=method, task=task, memory="40MB"),
        lambda: rg.align(
            *paths, symmetry, memory="40MB", **ways | {"method": rg.alignment.BestOf((rg.WeightMatching(), method))}
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not found
    assert not out.exists()
    rg.align(*paths, symmetry, memory="40MB", **ways | {"method": rg.WeightMatching()})
    rg.align(*paths, symmetry, memory="200MB", **ways | {"out": rg.Output(out, overwrite=True)})
    assert len(found) == 1
    with pytest.raises(ValueError, match="the task has no batches"):
        rg.align(*paths, symmetry, method=method, task=rg.Task(task.module, []), memory="200MB")


def test_several_networks_are_learned_one_after_the_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths, symmetry, task = case("GPT", tmp_path)
    ways: dict[str, Any] = {"method": rg.StraightThrough(steps=1, every=1), "task": task}
    with caplog.at_level(logging.INFO, "regauge.checkpoints"):
        for networks in (paths, [*paths, paths[0]]):
            rg.align_many(networks, symmetry, **ways)
    two, three = (read_size(size, "memory") for _, size in SAID.findall(caplog.text))
    values = sum(tensor.numel() for tensor in rg.load(paths[0]).values())
    assert three - two == pytest.approx(12 * values, abs=2e5)  # the network in its file, and two copies; rounded


@pytest.mark.parametrize(
    ("options", "method"), [(["--method", "continuous-descent"], "ContinuousDescent"), ([], "DataMatching")]
)
def test_commands_say_the_same(
    options: list[str],
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second method is the default of commands with data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef model():\n    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), "
        "nn.Linear(8, 3)), (torch.zeros(2, 4),)\n\n\n"
        "x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))\n"
        "\n\ndef batches():\n    return [(one, one.argmax(-1) % 3) for one in x.split(10)]\n"
    )
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        rg.save({n: torch.randn_like(t) for n, t in module.state_dict().items()}, tmp_path / f"{name}.safetensors")
    files = ["a.safetensors", "b.safetensors", "--model", "net.py:model", "-o", "out.safetensors"]
    options = [*files, "--data", "net.py:batches", "--test", "net.py:batches", *options]
    for command in ("align", "merge"):
        with pytest.raises(SystemExit):
            main([command, *options, "--memory", "40MB"])
        assert f"{method} holds up to 50.3 MB at once" in (said := capsys.readouterr().err)
        assert "more than the 40 MB that are allowed: allow more --memory, make batches smaller" in said
        main([command, *options, "--dry-run"])
        out, said = capsys.readouterr()
        assert "memory held at once, above the interpreter: about 50.3 MB" in out
        assert f"{method} holds up to 50.3 MB at once, with the activations of one batch" in said
        assert not (tmp_path / "out.safetensors").exists()
        main([command, *options, "--overwrite", "--memory", "60MB"])
        assert SAID.findall(capsys.readouterr().err) == [(method, "50.3 MB")]
        (tmp_path / "out.safetensors").unlink()
    assert size_text(LIBRARIES) == "50.3 MB"
