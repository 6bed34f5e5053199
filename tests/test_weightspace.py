"""The laws of nets over networks: the same tests over layers, heads and architectures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from coverings import covering
from torch import Tensor
from weightspace_cases import NAMES, generator, move_changes, move_units, population, symmetry

import regauge as rg
from regauge import weightspace as ws
from regauge.checkpoints.writing import save
from regauge.core.element import PARTS
from regauge.core.params import Params, select
from regauge.learn.layer_statistics import invariant_statistics, layer_statistics
from regauge.nets.mlp import MLP

HEADS: dict[str, Callable[[], Any]] = {
    "invariant": lambda: ws.Invariant(3),
    "equivariant": ws.Equivariant,
    "unit_features": lambda: ws.UnitFeatures(5),
}
EVERY_LAYER = pytest.mark.parametrize("layer", list(ws.LAYERS))
EVERY_CASE = pytest.mark.parametrize("case", NAMES)
UNITS = [name for name in NAMES if name != "mlp_linear"]
"""Architectures with units. If all groups are groups of matrices, no head has features of units."""
NO_UNITS = [("mlp_linear", layer, head) for layer in ws.LAYERS for head in ("invariant", "equivariant")]
HEADED = ("case", "layer", "head")
EVERY_MOVE = pytest.mark.parametrize(HEADED, [*covering(UNITS, ws.LAYERS, HEADS, of=1), *NO_UNITS])
"""Every architecture with every layer, and with the heads in turn."""
EVERY_SECOND = pytest.mark.parametrize(HEADED, [*covering(UNITS, ws.LAYERS, HEADS, part=1, of=2), *NO_UNITS[::3]])
"""Every second case of `EVERY_MOVE`."""
SOME = pytest.mark.parametrize(
    ("case", "layer", "head"),
    [
        (case, list(ws.LAYERS)[(k + shift) % len(ws.LAYERS)], head)
        for k, (case, head) in enumerate(
            [(case, "invariant") for case in NAMES] + [(case, head) for case in ("siren", "vit") for head in HEADS]
        )
        for shift in (0, len(ws.LAYERS) // 2)
    ],
)
"""Every architecture and every head, with two layers in turn."""
EXACT = 1e-9


def make(case: str, layer: str, head: Any, **options: Any) -> ws.Metanet:
    """Return a small net in float64, standardized by random networks."""
    settings = {"width": 8, "depth": 2, "generator": generator(0), **options}
    net = ws.Metanet(symmetry(case), layer=ws.LAYERS[layer](), head=head, **settings).double().eval()
    net.standardize(population(case, seed=7))
    return net


def far(a: Any, b: Any) -> float:
    """Return the largest difference, relative to the largest value, also for each tensor of a dictionary."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        return max(far(a[name], b[name]) for name in a) if a else 0.0
    if not a.numel():
        return 0.0
    return float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-30))


def test_heads_are_all_tested() -> None:
    assert HEADS.keys() == ws.HEADS.keys()


@EVERY_MOVE
def test_output_moves_as_it_should(case: str, layer: str, head: str) -> None:
    net = make(case, layer, HEADS[head]())
    networks = population(case)
    element = symmetry(case).random(generator(1), net.parts, (3,))
    before, after = net(networks), net(symmetry(case).act(element, networks))
    if head == "unit_features":
        before = {name: move_units(net.layout, name, element, values) for name, values in before.items()}
    elif head == "equivariant":
        before, after = move_changes(case, element, before, after)
    assert far(after, before) < EXACT


@EVERY_CASE
def test_every_part_is_respected(case: str) -> None:
    group_parts = {"permutation"}
    for group in symmetry(case).groups:
        group_parts |= {"scale"} if group.scales else set()
        group_parts |= {"sign"} if group.signs else set()
        group_parts |= {"shift"} if group.shifts else set()
        group_parts |= {"linear"} if group.matrix != "none" else set()
    assert group_parts <= {*make(case, "message_passing", ws.Invariant(2)).parts}


