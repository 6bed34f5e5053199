"""The memory of work on networks in files is announced beforehand, and is never too small."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from live_tensors import Live
from representative_cases import case, moved
from symmetries import generator
from torch import nn

import regauge as rg
from regauge.checkpoints.job import matching_bytes, open_call
from regauge.core import lazy_chart
from regauge.core.params import batch_of_one
from regauge.nets.mlp import mlp
from regauge.nets.transformer import GPT, Llama, initialize_transformer

TOKENS = torch.zeros(2, 8, dtype=torch.int64)
NETS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "MLP": lambda: (mlp(256, 256, 256, 10), torch.zeros(2, 256)),
    "GPT": lambda: (GPT(200, 16, width=96, layers=2, heads=2), TOKENS),
    "Llama": lambda: (Llama(200, width=96, layers=2, heads=2, kv_heads=1), TOKENS),
}
WORKS: dict[str, tuple[int, Callable[..., object]]] = {
    "aligning": (2, lambda paths, symmetry, out: rg.align(*paths, symmetry, out=out)),
    "merging": (2, lambda paths, symmetry, out: rg.merge(paths, symmetry, out=out)),
    "aligning many networks": (3, lambda paths, symmetry, out: rg.align_many(paths, symmetry)),
    "canonicalizing": (1, lambda paths, symmetry, out: rg.canonicalize(*paths, symmetry, out=out)),
    "pruning": (1, lambda paths, symmetry, out: rg.prune(*paths, symmetry, share=0.25, out=out)),
    "transporting": (3, lambda paths, symmetry, out: rg.transport(*paths, symmetry, out=out)),
}


@pytest.mark.parametrize(
    ("net", "work"),
    [*((net, "aligning") for net in NETS), ("Llama", "merging"), *(("MLP", work) for work in list(WORKS)[1:])],
)
def test_no_tensors_beyond_what_is_announced(
    net: str, work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound also holds if streams are rotated, as for these unrelated networks. Networks are transformed like large
    networks.
    """
    monkeypatch.setattr(lazy_chart, "LARGE", 0)
    torch.manual_seed(0)
    module, inputs = NETS[net]()
    symmetry = rg.discover(module.eval(), (inputs,), verify=False)
    count, run = WORKS[work]
    paths = []
    for k in range(count):
        params = {name: torch.randn(t.shape, generator=generator(k)) for name, t in module.state_dict().items()}
        if isinstance(module, GPT | Llama):
            params = initialize_transformer(module, generator(k))
        paths.append(tmp_path / f"{k}.safetensors")
        rg.save(params, paths[-1])
    named: Any = {f"network {k}": path for k, path in enumerate(paths)}
    out = tmp_path / "out.safetensors"
    job = open_call("a call", {}, named, work=work, symmetry=symmetry, out=out)
    assert job is not None
    with Live() as live:
        run(paths, symmetry, out)
    assert 0.3 * job.nbytes < live.peak <= job.nbytes


def test_costs_of_wide_layers_are_announced(tmp_path: Path) -> None:
    """Costs dominate if a layer has more units than inputs and outputs."""
    module = mlp(4, 512, 3)
    symmetry = rg.discover(module.eval(), torch.zeros(2, 4))
    values = 4 * sum(tensor.numel() for tensor in module.state_dict().values())
    costs = sum(matching_bytes(symmetry, 4))
    assert costs >= 2 * 4 * 512**2 > 100 * values
    paths = [tmp_path / f"{k}.safetensors" for k in "ab"]
    for path in paths:
        rg.save(module.state_dict(), path)
    named: Any = dict(zip("ab", paths, strict=True))
    one, other = (
        open_call("a call", {}, named, work="aligning", symmetry=known, out=None) for known in (symmetry, None)
    )
    assert one is not None
    assert other is not None
    assert one.nbytes - other.nbytes == costs
    assert one.streams(symmetry) is False


@pytest.mark.parametrize("name", ["stream", "decoder", "llama", "batch norm"])
def test_large_networks_are_transformed_tensor_by_tensor_to_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, symmetry, params = case(name)
    element = symmetry.random(generator(1), ("permutation", "sign", "scale", "translation", "rotation"))
    found = []
    for limit in (1 << 40, 0):
        monkeypatch.setattr(lazy_chart, "LARGE", limit)
        many = {n: torch.stack([t, t]) for n, t in params.items()}
        both = [symmetry.split(one) for one in (params, batch_of_one(params), many)]
        actions = [symmetry.act(element, params), symmetry.act(element.expand(1), batch_of_one(params))]
        found.append([*actions, *(part for one in both for part in one)])
    assert bool(element.translation or element.rotation)
    for one, other in zip(*found, strict=True):
        assert list(one) == list(other)
        assert all(torch.equal(tensor, other[n]) and tensor.dtype == other[n].dtype for n, tensor in one.items())


def test_a_match_is_the_same_for_large_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, symmetry, params = case("llama")
    found = []
    for limit in (1 << 40, 0):
        monkeypatch.setattr(lazy_chart, "LARGE", limit)
        found.append(rg.align(params, moved(symmetry, params), symmetry))
    assert found[0].objective == found[1].objective
    assert all(torch.equal(tensor, found[1].params[n]) for n, tensor in found[0].params.items())
