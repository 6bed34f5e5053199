"""What networks over networks that multiply features by weights must not lose, jump at or mix up."""

from typing import Any

import pytest
import torch
from weightspace_cases import generator, population, symmetry

import regauge as rg
from regauge import weightspace as ws
from regauge.core.params import Params
from regauge.nets.mlp import MLP
from regauge.weightspace.layout import compile_layout


def make(found: rg.Symmetry, networks: Params, layer: Any, head: Any = None, **options: Any) -> ws.Metanet:
    settings = {"width": 8, "depth": 2, "generator": generator(0), **options}
    net = ws.Metanet(found, layer=layer, head=head or ws.Invariant(3), **settings).double().eval()
    net.standardize(networks)
    return net


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def tanh_networks(*widths: int) -> tuple[rg.Symmetry, Params]:
    module = MLP(widths, torch.tanh)
    networks = {
        name: torch.randn(4, *t.shape, generator=generator(4), dtype=torch.float64)
        for name, t in module.state_dict().items()
    }
    return rg.discover(module, (torch.randn(2, widths[0]),)), networks


def first_weight(networks: Params) -> str:
    return next(name for name in networks if name.endswith("weight"))


NATIVE = [ws.ScaleGMN(), ws.Propagation()]
"""Layers that respect signs without a canonical form of them."""


@pytest.mark.parametrize("layer", [ws.ScaleGMN(), ws.Propagation(), ws.RelationalAttention(heads=2)])
def test_a_weight_of_zero_is_a_connection_like_any_other(layer: Any) -> None:
    found, networks = tanh_networks(3, 5, 5, 2)
    net = make(found, networks, layer, parts=("permutation", *layer.respects))
    name = [key for key in networks if key.endswith("weight")][1]
    exact, close = networks[name].clone(), networks[name].clone()
    exact[:, :2], close[:, :2] = 0.0, 1e-12
    assert far(net({**networks, name: close}), net({**networks, name: exact})) < 1e-7


def test_signs_are_respected_without_jumps() -> None:
    # A canonical form flips a unit where the sum of its weights passes zero; features that change sign do not.
    found, networks = tanh_networks(3, 5, 5, 2)
    name = first_weight(networks)
    balanced = networks[name] - networks[name].mean(-1, keepdim=True)
    sides = [{**networks, name: balanced + step} for step in (1e-7, -1e-7)]
    jumps = {}
    for layer in (*NATIVE, ws.Propagation(is_signed=False), ws.MessagePassing()):
        net = make(found, networks, layer)
        assert "sign" in net.parts
        jumps[layer] = far(net(sides[0]), net(sides[1]))
    assert all(jumps.pop(layer) < 1e-4 for layer in NATIVE)
    assert all(jump > 1e-3 for jump in jumps.values())


def test_half_periods_are_respected_without_jumps() -> None:
    networks = population("siren")
    name = next(name for name in networks if name.endswith("bias"))
    (shift,) = {shift for group in symmetry("siren").groups for p in group.placements for shift in p.shift if shift}
    jumps = {}
    for layer in (ws.Propagation(), ws.MessagePassing()):
        net = make(symmetry("siren"), networks, layer)
        assert "shift" in net.parts
        # A canonical form brings biases to half a period around zero, and jumps at its ends.
        sides = [{**networks, name: torch.full_like(networks[name], shift / 2 + step)} for step in (1e-8, -1e-8)]
        jumps[type(layer)] = far(net(sides[0]), net(sides[1]))
    assert jumps[ws.Propagation] < 1e-4
    assert jumps[ws.MessagePassing] > 1e-3


def test_a_quarter_of_a_period_is_seen_and_a_half_alone_too() -> None:
    networks = population("siren")
    name = next(name for name in networks if name.endswith("bias"))
    (shift,) = {shift for group in symmetry("siren").groups for p in group.placements for shift in p.shift if shift}
    net = make(symmetry("siren"), networks, ws.Propagation())
    for step in (shift / 2, shift):  # a half period is a symmetry only if what the unit sends changes its sign
        moved = networks[name].clone()
        moved[:, 0] += step
        assert far(net({**networks, name: moved}), net(networks)) > 1e-6
    moved = networks[name].clone()
    moved[:, 0] += 2 * shift
    assert far(net({**networks, name: moved}), net(networks)) < 1e-9


