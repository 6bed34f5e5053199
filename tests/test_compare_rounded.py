"""Copies that were transformed by the whole group and rounded to another format are the same network; strangers are
not.
"""

from pathlib import Path

import pytest
import torch
from coverings import covering
from translation_nets import NETS, drawn, network, stranger

import regauge as rg
from regauge.checkpoints.writing import save
from regauge.comparison.verdicts import Evidence, judge, needs_noise
from regauge.nets.transformer import Llama, initialize_transformer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def rounded(params: rg.Params, dtype: torch.dtype) -> rg.Params:
    """Return a network in another format."""
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in params.items()}


@pytest.mark.parametrize(("name", "form"), covering(NETS, DTYPES))
def test_moved_and_rounded_copies_are_the_same_network(name: str, form: str) -> None:
    _, _, symmetry, params = network(name)
    element, dtype = drawn(symmetry, 1), DTYPES[form]
    for given in (params, rounded(params, dtype)):
        found = rg.compare(given, rounded(symmetry.act(element, params), dtype), symmetry)
        assert found.verdict == "same network in another gauge", found.reason
        assert found.share_after is None or found.share_after > 0.999
    other = rounded(symmetry.act(element, stranger(params, symmetry, 1.0)), dtype)
    assert rg.compare(params, other, symmetry).verdict not in ("identical", "same network in another gauge")


@pytest.mark.parametrize("name", ["decoder", "patches", "encoder", "fused attention"])
def test_rounding_is_measured_where_translations_enlarge_it(name: str) -> None:
    _, _, symmetry, params = network(name)
    element = drawn(symmetry, 0)
    large = element.translated({key: 10 * vector for key, vector in element.translation.items()})
    moved = rounded(symmetry.act(large, params), torch.float16)
    assert rg.compare(params, moved, symmetry).verdict == "same network in another gauge"
    tuned = rounded(symmetry.act(large, stranger(params, symmetry, 0.05)), torch.float16)
    assert rg.compare(params, tuned, symmetry).verdict == "descended"


@pytest.mark.parametrize("name", ["decoder", "patches", "encoder"])
def test_streamed_copies_have_the_same_tolerance(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, symmetry, params = network(name)
    element = drawn(symmetry, 0)
    large = element.translated({key: 10 * vector for key, vector in element.translation.items()})
    save(params, tmp_path / "a.safetensors")
    near = {"copy": params, "tuned": stranger(params, symmetry, 0.05)}
    monkeypatch.setattr("regauge.checkpoints.job.FileJob.is_streamed", True)
    for kind, network_b in near.items():
        save(rounded(symmetry.act(large, network_b), torch.float16), tmp_path / f"{kind}.safetensors")
        found = rg.compare(tmp_path / "a.safetensors", tmp_path / f"{kind}.safetensors", symmetry)
        expected = "same network in another gauge" if kind == "copy" else "descended"
        assert found.verdict == expected, found.reason


def test_rounding_that_destroys_a_network_leaves_it_undecided() -> None:
    _, _, symmetry, params = network("patches")
    element = drawn(symmetry, 0)
    for factor, kind, verdict in ((100, 0.0, "undecided"), (100, 1.0, "undecided"), (1, 1.0, "unrelated")):
        large = element.translated({key: factor * vector for key, vector in element.translation.items()})
        other = stranger(params, symmetry, kind) if kind else params
        found = rg.compare(params, rounded(symmetry.act(large, other), torch.bfloat16), symmetry)
        assert found.verdict == verdict
        assert ("rounding changes the compared values" in found.reason) == (verdict == "undecided")


def test_noise_never_explains_what_is_no_copy() -> None:
    near = Evidence(False, 0.0078, 20.0, 0.04, 400, 0.99, 0.2, 0.5, 0.0)
    assert needs_noise(near)
    assert judge(near)[0] == "descended"
    for noise, verdict in ((0.03, "same network in another gauge"), (0.01, "descended"), (0.5, "descended")):
        evidence = Evidence(False, 0.0078, 20.0, 0.04, 400, 0.99, 0.2, 0.5, 0.0, noise=noise)
        assert judge(evidence)[0] == verdict
    assert not needs_noise(Evidence(False, 0.0078, 20.0, 0.001, 400, 0.99, 0.2, 0.5, 0.0))
    assert not needs_noise(Evidence(False, 0.0078, 20.0, 0.5, 400, 0.99, 0.2, 0.5, 0.0))
    assert not needs_noise(Evidence(False, 0.0078, 0.05, 0.04, 400, 0.99, 0.2, 0.5, 0.0))


@pytest.fixture(scope="module")
def streams() -> tuple[rg.Symmetry, list[rg.Params]]:
    """Return four independent transformers with different gains, and their symmetry."""
    module = Llama(24, width=16, layers=2, heads=2, kv_heads=1)
    networks = [initialize_transformer(module, torch.Generator().manual_seed(seed)) for seed in range(4)]
    chance = torch.Generator().manual_seed(9)
    for params in networks:
        for name, tensor in params.items():
            if tensor.ndim == 1:
                params[name] = 1 + 0.2 * torch.randn(tensor.shape, generator=chance)
    module.load_state_dict(networks[0])
    return rg.discover(module.eval(), (torch.arange(6).unsqueeze(0),)), networks


def test_strangers_whose_streams_somebody_rotated_are_not_accused(
    streams: tuple[rg.Symmetry, list[rg.Params]],
) -> None:
    symmetry, (a, *others) = streams
    assert symmetry.rotatable
    near = [rg.align(a, one, symmetry, rotate="always").params for one in others]
    for one in near:
        found = rg.compare(a, one, symmetry)
        assert found.verdict in ("unrelated", "aligned to A, or a distant descendant")
        assert found.share_beyond_chance is not None
        assert found.share_beyond_chance < 0.1
    center = {name: torch.stack([one[name] for one in near]).mean(0) for name in a}
    assert rg.compare(a, center, symmetry).verdict != "descended"


def test_a_rotation_hides_no_descendant(streams: tuple[rg.Symmetry, list[rg.Params]]) -> None:
    symmetry, (a, *_) = streams
    far = {
        name: torch.where(t.abs() >= t.abs().flatten().quantile(0.6), t, 0.0) if t.ndim > 1 else t
        for name, t in a.items()
    }
    stored = rg.compare(a, far, symmetry)
    moved = rg.compare(a, symmetry.act(symmetry.random(torch.Generator().manual_seed(3)), far), symmetry)
    assert stored.verdict == moved.verdict == "descended"
    assert stored.share_after is not None
    assert moved.share_after == pytest.approx(stored.share_after, abs=0.05)
