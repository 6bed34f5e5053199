"""Nets that multiply features by weights: they lose no information, are continuous, and do not mix up units."""

from typing import Any

import pytest
import torch
from torch import nn
from weightspace_cases import generator, population, symmetry

import regauge as rg
from regauge import weightspace as ws
from regauge.core.element import PARTS
from regauge.core.params import Params
from regauge.nets.mlp import MLP
from regauge.weightspace.layout.compile import compile_layout


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


NATIVE = [ws.ScaleGMN(), ws.ScaleGMN(is_scaled=True), ws.Propagation()]
"""Layers that respect signs, or also scales, without a canonical form."""


@pytest.mark.parametrize("layer", [ws.ScaleGMN(), ws.Propagation(), ws.RelationalAttention(heads=2)])
def test_a_weight_of_zero_is_a_connection_like_any_other(layer: Any) -> None:
    found, networks = tanh_networks(3, 5, 5, 2)
    net = make(found, networks, layer, parts=("permutation", *layer.traits.respects))
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


@pytest.mark.parametrize("layer", [ws.ScaleGMN(), ws.ScaleGMN(is_scaled=True)], ids=str)
def test_kernels_padded_with_zeros_and_dead_units_have_finite_features(layer: ws.ScaleGMN) -> None:
    networks = population("cnn_flatten")
    padded = {name: t.clone() for name, t in networks.items()}
    for t in padded.values():
        if t.ndim == 5:
            t[..., 0] = 0.0
    if layer.is_scaled:  # A canonical form leaves the scales of units that nothing comes in to.
        padded["0.weight"][:, :2], padded["0.bias"][:, :2] = 0.0, 0.0
    net = make(symmetry("cnn_flatten"), networks, layer)
    element = symmetry("cnn_flatten").random(generator(1), None, (3,))
    made = net(padded)
    made.sum().backward()
    assert bool(made.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in net.parameters() if p.grad is not None)
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
    families = {
        sum(isinstance(exponent, bool) for exponent in one[-1]) for known in layout.unit_signs.values() for one in known
    }
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


class Squares(nn.Module):
    """An MLP of squared ReLUs: if the incoming weights of a unit are doubled, its outgoing weights are divided by
    four.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((3, 5), (5, 4), (4, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in list(self.layers)[:-1]:
            x = layer(x).relu().square()
        made: torch.Tensor = self.layers[2](x)
        return made


def squares() -> tuple[rg.Symmetry, Params]:
    module = Squares()
    networks = {
        name: torch.randn(3, *t.shape, generator=generator(4), dtype=torch.float64)
        for name, t in module.state_dict().items()
    }
    return rg.discover(module, (torch.randn(2, 3),)), networks


@pytest.mark.parametrize("case", ["mlp_relu", "cnn_flatten", "resnet8_batch_A", "grouped_conv", "glu"])
@pytest.mark.parametrize("head", [ws.Invariant(3), ws.Equivariant()], ids=["numbers", "changes"])
def test_scales_are_respected_by_products(case: str, head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, networks = symmetry(case), population(case)
    assert any(group.scales for group in found.groups)
    # Without translations: in a representative statistics and biases are constant, and changes are not linear in them.
    net = make(found, networks, ws.ScaleGMN(is_scaled=True), head, parts=PARTS)
    monkeypatch.setattr("regauge.weightspace.canonical_frame.carry_out", None)  # no canonical form is made
    element = found.random(generator(1), net.parts, (3,)).map(lambda t: t**3 if t.dtype == torch.float64 else t)
    read = {name: networks[name].clone().requires_grad_() for name in net.layout.parameters}
    made = net({**networks, **read})
    after, wanted = net(found.act(element, networks)), made
    if isinstance(made, dict):
        wanted = found.act(element, made)
        assert max(far(after[name], wanted[name]) for name in made if bool(made[name].any())) < 1e-9
        made = torch.cat([tensor.flatten() for tensor in made.values()])
    else:
        assert far(after, wanted) < 1e-9
    (made * torch.randn(made.shape, generator=generator(2), dtype=made.dtype)).sum().backward()
    assert not [name for name, t in read.items() if t.grad is None or not float(t.grad.abs().max()) > 1e-12]
    assert not [name for name, p in net.named_parameters() if p.grad is None or not bool(p.grad.any())]


@pytest.mark.parametrize("case", ["mlp_relu", "resnet8_batch_A"])
@torch.no_grad()
def test_spread_lasts_where_scales_are_respected_by_products(case: str) -> None:
    networks = population(case, 4)
    net = make(symmetry(case), networks, ws.ScaleGMN(is_scaled=True), depth=8, width=16)
    spreads = []
    for layers in (0, 1, 4, 8):
        features = net.features(networks, layers=layers)
        means = [x.flatten(1, -2).mean(1) for x in (*features.units.values(), *features.pairs.values())]
        spreads.append(float(torch.cat(means, -1).std(0).mean()))
    assert max(spreads) / min(spreads) < 30


def test_scales_are_canonical_where_more_depends_on_them() -> None:
    found, networks = symmetry("mlp_relu"), population("mlp_relu")
    element = found.random(generator(1), None, (3,))
    for options in ({"reads_moments": True}, {"readers": ws.find_readers(found)}):
        net = make(found, networks, ws.ScaleGMN(is_scaled=True), **options)
        assert not net.layout.is_scaled
        assert far(net(found.act(element, networks)), net(networks)) < 1e-9
    found, networks = squares()  # Outgoing weights have the exponent -2, which no feature cancels.
    net = make(found, networks, ws.ScaleGMN(is_scaled=True))
    element = found.random(generator(1), None, (3,))
    assert not net.layout.is_scaled
    assert {"scale"} <= {*net.parts}
    assert far(net(found.act(element, networks)), net(networks)) < 1e-9


@pytest.mark.parametrize("head", [ws.Invariant(3), ws.Equivariant()], ids=["numbers", "changes"])
@pytest.mark.parametrize("layer", NATIVE, ids=str)
def test_maps_of_features_that_stay_zero_are_not_made(layer: Any, head: Any) -> None:
    """Signs of queries and keys in Qwen3 multiply no values of single units, and few messages carry these signs to
    units.
    """
    networks = population("hf_qwen3")
    net = make(symmetry("hf_qwen3"), networks, layer, head)
    made = net(networks)
    parts = [made] if isinstance(made, torch.Tensor) else made.values()
    weigh = generator(3)
    torch.stack([(t * torch.randn(t.shape, generator=weigh, dtype=t.dtype)).sum() for t in parts]).sum().backward()
    assert not [name for name, p in net.named_parameters() if p.grad is None or not bool(p.grad.any())]