@pytest.mark.parametrize("case", ["mlp_relu", "siren", "vit"])
def test_what_is_not_wanted_is_not_respected(case: str) -> None:
    net = make(case, "message_passing", ws.Invariant(2), parts=("permutation",))
    networks = population(case)
    assert net.parts == ("permutation",)
    others = tuple(part for part in ("scale", "sign", "linear") if part != "permutation")
    moved = symmetry(case).act(symmetry(case).random(generator(1), others, (3,)), networks)
    assert far(net(moved), net(networks)) > 1e-4


@pytest.mark.parametrize(("case", "layer"), covering(NAMES, ws.LAYERS, part=0))
def test_output_depends_on_every_tensor(case: str, layer: str) -> None:
    net = make(case, layer, ws.Invariant(3), parts=PARTS)  # A representative has zeros, which do not matter.
    networks = population(case)
    read = {name: networks[name].requires_grad_() for name in net.layout.parameters}
    made = net({**networks, **read})
    (made * torch.randn(made.shape, generator=generator(2), dtype=made.dtype)).sum().backward()
    for name, tensor in read.items():
        assert tensor.grad is not None, name
        assert float(tensor.grad.abs().max()) > 1e-12, name


@EVERY_LAYER
@pytest.mark.parametrize(
    ("case", "name", "axis"),
    [("mlp_relu", "0.weight", 2), ("cnn_flatten", "0.weight", 2), ("siren", "layers.0.weight", 2)],
)
def test_inputs_are_told_apart(layer: str, case: str, name: str, axis: int) -> None:
    net = make(case, layer, ws.Invariant(3))
    networks = population(case)
    assert far(net({**networks, name: networks[name].flip(axis)}), net(networks)) > 1e-6


@EVERY_LAYER
def test_a_move_that_is_no_symmetry_is_seen(layer: str) -> None:
    net = make("mlp_relu", layer, ws.Invariant(3))
    networks = population("mlp_relu")
    only = {**networks, "0.weight": networks["0.weight"].flip(1)}  # and neither the bias nor the next layer
    assert far(net(only), net(networks)) > 1e-6


@SOME
def test_networks_do_not_see_their_neighbors(case: str, layer: str, head: str) -> None:
    net = make(case, layer, HEADS[head]())
    networks = population(case)
    whole, alone = net(networks), net(select(networks, slice(1, 2)))
    first = whole[1:2] if isinstance(whole, Tensor) else select(whole, slice(1, 2))
    assert far(alone, first) < 1e-12


