"""Copies that were moved by the whole group and rounded to a format are the same network; strangers are not."""

import pytest
import torch
from translation_nets import NETS, drawn, network, stranger

import regauge as rg
from regauge.comparison.verdicts import Evidence, judge, needs_noise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rounded(params: rg.Params, dtype: torch.dtype) -> rg.Params:
    """A network in another format."""
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in params.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NETS)
def test_moved_and_rounded_copies_are_the_same_network(name: str, dtype: torch.dtype) -> None:
    _, _, symmetry, params = network(name)
    element = drawn(symmetry, 1)
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
