"""Streamed networks are matched as representatives: the same files give the same numbers as in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from coverings import covering, every_other
from representative_cases import case, moved
from translation_nets import drawn, gap, generator, outputs, stranger, stream

import regauge as rg
from regauge.alignment.result import Result
from regauge.alignment.streamed import job as streamed_job
from regauge.alignment.streamed.job import plan_job
from regauge.alignment.streamed.source import move_pieces
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.job import FileJob, open_job
from regauge.checkpoints.output import Output
from regauge.checkpoints.representative_checkpoint import MovedCheckpoint
from regauge.core.families import row_ranges
from regauge.core.params import Params

ROTATED = ("stream", "llama", "patches")
CHOSEN = (
    *ROTATED, "decoder", "tied decoder", "post-norm", "gain plus one", "two norms", "residual", "batch norm",
    "layer scale", "linear layers", "fused attention",
)  # fmt: skip
"""A network for each kind of translations and of gains."""


def save(params: Params, path: Path) -> Path:
    return rg.save({key: t.clone() for key, t in params.items()}, path, overwrite=True)


@contextmanager
def from_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stream networks in files of any size."""
    with monkeypatch.context() as patch:
        patch.setattr(FileJob, "fits", False)
        yield


def align_both(
    monkeypatch: pytest.MonkeyPatch, folder: Path, a: Params, b: Params, symmetry: rg.Symmetry, **setting: Any
) -> tuple[Result[Params], Result[Params]]:
    """Align in memory and streamed."""
    expected = rg.align(a, b, symmetry, **setting)
    files = [save(one, folder / f"{letter}.safetensors") for letter, one in (("a", a), ("b", b))]
    with from_files(monkeypatch):
        out = Output(folder / "out.safetensors", overwrite=True)
        found = rg.align(*files, symmetry, out=out, memory="4GB", **setting)
    return expected, replace(found, params=dict(found.params))


def require_same(expected: Result[Params], found: Result[Params], b: Params, far: float = 1e-8) -> None:
    """Assert equality up to rounding, which ascents of rotations enlarge, because they end at small improvements."""
    assert gap(expected.params, found.params) <= far
    assert set(expected.notes) == set(found.notes)
    assert expected.element.rotation.keys() == found.element.rotation.keys()
    assert found.objective == pytest.approx(expected.objective, rel=1e-7)
    assert gap(found.symmetry.act(found.element, b), found.params) < 1e-12


@pytest.mark.parametrize("name", CHOSEN)
def test_copies_come_back_as_in_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, symmetry, params = case(name)
    other = moved(symmetry, params)
    assert gap(other, params) > 0.1
    expected, found = align_both(monkeypatch, tmp_path, params, other, symmetry)
    require_same(expected, found, other)
    if name != "residual":  # orders and signs of its shortcut are a local optimum
        assert gap(found.params, params) < 1e-6


@pytest.mark.parametrize("name", every_other(CHOSEN, part=0))
def test_strangers_are_matched_as_in_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, symmetry, params = case(name)
    other = moved(symmetry, stranger(params, symmetry, 0.5))
    for rotate in ("auto", "always", "never") if name in ROTATED else ("auto",):
        expected, found = align_both(monkeypatch, tmp_path, params, other, symmetry, rotate=rotate)
        require_same(expected, found, other)
        assert bool(found.element.rotation) == bool(symmetry.rotatable and rotate != "never")
        assert torch.allclose(outputs(module, found.params, x), outputs(module, other, x), atol=1e-9)