@pytest.mark.parametrize("head", list(HEADS))
@pytest.mark.parametrize("layer", ["relational_attention", "propagation"])
def test_networks_may_be_read_in_groups(layer: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, networks = make("siren", layer, HEADS[head]()), population("siren")
    whole = net(networks)
    monkeypatch.setattr("regauge.weightspace.metanet.LARGEST_ARRAY", 1)
    assert far(net(networks), whole) < 1e-12


@EVERY_SECOND
def test_every_parameter_gets_a_gradient(case: str, layer: str, head: str) -> None:
    net = make(case, layer, HEADS[head](), parts=PARTS).train()  # of what a representative has zero nothing is learned
    made = net(population(case))
    tensors = [made] if isinstance(made, Tensor) else list(made.values())
    weigh = generator(3)
    total = sum((t * torch.randn(t.shape, generator=weigh, dtype=t.dtype)).sum() for t in tensors)
    assert isinstance(total, Tensor)
    total.backward()
    without = [n for n, p in net.named_parameters() if p.grad is None or not bool(p.grad.abs().max() > 0)]
    assert not without


@pytest.mark.parametrize(("case", "layer"), covering(["mlp_relu", "siren", "resnet8_batch_A", "vit"], ws.LAYERS, of=2))
@torch.no_grad()
def test_spread_over_networks_lasts_through_eight_layers(case: str, layer: str) -> None:
    net = make(case, layer, ws.Invariant(3), depth=8, width=16)
    networks = population(case, 4)
    spreads = []
    for layers in (1, 4, 8):  # Before the first layer units have what representatives keep of their biases, often zero.
        features = net.features(networks, layers=layers)
        means = [x.flatten(1, -2).mean(1) for x in (*features.units.values(), *features.pairs.values())]
        spreads.append(float(torch.cat(means, -1).std(0).mean()))
    assert max(spreads) / min(spreads) < 15


@EVERY_CASE
def test_moments_are_read_and_respect_the_symmetry(case: str) -> None:
    """The net also reads logarithms of values, which are large in some networks and tiny in others."""
    net = make(case, "propagation", ws.Invariant(3), values=ws.Logarithms(), reads_moments=True)
    networks = population(case)
    moved = symmetry(case).act(symmetry(case).random(generator(1), net.parts, (3,)), networks)
    assert far(net(moved), net(networks)) < EXACT
    plain = make(case, "propagation", ws.Invariant(3), values=ws.Logarithms())
    state = net.state_dict()
    assert {name for name in state if "moments" not in name} == set(plain.state_dict())
    for name, tensor in state.items():
        if "moments" in name:
            tensor.zero_()
    plain.load_state_dict({name: tensor for name, tensor in state.items() if "moments" not in name})
    assert far(net(networks), plain(networks)) == 0


@pytest.mark.parametrize("case", ["mlp_relu", "siren", "cnn_flatten", "vit"])
def test_statistics_of_canonical_networks_stay_the_same(case: str) -> None:
    networks = population(case)
    moved = symmetry(case).act(symmetry(case).random(generator(1), (*PARTS, "translation"), (3,)), networks)
    found, plain = invariant_statistics(symmetry(case)), layer_statistics
    assert abs(found(moved) - found(networks)).max() < 1e-5 * abs(found(networks)).max()
    assert abs(plain(moved) - plain(networks)).max() > 1e-2 * abs(plain(networks)).max()
    assert abs(found(networks)[0] - found(networks)[1]).max() > 1e-2 * abs(found(networks)).max()


def test_logarithms_tell_networks_apart_that_differ_by_orders_of_magnitude() -> None:
    """After standardization, all small values would be read as zero."""
    networks = population("mlp_linear", 6)
    sizes = torch.logspace(-3, 2, 6, dtype=torch.float64)
    networks = {name: tensor * sizes.reshape(-1, *[1] * (tensor.ndim - 1)) for name, tensor in networks.items()}
    gaps = {}
    for values in (ws.Scalars(), ws.Logarithms()):
        net = make("mlp_linear", "propagation", ws.Invariant(8), values=values, parts=("permutation",))
        net.standardize(networks)
        made = net(networks).detach()
        gaps[type(values)] = float((made[1:] - made[:-1]).norm(dim=1).min() / made.std())
    assert gaps[ws.Logarithms] > 10 * gaps[ws.Scalars]


def test_huge_and_empty_networks_are_read_in_single_precision() -> None:
    """Examples are networks whose training diverged, or whose units died."""
    options = {"values": ws.Logarithms(), "reads_moments": True}
    net = make("mlp_relu", "propagation", ws.Invariant(3), **options).float()
    networks = population("mlp_relu", dtype=torch.float32)
    sizes = torch.tensor([1.0, 1e9, 0.0])
    networks = {name: tensor * sizes.reshape(-1, *[1] * (tensor.ndim - 1)) for name, tensor in networks.items()}
    made = net(networks)
    made.sum().backward()
    assert bool(made.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in net.parameters() if p.grad is not None)


@EVERY_LAYER
def test_evaluation_is_deterministic_and_training_ends(layer: str) -> None:
    net = make("siren", layer, ws.Invariant(3, dropout=0.5))
    networks = population("siren")
    assert torch.equal(net(networks), net(networks))
    net.train()
    assert not torch.equal(net(networks), net(networks))


@EVERY_LAYER
@pytest.mark.parametrize("values", [ws.Scalars(), ws.Fourier(4), ws.Logarithms()])
def test_single_precision(layer: str, values: Any) -> None:
    net = make("siren", layer, ws.Invariant(3), values=values).float()
    networks = population("siren", dtype=torch.float32)
    moved = symmetry("siren").act(symmetry("siren").random(generator(1), net.parts, (3,)), networks)
    made = net(networks)
    assert made.dtype == torch.float32
    assert far(net(moved), made) < 1e-3


def test_parallel_changes_move_as_one_does() -> None:
    net = make("siren", "message_passing", ws.Equivariant(changes=3))
    networks = population("siren")
    made = net(networks)
    assert all(made[name].shape == (3, 3, *t.shape[1:]) for name, t in networks.items())
    element = symmetry("siren").random(generator(1), None, (3,))
    linear = rg.Symmetry(tuple(g.without("shift") for g in symmetry("siren").groups), symmetry("siren").shapes)
    after = net(symmetry("siren").act(element, networks))
    for k in range(3):
        wanted = linear.act(element, {name: tensor[:, k] for name, tensor in made.items()})
        assert far({name: tensor[:, k] for name, tensor in after.items()}, wanted) < EXACT


def test_one_net_reads_several_architectures() -> None:
    names = ("mlp_relu", "siren", "vit")
    net = ws.Metanet(tuple(map(symmetry, names)), head=ws.Invariant(2), width=8, depth=2, generator=generator(0))
    net = net.double().eval()
    for name in names:
        net.standardize(population(name))
    for name in names:
        networks = population(name)
        moved = symmetry(name).act(symmetry(name).random(generator(1), net.parts, (3,)), networks)
        assert net(networks).shape == (3, 2)
        assert far(net(moved), net(networks)) < EXACT


def test_architectures_with_the_same_tensors_are_told_apart_by_their_symmetry() -> None:
    shapes = MLP((3, 6, 5, 2)).state_dict()
    chance = generator(1)
    params = {name: torch.randn(4, *t.shape, generator=chance, dtype=torch.float64) for name, t in shapes.items()}
    found = [rg.discover(MLP((3, 6, 5, 2), one), (torch.randn(2, 3),)) for one in (torch.relu, torch.tanh)]
    net = ws.Metanet(found, layer=ws.ScaleGMN(is_scaled=True), head=ws.Invariant(2), width=8, depth=2).double().eval()
    for one in found:
        net.standardize(params, one)
    for own, other in (found, found[::-1]):
        element = own.random(generator(2), batch=(4,))
        made = net(params, symmetry=own)
        assert far(net(own.act(element, params), symmetry=own), made) < 1e-8
        assert far(net(own.act(element, params), symmetry=other), net(params, symmetry=other)) > 1e-4
    assert far(net(params, symmetry=found[0]), net(params, symmetry=found[1])) > 1e-4
    assert net.reads(params, found[1])
    sigmoid = rg.discover(MLP((3, 6, 5, 2), torch.sigmoid), (torch.randn(2, 3),))
    assert not net.reads(params, sigmoid)
    with pytest.raises(ValueError, match="2 architectures of this net have the tensors of these networks"):
        net(params)
    with pytest.raises(ValueError, match="but another symmetry, because the functions between layers differ"):
        net(params, symmetry=sigmoid)


def mlp(*widths: int) -> tuple[rg.Symmetry, Params]:
    """Return the symmetry of an MLP, and random networks."""
    module = MLP(widths)
    networks = {
        name: torch.randn(3, *t.shape, generator=generator(4), dtype=torch.float64)
        for name, t in module.state_dict().items()
    }
    return rg.discover(module, (torch.randn(2, widths[0]),)), networks


def test_numbers_of_units_may_differ() -> None:
    narrow, networks = mlp(4, 6, 6, 3)
    wide, others = mlp(4, 10, 8, 3)
    net = ws.Metanet(narrow, head=ws.Invariant(2), width=8, depth=2, generator=generator(0)).double().eval()
    with pytest.raises(ValueError, match=r"net\.adapt"):
        net(others)
    net.adapt(wide)
    assert net(others).shape == net(networks).shape
    moved = wide.act(wide.random(generator(1), net.parts, (3,)), others)
    assert far(net(moved), net(others)) < EXACT
    with pytest.raises(ValueError, match="no parameters for networks of that symmetry"):
        net.adapt(mlp(5, 6, 6, 3)[0])


def test_wrong_inputs_get_a_sentence() -> None:
    net = make("mlp_relu", "message_passing", ws.Invariant(2))
    networks = population("mlp_relu")
    with pytest.raises(ValueError, match="the networks lack"):
        net({"other": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match="stack the networks"):
        net(select(networks, 0))
    with pytest.raises(ValueError, match="at least one network"):
        net(select(networks, slice(0, 0)))
    with pytest.raises(ValueError, match=r"is torch\.int8, but weights are read"):
        net({name: tensor.to(torch.int8) for name, tensor in networks.items()})
    with pytest.raises(ValueError, match="NaN or Inf"):
        net.standardize({name: tensor * float("nan") for name, tensor in networks.items()})
    with pytest.raises(ValueError, match=r"this decoder takes \[models, 3\]"):
        ws.Decoder(symmetry("mlp_relu"), inputs=3)(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="must include permutations"):
        ws.Metanet(symmetry("mlp_relu"), head=ws.Invariant(2), parts=("sign",))
    with pytest.raises(ValueError, match="outputs"):
        ws.Invariant(0)


@EVERY_LAYER
@pytest.mark.parametrize("head", list(HEADS))
def test_a_net_is_the_same_after_it_was_saved(tmp_path: Path, layer: str, head: str) -> None:
    net = make("vit", layer, HEADS[head](), values=ws.Fourier(2), depth=1, reads_moments=True).float()
    path = net.save(tmp_path / "net.safetensors", about={"target": "accuracy"})
    again, about = ws.load_net(path)
    networks = population("vit", dtype=torch.float32)
    assert about == {"target": "accuracy"}
    assert again.settings == net.settings
    assert far(again(networks), net(networks)) == 0.0


def test_files_that_are_no_nets_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no net"):
        ws.load_net(tmp_path / "net.safetensors")
    other = save({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="no net over networks"):
        ws.load_net(other)


@pytest.mark.parametrize("case", ["siren", "resnet8_batch_A", "tied_autoencoder"])
def test_decoders_make_networks_that_run(case: str) -> None:
    networks = population(case)
    decoder = ws.Decoder(symmetry(case), inputs=4, widths=(8,), generator=generator(0)).double()
    decoder.standardize(networks)
    made = decoder(torch.randn(5, 4, dtype=torch.float64, generator=generator(1)), like=select(networks, 0))
    assert {name: t.shape[1:] for name, t in made.items()} == {name: t.shape[1:] for name, t in networks.items()}
    assert all(len(tensor) == 5 for tensor in made.values())
    net = make(case, "message_passing", ws.Invariant(2))
    loss = net(made).square().sum()
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.abs().max() > 0) for p in decoder.parameters())


@pytest.mark.parametrize("width", [5, 8])
@pytest.mark.parametrize("activation", [torch.relu, torch.tanh])
def test_a_decoder_grows_to_wider_networks_of_the_same_function(
    width: int, activation: Callable[[Tensor], Tensor]
) -> None:
    modules = [MLP((2, n, n, 3), activation).double() for n in (4, width)]
    inputs = torch.randn(7, 2, dtype=torch.float64, generator=generator(2))
    narrow, wide = (rg.discover(m, (inputs,), verify=False).bind(m.state_dict()) for m in modules)
    settings = ws.TemplateDecoder(width=8, depth=2, widening=True)
    decoder = settings.build(narrow, 4, generator(0)).double()
    values = {
        name: torch.randn(6, *t.shape, dtype=torch.float64, generator=generator(k))
        for k, (name, t) in enumerate(modules[0].state_dict().items())
    }
    decoder.standardize(values)
    decoder.begin_at(select(values, 0))
    codes = torch.randn(5, 4, dtype=torch.float64, generator=generator(1))
    outputs = [
        torch.func.vmap(lambda one, module=module: torch.func.functional_call(module, one, (inputs,)))(
            made(codes)
        ).detach()
        for module, made in zip(modules, (decoder, decoder.widened(wide)), strict=True)
    ]
    assert far(*outputs) < 1e-10
    assert float(outputs[0].std(0).max()) > 1e-3
    with pytest.raises(ValueError, match="has 4 units, and 3 in the other networks"):
        decoder.widened(rg.discover(MLP((2, 3, 3, 3)), (torch.randn(2, 2),), verify=False))
    plain = ws.TemplateDecoder(width=8, depth=1).build(narrow, 4)
    with pytest.raises(ValueError, match=r"TemplateDecoder\(widening=True\)"):
        plain.widened(wide)
