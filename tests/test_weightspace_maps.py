"""Layers with maps of their own between all tensors: every setting of them, and what they can tell apart."""

from itertools import product

import pytest
import torch
from weightspace_cases import generator, population, symmetry

from regauge import weightspace as ws

SETTINGS = [
    ws.DWS(sets=sets, pooling=pooling, is_diagonal=is_diagonal, heads=2)
    for sets, pooling, is_diagonal in product(("attention", "mean"), ("max", "mean"), (False, True))
]
CASES = ("mlp_relu", "lstm", "grouped_conv", "vit", "hf_llama")


@pytest.mark.parametrize("layer", SETTINGS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_setting_is_invariant_and_learns(case: str, layer: ws.DWS) -> None:
    net = ws.Metanet(symmetry(case), layer=layer, head=ws.Invariant(2), width=4, depth=2, generator=generator(0))
    net = net.double()
    networks = population(case)
    net.standardize(networks)
    moved = symmetry(case).act(symmetry(case).random(generator(1), net.parts, (3,)), networks)
    made = net(networks)
    assert float((net(moved) - made).detach().abs().max()) < 1e-9 * float(made.detach().abs().max())
    (made * torch.randn(made.shape, generator=generator(2), dtype=made.dtype)).sum().backward()
    assert not [name for name, p in net.named_parameters() if p.grad is None or not bool(p.grad.any())]


def test_a_diagonal_layer_hears_from_neighbors_alone() -> None:
    found, networks = symmetry("siren"), population("siren")
    changed = {**networks, "layers.0.bias": networks["layers.0.bias"] + 1}
    heard = {}
    for is_diagonal in (False, True):
        layer = ws.DWS(is_diagonal=is_diagonal, heads=2)
        options = {"parts": ("permutation",), "width": 4, "generator": generator(0)}
        net = ws.Metanet(found, layer=layer, head=ws.UnitFeatures(3), **options)
        net = net.double().eval()
        parts = [net.features(params, layers=1).units["layers.2"] for params in (networks, changed)]
        heard[is_diagonal] = not torch.equal(*parts)
    assert heard == {False: True, True: False}


def test_settings_that_make_no_layer_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="'attention' or 'mean'"):
        ws.DWS(sets="median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not divide a width of 6"):
        ws.Metanet(symmetry("siren"), layer=ws.DWS(heads=4), head=ws.Invariant(2), width=6)