@pytest.mark.parametrize("name", ["stream", "patches", "layer scale", "gain plus one"])
def test_near_copies_are_reordered_as_in_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fitted scales and matrices are equal within the tolerance of the fit."""
    _, _, symmetry, params = case(name)
    other = moved(symmetry, stranger(params, symmetry, 0.02), parts=("permutation", "sign", "scale", "translation"))
    expected, found = align_both(monkeypatch, tmp_path, params, other, symmetry)
    require_same(expected, found, other, far=1e-3)
    assert not found.element.rotation


def test_a_stream_that_may_not_be_rotated_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, symmetry, params = stream()
    other = moved(symmetry, stranger(params, symmetry, 0.5))
    params["norms.1.weight"][3] = 0.0
    for setting in ({"rotate": "always"}, {"rotate": "always", "method": rg.WeightMatching(scales="keep")}):
        expected, found = align_both(monkeypatch, tmp_path, params, other, symmetry, **setting)
        require_same(expected, found, other)
        assert not found.element.rotation
        assert "rotated" in found.report
    with from_files(monkeypatch), pytest.raises(ValueError, match="rotate is 'sometimes'"):
        rg.align(tmp_path / "a.safetensors", tmp_path / "b.safetensors", symmetry, rotate="sometimes")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["stream", "llama"])
def test_streams_that_do_not_fit_are_rotated_after_each_sweep(name: str, tmp_path: Path) -> None:
    _, _, symmetry, params = case(name)
    other = moved(symmetry, params)
    files = [save(one, tmp_path / f"{letter}.safetensors") for letter, one in (("a", params), ("b", other))]
    out = Output(tmp_path / "out.safetensors")
    job = open_job(files, 1, out=out, memory="4GB")
    assert job is not None
    whole = plan_job(job, symmetry, rotate="always")
    assert whole.chart is not None
    least = min(whole.chart.plans[stage].peak for stage in ("rotated", "reordered", "given"))
    parts = plan_job(replace(job, limit=replace(job.limit, nbytes=least - 1)), symmetry, rotate="always")
    assert not whole.plan.spread
    assert [*parts.plan.spread] == list(symmetry.rotatable)
    assert parts.plan.symmetry[parts.plan.symmetry.groups[0].name].matrix == "orthogonal"
    found = streamed_job.align_job(parts)
    assert gap(dict(found.params), params) < 1e-6
    assert found.element.rotation


class _InterruptError(Exception):
    pass


@pytest.mark.parametrize("rotate", ["auto", "never"])
def test_an_interrupted_alignment_goes_on_in_its_stage(
    rotate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, symmetry, params = stream()
    size = 0.5 if rotate == "auto" else 0.02
    other = moved(symmetry, stranger(params, symmetry, size), parts=("permutation", "scale", "translation"))
    expected, found = align_both(monkeypatch, tmp_path, params, other, symmetry, rotate=rotate)
    (tmp_path / "out.safetensors").unlink()
    save_state, stages = streamed_job.save_state, []
    files = [tmp_path / f"{letter}.safetensors" for letter in "ab"]

    def interrupt(state: Any, path: Path) -> None:
        save_state(state, path)
        stages.append(path.name.split(".")[1])
        raise _InterruptError

    monkeypatch.setattr(streamed_job, "save_state", interrupt)
    result = None
    with from_files(monkeypatch):
        while result is None:
            try:
                out = Output(tmp_path / "out.safetensors", resume=True, overwrite=True)
                result = rg.align(*files, symmetry, rotate=rotate, out=out, memory="4GB")
            except _InterruptError:
                assert len(stages) < 40
    again = {"auto": ["orders", "rotated"], "never": ["reordered", "given"]}
    assert [*dict.fromkeys(stages)] == again[rotate]
    assert len(stages) > 4
    assert gap(dict(result.params), found.params) == 0
    assert set(result.notes) == set(expected.notes)


@pytest.mark.parametrize(
    ("name", "others"), covering(["stream", "decoder", "batch norm"], ["far", "near and far", "far and far"])
)
def test_streamed_networks_are_merged_as_in_memory(
    name: str, others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, symmetry, params = case(name)
    near, far = (moved(symmetry, stranger(params, symmetry, size), seed) for seed, size in ((2, 0.02), (3, 0.5)))
    networks = [params, *({"near": near, "far": far}[other] for other in others.split(" and "))]
    method = rg.WeightMatching()
    expected = rg.merge(networks, symmetry, method=method)
    files = [save(one, tmp_path / f"{k}.safetensors") for k, one in enumerate(networks)]
    with from_files(monkeypatch):
        found = rg.merge(files, symmetry, method=method, out=Output(tmp_path / "out.safetensors"), memory="4GB")
    assert gap(expected.params, dict(found.params)) < (1e-3 if "near" in others else 1e-9)
    assert bool(found.elements[-1].rotation) == bool(expected.elements[-1].rotation)
    assert set(expected.record.notes) == set(found.record.notes)


@pytest.mark.parametrize("name", every_other(ROTATED, part=0))
def test_streamed_networks_are_compared_behind_rotations(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, symmetry, params = case(name)
    others = (moved(symmetry, params), moved(symmetry, stranger(params, symmetry, 1.0)))
    files = [save(one, tmp_path / f"{k}.safetensors") for k, one in enumerate((params, *others))]
    for other, file in zip(others, files[1:], strict=True):
        expected = rg.compare(params, other, symmetry)
        with from_files(monkeypatch):
            found = rg.compare(files[0], file, symmetry, memory="4GB")
        assert found.verdict == expected.verdict
        assert found.orbit_distance == pytest.approx(expected.orbit_distance, rel=0.02, abs=1e-6 * expected.norm)
        assert (found.verdict == "same network in another gauge") == (other is others[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["stream", "tied decoder", "patches", "batch norm", "two norms", "gain plus one"])
def test_an_element_moves_a_checkpoint_tensor_by_tensor(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, symmetry, params = case(name)
    params = {key: t.to(dtype) if t.is_floating_point() else t for key, t in params.items()}
    element = drawn(symmetry, 3)
    if symmetry.rotatable:
        element = element.rotated(symmetry.random(generator(4), ("rotation",)).rotation)
    expected = symmetry.act(element, params)
    with Checkpoint.open(save(params, tmp_path / "a.safetensors")) as checkpoint:
        monkeypatch.setattr(Checkpoint, "params", property(lambda _: pytest.fail("all tensors are read")))
        pieces = move_pieces(checkpoint, symmetry.bind(params), element)
        for key, tensor in params.items():
            parts = [*pieces(key)]
            assert torch.equal(torch.cat(parts) if tensor.ndim else parts[0], expected[key])
        one = MovedCheckpoint(checkpoint, symmetry.bind(params), element)
        for key, tensor in params.items():
            if tensor.ndim and row_ranges(symmetry, key, tensor.shape) == [(0, len(tensor))]:
                parts = torch.cat([one.read(key, rows=rows) for rows in ((0, 1), (1, len(tensor)))])
                torch.testing.assert_close(parts, expected[key])