def test_layers_begin_as_the_pass_of_a_network_of_sines() -> None:
    # Units' features are what they compute at learned inputs, which the encoder's first map holds.
    networks = population("siren")
    net = make(symmetry("siren"), networks, ws.Propagation(), depth=1)
    names = list(networks)
    layout = net.layout
    first, second, *_ = layout.units
    points = net.encoders[0].odd_maps["0"].weight.detach()  # [width, inputs]
    frequency = layout.waves[first].frequency
    hidden = torch.sin(frequency * (networks[names[0]] @ points.mT + networks[names[1]].unsqueeze(-1)))
    got = net.encoders[0](layout.read(networks), layout).odd.units[first][layout.wave_signs(first)[0]]
    assert far(got, hidden) < 1e-9
    layer = net.layers[0]
    features = net.encoders[0](layout.read(networks), layout)
    _, heard = layer.odd.hear(features, {name: layer.units.norm(x) for name, x in features.units.items()}, layout)
    waves = layer.odd.turn(second, features, heard, layout).waves
    wanted = torch.sin(
        layout.waves[second].frequency * (networks[names[2]] @ hidden + networks[names[3]].unsqueeze(-1))
    )
    assert far(waves[layout.wave_signs(second)[0]], wanted) < 1e-9


@pytest.mark.parametrize("layer", NATIVE)
@pytest.mark.parametrize("case", ["mlp_relu", "resnet8_batch_A", "siren"])
def test_large_scales_and_signs_change_nothing(case: str, layer: Any) -> None:
    networks = population(case)
    net = make(symmetry(case), networks, layer)
    element = symmetry(case).random(generator(1), ("permutation", "sign", "scale"), (3,))
    wide = element.map(lambda t: t**4 if t.dtype == torch.float64 else t)
    assert far(net(symmetry(case).act(wide, networks)), net(networks)) < 1e-8


def test_kernels_padded_with_zeros_have_finite_features() -> None:
    networks = population("cnn_flatten")
    padded = {name: t.clone() for name, t in networks.items()}
    for t in padded.values():
        if t.ndim == 5:
            t[..., 0] = 0.0
    net = make(symmetry("cnn_flatten"), networks, ws.ScaleGMN())
    element = symmetry("cnn_flatten").random(generator(1), None, (3,))
    made = net(padded)
    assert bool(made.isfinite().all())
    assert far(net(symmetry("cnn_flatten").act(element, padded)), made) < 1e-9


def test_positions_of_several_outputs_are_told_apart_and_units_are_not() -> None:
    found, networks = tanh_networks(3, 6, 6, 3)
    net = make(found, networks, ws.ScaleGMN())
    moved = found.act(found.random(generator(1), net.parts, (4,)), networks)
    assert far(net(moved), net(networks)) < 1e-9
    last = [name for name in networks if name.endswith("weight")][-1]
    assert far(net({**networks, last: networks[last].flip(1)}), net(networks)) > 1e-6


def test_a_sign_that_is_no_symmetry_is_seen() -> None:
    found, networks = tanh_networks(3, 5, 5, 2)
    net = make(found, networks, ws.ScaleGMN())
    name = first_weight(networks)
    flipped = networks[name].clone()
    flipped[:, 0] *= -1  # and neither the bias nor what the unit sends
    assert far(net({**networks, name: flipped}), net(networks)) > 1e-6


def test_changes_of_networks_of_sines_can_be_odd() -> None:
    networks = population("siren")
    net = make(symmetry("siren"), networks, ws.ScaleGMN(), ws.Equivariant())
    before = net(networks)
    flip = symmetry("siren").random(generator(2), ("sign",), (3,))
    after = net(symmetry("siren").act(flip, networks))
    wanted = symmetry("siren").act(flip, before)
    assert any(bool((wanted[name] != before[name]).any()) for name in before)
    assert max(far(after[name], wanted[name]) for name in before) < 1e-9


def test_several_families_of_signs_are_known_by_the_labels() -> None:
    layout = compile_layout(symmetry("hf_llama"), is_signed=True)
    families = {len(one[-1]) for known in layout.unit_signs.values() for one in known}
    assert max(families) > 1
    assert not compile_layout(symmetry("hf_llama")).signs


@pytest.mark.parametrize("layer", NATIVE)
def test_signs_are_respected_with_probes(layer: Any) -> None:
    found, networks = tanh_networks(3, 5, 5, 2)
    probes = ws.Probes(
        MLP((3, 5, 5, 2), torch.tanh).double(), (torch.randn(4, 3, generator=generator(5)).double(),), inputs=4
    )
    net = make(found, networks, layer, probes=probes)
    moved = found.act(found.random(generator(1), net.parts, (4,)), networks)
    assert far(net(moved), net(networks)) < 1e-9
