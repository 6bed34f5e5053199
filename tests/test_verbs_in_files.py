"""Functions that write their results: from checkpoints with `out=`, they give the same results as from dictionaries in
memory.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regauge as rg
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.core.params import Params

Verb = Callable[[Any, Any, Any], Mapping[str, Tensor]]


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def network(seed: int) -> Params:
    torch.manual_seed(seed)
    return {name: tensor.detach() for name, tensor in module().state_dict().items()}


SYMMETRY = rg.discover(module(), (torch.randn(2, 4),))
CHANCE = torch.Generator().manual_seed(0)
BATCHES = [(torch.randn(40, 4, generator=CHANCE), torch.randint(0, 3, (40,), generator=CHANCE)) for _ in range(2)]


def task() -> rg.Task:
    return rg.Task(module(), BATCHES)


VERBS: dict[str, Verb] = {
    "align": lambda a, b, files: rg.align(a, b, SYMMETRY, **files).params,
    "merge": lambda a, b, files: rg.merge([a, b], SYMMETRY, **files).params,
    "gauge": lambda a, b, files: rg.gauge(a, SYMMETRY, task=task(), **files).params,
    "gauge by weights": lambda a, b, files: rg.gauge(a, SYMMETRY, method=rg.Equalize(), **files).params,
    "prune": lambda a, b, files: rg.prune(a, SYMMETRY, share=0.25, task=task(), **files).params,
    "canonicalize": lambda a, b, files: rg.canonicalize(a, SYMMETRY, **files),
    "canonicalize to a reference": lambda a, b, files: rg.canonicalize(a, SYMMETRY, reference=b, **files),
    "repair": lambda a, b, files: rg.repair(a, module(), [b, b], [x for x, _ in BATCHES], **files).params,
}
BESIDE = {"align": "alignment.safetensors", "merge": "md", "gauge": "gauge.json", "prune": "prune.json"}
BESIDE |= {"canonicalize": "alignment.safetensors"}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    first, second = (rg.save(network(k), tmp_path / f"{k}.safetensors") for k in range(2))
    return first, second


@pytest.mark.usefixtures("unsaved")
@pytest.mark.parametrize("verb", VERBS)
def test_what_is_written_is_what_is_made_in_memory(verb: str, files: tuple[Path, Path], tmp_path: Path) -> None:
    expected = VERBS[verb](network(0), network(1), {})
    out = tmp_path / "out.safetensors"
    found = VERBS[verb](*files, {"out": out, "memory": "1GB"})
    for made in (rg.load(out), found):
        assert made.keys() == expected.keys()
        assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(one, expected[n]) for n, one in VERBS[verb](*files, {}).items())
    if verb in BESIDE:
        assert (tmp_path / f"out.{BESIDE[verb]}").is_file()
    with pytest.raises(FileExistsError, match=r"out\.safetensors' exists already; choose another name"):
        VERBS[verb](*files, {"out": out})
    VERBS[verb](*files, {"out": rg.Output(out, overwrite=True, dtype="bfloat16")})
    assert {tensor.dtype for tensor in rg.load(out).values()} == {torch.bfloat16}


@pytest.mark.parametrize("verb", VERBS)
def test_dictionaries_are_not_written(verb: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="with `out` or `memory` must all be checkpoints"):
        VERBS[verb](network(0), network(1), {"out": tmp_path / "out.safetensors"})


@pytest.mark.parametrize("verb", VERBS)
def test_an_output_replaces_its_input_if_it_may(verb: str, files: tuple[Path, Path], tmp_path: Path) -> None:
    before = files[1].read_bytes()
    VERBS[verb](*files, {"out": tmp_path / "out.safetensors"})
    VERBS[verb](*files, {"out": rg.Output(files[0], overwrite=True)})
    expected, found = (rg.load(path) for path in (tmp_path / "out.safetensors", files[0]))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert files[1].read_bytes() == before


@pytest.mark.parametrize("verb", VERBS)
def test_a_folder_that_is_read_only_is_refused_before_the_work(
    verb: str, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a test may run as root, who may write everywhere
    monkeypatch.setattr(Checkpoint, "params", None)  # the values, which the work would read
    with pytest.raises(PermissionError, match=r"nothing can be written to the folder '.*' of the output; choose"):
        VERBS[verb](*files, {"out": tmp_path / "out.safetensors"})


@pytest.mark.parametrize("verb", ["canonicalize", "prune", "repair", "gauge by weights"])
def test_all_values_must_fit(verb: str, files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(needs all values in memory, in float64|allow more memory)"):
        VERBS[verb](*files, {"out": tmp_path / "out.safetensors", "memory": 100})
    assert not (tmp_path / "out.safetensors").exists()


def test_the_report_says_how_it_was_made(files: tuple[Path, Path], tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(3)
    out = rg.Output(tmp_path / "out.safetensors", page=lambda path: f"<p>{path.name}</p>")
    rg.gauge(files[0], SYMMETRY, task=task(), generator=chance, out=out)
    facts = json.loads((tmp_path / "out.gauge.json").read_text())
    assert (facts["method"], facts["seed"], facts["checkpoint"]) == ("best", 3, str(files[0]))
    assert facts["certificate"]["ok"]
    assert (tmp_path / "out.gauge.html").read_text() == "<p>out.gauge.json</p>"


def test_each_of_many_networks_is_written(files: tuple[Path, Path], tmp_path: Path) -> None:
    paths = [*files, rg.save(network(2), tmp_path / "2.safetensors")]
    expected = rg.align_many([network(k) for k in range(3)], SYMMETRY).params
    out = [None, tmp_path / "b.safetensors", rg.Output(tmp_path / "c", dtype="bfloat16")]
    found = rg.align_many(paths, SYMMETRY, out=out)
    assert all(torch.equal(one[n], t) for one, own in zip(found.params, expected, strict=True) for n, t in own.items())
    assert all(torch.equal(tensor, expected[1][name]) for name, tensor in rg.load(tmp_path / "b.safetensors").items())
    stored = rg.load_alignment(tmp_path / "b.alignment.safetensors")
    moved = stored.symmetry.act(stored.element, network(1))
    assert all(torch.equal(tensor, expected[1][name]) for name, tensor in moved.items())
    assert {tensor.dtype for tensor in rg.load(tmp_path / "c").values()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="there are 3 networks, but 1 outputs; give one for each, or None"):
        rg.align_many(paths, SYMMETRY, out=[None])
    with pytest.raises(FileExistsError, match="exists already"):
        rg.align_many(paths, SYMMETRY, out=out)


def test_an_alignment_is_applied_and_undone(files: tuple[Path, Path], tmp_path: Path) -> None:
    result = rg.align(*files, SYMMETRY, out=tmp_path / "out.safetensors")
    moved = rg.alignment.apply(tmp_path / "out.alignment.safetensors", files[1], tmp_path / "moved.safetensors")
    assert all(torch.equal(moved[name], tensor) for name, tensor in result.params.items())
    back = rg.alignment.apply(
        tmp_path / "out.alignment.safetensors",
        tmp_path / "moved.safetensors",
        tmp_path / "back.safetensors",
        inverse=True,
    )
    assert all(torch.allclose(back[name], tensor, atol=1e-6) for name, tensor in network(1).items())


def test_a_comparison_writes_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = rg.compare(network(0), network(1), SYMMETRY, out=page)
    first = page.read_text(encoding="utf-8")
    assert found.reason[0].upper() + found.reason[1:] in first
    assert "<code>a network in memory</code>" in first
    with pytest.raises(FileExistsError, match="exists already"):
        rg.compare(network(0), network(1), SYMMETRY, out=page)
    rg.compare(network(0), network(0), SYMMETRY, out=rg.Output(page, overwrite=True))
    assert page.read_text(encoding="utf-8") != first
    with pytest.raises(ValueError, match=r"must end in \.html"):
        rg.compare(network(0), network(1), SYMMETRY, out=tmp_path / "page.md")
