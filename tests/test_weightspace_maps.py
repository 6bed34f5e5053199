"""Layers with separate maps between all tensors: every setting, and the networks that they can distinguish."""

from itertools import permutations, product

import pytest
import torch
from coverings import covering
from weightspace_cases import generator, population, symmetry

from regauge import weightspace as ws
from regauge.core.element import PARTS
from regauge.weightspace.layers import reading
from regauge.weightspace.layers.dense import Norm
from regauge.weightspace.layers.hubs import POOLED, Key, find_hubs
from regauge.weightspace.layers.propagation import _multiply
from regauge.weightspace.layers.reading import Pools, _Activated, _Largest, activate, map_and_pool
from regauge.weightspace.layout.blocks import Block, End
from regauge.weightspace.layout.compile import compile_layout

LAYERS = [
    ws.DWS(sets=sets, pooling=pooling, is_diagonal=is_diagonal, heads=2)
    for sets, pooling, is_diagonal in product(("attention", "mean"), ("max", "mean"), (False, True))
]
SETTINGS = {str(layer): layer for layer in LAYERS}
CASES = ("mlp_relu", "lstm", "grouped_conv", "vit", "hf_llama")


@pytest.mark.parametrize(("case", "setting"), covering(CASES, SETTINGS, of=4))
def test_every_setting_is_invariant_and_learns(case: str, setting: str) -> None:
    layer = SETTINGS[setting]
    made_of = {"parts": PARTS, "width": 4, "depth": 2}  # of what a representative has zero nothing is learned
    net = ws.Metanet(symmetry(case), layer=layer, head=ws.Invariant(2), generator=generator(0), **made_of).double()
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


def test_the_gradients_of_maxima_and_of_what_is_computed_again_agree_with_finite_differences() -> None:
    x = torch.randn(3, 4, 5, 6, generator=generator(0), dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(2, 6, generator=generator(1), dtype=torch.float64).requires_grad_()
    for axis in (1, 2):
        assert torch.equal(_Largest.apply(x, axis), x.max(axis).values)
        assert torch.autograd.gradcheck(lambda x, axis=axis: _Largest.apply(x, axis), (x,))
    assert torch.autograd.gradcheck(lambda *inputs: _Activated.apply(*inputs, 1e-5), (x, weight, bias))
    same = torch.ones(1, 4, requires_grad=True)
    _Largest.apply(same, 1).backward(torch.ones(1))
    assert same.grad is not None
    assert same.grad.tolist() == [[0.25] * 4]  # units that are alike stay alike


@pytest.mark.parametrize("case", ["siren", "lstm", "vit"])
def test_all_maps_into_a_tensor_share_one_variance(case: str) -> None:
    # The published layers count only some of the maps that are added up.
    net = ws.Metanet(symmetry(case), layer=ws.NFN(), head=ws.Invariant(2), width=32, depth=1, generator=generator(0))
    (layer,) = net.layers
    hubs = find_hubs(net.layout, layer.targets, is_local=False)
    total: dict[Key, float] = {}
    for hub, weight in zip(hubs, layer.weights, strict=True):
        for link, rows in zip(hub.writes, weight.detach().chunk(len(hub.writes)), strict=True):
            total[link.key] = total.get(link.key, 0.0) + float(rows.square().sum(1).mean())
    assert len(total) == len(net.layout.units) + len(net.layout.pair_blocks) + 1
    assert all(0.8 < variance < 1.25 for variance in total.values())


@pytest.mark.parametrize("layer", [ws.NFN(), ws.DWS(heads=2)], ids=str)
def test_neither_the_order_of_tensors_nor_that_of_units_is_learned(layer: ws.NFN | ws.DWS) -> None:
    # Statistics for every entry, as published, would make both matter.
    found, networks = symmetry("cnn_flatten"), population("cnn_flatten")
    moved = found.act(found.random(generator(5), ("permutation",), (3,)), networks)
    made = []
    for params in (networks, moved, dict(reversed(networks.items()))):
        net = ws.Metanet(found, layer=layer, head=ws.Invariant(2), width=4, depth=1, generator=generator(0)).double()
        net.standardize(params)
        made.append(net(params).detach())
    for other in made[1:]:
        torch.testing.assert_close(other, made[0], rtol=1e-8, atol=1e-9)


def test_entries_of_one_tensor_hear_from_those_of_another_over_the_same_units() -> None:
    # In a transformer's feed-forward part: the weights into and out of one unit.
    layout = compile_layout(symmetry("hf_llama"))
    hubs = find_hubs(layout, frozenset({"pairs"}), is_local=True)
    gate, down = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"
    meeting = [
        hub
        for hub in hubs
        if len(hub.grid.sizes) == 2 and {gate, down} <= {link.key[1] for link in hub.reads if POOLED not in link.axes}
    ]
    assert len(meeting) == 1


def test_settings_that_make_no_layer_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="'attention' or 'mean'"):
        ws.DWS(sets="median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not divide a width of 6"):
        ws.Metanet(symmetry("siren"), layer=ws.DWS(heads=4), head=ws.Invariant(2), width=6)


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_what_is_mapped_some_networks_at_a_time_is_what_is_mapped_at_once(
    pooling: reading.Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(5, 4, 3, 2, 6, generator=generator(0), dtype=torch.float64, requires_grad=True)
    norm, weight = Norm(6).double(), torch.randn(6, 6, generator=generator(1), dtype=torch.float64, requires_grad=True)
    torch.nn.init.normal_(norm.weight, generator=generator(2))
    torch.nn.init.normal_(norm.bias, generator=generator(3))
    kept = [(0,), (0, 1), (2,), (), (0, 1, 2)]
    active = activate(x, norm)
    pools = Pools.of(active, pooling)
    results = [[x + active @ weight.t(), *(pools.over(axes) for axes in kept[:-1])]]
    monkeypatch.setattr(reading, "LAYER_VALUES_AT_ONCE", 2 * x[0].numel())
    mapped, known = map_and_pool(x, norm, weight, kept, pooling)
    some = Pools(known, pooling)
    results.append([mapped, *(some.over(axes) for axes in kept[:-1])])
    wanted = [torch.randn(one.shape, generator=generator(4), dtype=one.dtype) for one in results[0]]
    inputs = (x, weight, norm.weight, norm.bias)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    one, other = (torch.autograd.grad(made, inputs, wanted) for made in results)
    for k in range(len(inputs)):
        torch.testing.assert_close(one[k], other[k])


AXES = [axes for count in (1, 2) for axes in permutations(range(3), count)]


def test_messages_are_sums_over_the_units_of_one_end() -> None:
    """The two ends of a block may have any axes in any order: separate axes, shared axes, or no axes."""
    sizes = (2, 3, 4)
    block = Block("w", ("w",), (), sizes, 2, ())
    for into, out in product(AXES, AXES):
        chance = generator(0)
        values = torch.randn(3, *sizes, 2, generator=chance, dtype=torch.float64)
        sent = torch.randn(3, *(sizes[axis] for axis in out), 2, 5, generator=chance, dtype=torch.float64)
        letters = "abc"
        left, right = ("".join(letters[axis] for axis in axes) for axes in (into, out))
        expected = torch.einsum(f"XabcY,X{right}YZ->X{left}Z", values, sent)
        found = _multiply(values, sent, block, End("i", into), End("j", out))
        torch.testing.assert_close(found, expected, msg=lambda m, ends=(into, out): f"{ends}: {m}")
