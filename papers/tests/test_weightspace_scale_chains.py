"""Published ScaleGMN, compared with outputs of the published code and a plain reference, and the faults of that
code.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regauge as rg
from regauge import weightspace as ws
from regauge.core.params import Params
from regauge.nets.mlp import MLP
from regauge_papers import chains

PUBLISHED = json.loads((Path(__file__).parent / "published_scale_gmn.json").read_text())
"""The output of `benchmarks/scale_gmn.py --reference`: settings, and outputs of the published code in double
precision."""
WIDTHS = (3, 6, 5, 7, 2)


def symmetry(widths: tuple[int, ...] = WIDTHS, activation: Any = torch.tanh) -> rg.Symmetry:
    return rg.discover(MLP(widths, activation), (torch.randn(2, widths[0]),), verify=False)


def networks(widths: tuple[int, ...] = WIDTHS) -> Params:
    """Return networks by the formula of the benchmark."""
    tensors: Params = {}
    for name, tensor in MLP(widths).state_dict().items():
        steps = torch.arange(3 * tensor.numel(), dtype=torch.float64) + len(tensors)
        tensors[name] = (2.1 * steps).sin().reshape(3, *tensor.shape)
    return tensors


def fill(net: nn.Module) -> None:
    """Set parameters by the formula of the benchmark."""
    with torch.no_grad():
        for k, (_, parameter) in enumerate(sorted(net.named_parameters())):
            steps = torch.arange(parameter.numel(), dtype=torch.float64)
            size = 1.5 / max(1, parameter.shape[-1]) ** 0.5 if parameter.ndim > 1 else 0.5
            parameter.copy_(size * (1.7 * steps + k).sin().reshape(parameter.shape))


def make(found: rg.Symmetry, head: Any = None, **settings: Any) -> chains.ChainScaleGMN:
    config = chains.ChainScaleConfig(**{"hidden": 5, "layers": 3, **settings})
    net = chains.ChainScaleGMN(found, config, head=ws.Invariant(3) if head is None else head).double().eval()
    fill(net)
    return net


def flat(made: Any) -> Tensor:
    return torch.cat([x.flatten(1) for x in made.values()], 1) if isinstance(made, dict) else made


@pytest.mark.parametrize(
    "row", PUBLISHED, ids=lambda row: f"{row['widths']}-{row['is_scaled']}-{len(row['outputs'][0])}"
)
def test_equals_the_published_code(row: dict[str, Any]) -> None:
    found = symmetry(tuple(row["widths"]), torch.relu if row["is_scaled"] else torch.tanh)
    count, params = len(row["outputs"][0]), networks(tuple(row["widths"]))
    is_changed = count == sum(tensor[0].numel() for tensor in params.values())
    net = make(found, ws.Equivariant() if is_changed else ws.Invariant(count), **row["config"])
    wanted = torch.tensor(row["outputs"], dtype=torch.float64)
    torch.testing.assert_close(flat(net(params)).detach(), wanted, rtol=1e-9, atol=1e-12)


def edge_by_edge(net: chains.ChainScaleGMN, params: Params, model: int) -> Tensor:
    """Compute the forward net on one network, one weight at a time: equations 8 to 14 for hidden units."""
    tensors = list(params.values())
    weights, biases = [w[model] for w in tensors[::2]], [b[model] for b in tensors[1::2]]
    count = len(weights)
    one, unit = net.weight.weight[:, 0], net.unit.weight[:, 0]
    kinds = net.unit_places
    inputs, outputs = weights[0].shape[1], weights[-1].shape[0]
    states = [[unit + kinds[i] for i in range(inputs)]]
    for layer in range(count - 1):
        states.append([b * unit * kinds[inputs + layer] for b in biases[layer]])
    states.append([b * unit + kinds[inputs + count - 1 + k] for k, b in enumerate(biases[-1])])
    edges = [[[w * one for w in row] for row in weight] for weight in weights]  # [layer][target][source]

    def perceptron(module: Any, x: Tensor) -> Tensor:
        z = module.first.weight @ x + module.first.bias
        z = (z - z.mean()) / (z.var(unbiased=False) + module.norm.eps).sqrt() * module.norm.weight + module.norm.bias
        made: Tensor = module.last.weight @ (z / (1 + (-z).exp())) + module.last.bias
        return made

    def rest(module: Any, x: Tensor) -> Tensor:
        if module.rest == "symmetrized":
            return perceptron(module.rho, x) + perceptron(module.rho, -x)
        return x.abs() if module.rest == "absolute" else x / x.square().sum().sqrt()

    def product(module: Any, x: Tensor, place: int) -> Tensor:
        if 0 < place < count:
            return (module.linear.weight @ x) * perceptron(module.gate, rest(module.remainder, x))
        gate = perceptron(module.ends["both"], x)
        return (module.linear.weight @ x) * gate if module.is_gated else gate

    for number, layer in enumerate(net.layers):
        made = [list(row) for row in states]
        for place in layer.needs.places:
            for j, x in enumerate(states[place]):
                heard = torch.zeros_like(x)
                for i in range(len(states[place - 1])) if place else ():
                    message = layer.forward_message
                    signal = (message.weight.weight @ edges[place - 1][j][i]) * (
                        message.source.weight @ states[place - 1][i]
                    )
                    heard = heard + product(message.product, signal, place)
                made[place][j] = net.skips[number].weight @ x + product(layer.update, torch.cat([x, heard]), place)
        for k in layer.needs.weights:
            update = layer.forward_weights
            for j, row in enumerate(edges[k]):
                for i, e in enumerate(row):
                    both = torch.cat([rest(update.remainder, x) for x in (states[k][i], states[k + 1][j])])
                    edges[k][j][i] = (update.linear.weight @ e) * perceptron(update.gate, both)
        states = made
    return perceptron(net.classify, torch.cat(states[-1][:outputs]))


@pytest.mark.parametrize("ends", ["gated", "perceptron"])
@pytest.mark.parametrize(("activation", "signs"), [("tanh", "symmetrized"), ("tanh", "absolute"), ("relu", "absolute")])
def test_equals_the_plain_reference(activation: str, signs: Any, ends: Any) -> None:
    net = make(symmetry(activation=getattr(torch, activation)), signs=signs, ends=ends, are_weights_placed=False)
    with torch.no_grad():
        wanted = edge_by_edge(net, networks(), 1)
    torch.testing.assert_close(net(networks())[1].detach(), wanted, rtol=1e-9, atol=1e-12)


SETTINGS: tuple[dict[str, Any], ...] = (
    {"are_classes_mixed": False},
    {"is_bidirectional": True, "are_classes_mixed": False, "are_messages_placed": True, "reads": "everything"},
    {"is_bidirectional": True, "are_classes_mixed": False, "is_backward_inverted": True, "ends": "perceptron"},
    {"is_bidirectional": True, "are_weights_placed": False, "are_ends_shared": False, "is_skipping": False},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("activation", [torch.tanh, torch.relu])
@pytest.mark.parametrize("head", [ws.Invariant(3), ws.Equivariant()], ids=["numbers", "changes"])
def test_what_is_respected_is_said(activation: Any, settings: dict[str, Any], head: Any) -> None:
    found, params = symmetry(activation=activation), networks()
    net = make(found, head, **settings)
    whole = ("permutation", "sign" if activation is torch.tanh else "scale")
    is_whole = net.has_backward <= net.config.is_backward_inverted
    assert net.parts == (whole if is_whole else whole[:1])
    element = found.random(torch.Generator().manual_seed(0), whole, (3,))
    before = net(params)
    if isinstance(head, ws.Equivariant):
        before = found.act(element, before)
    after = net(found.act(element, params))
    error = float((flat(after) - flat(before)).detach().abs().max() / flat(before).detach().abs().max())
    assert (error < 1e-9) is is_whole


def test_the_fault_of_mixed_classes_breaks_permutations() -> None:
    found, params = symmetry(), networks()
    element = found.random(torch.Generator().manual_seed(0), ("permutation",), (3,))
    errors = {}
    for is_mixed in (True, False):
        net = make(found, are_classes_mixed=is_mixed)
        assert ("permutation" in net.parts) is not is_mixed
        errors[is_mixed] = float((net(found.act(element, params)) - net(params)).detach().abs().max())
    assert errors[True] > 1e-6 > 1e-12 > errors[False]


def test_a_weight_of_zero_has_no_reciprocal_and_no_infinity() -> None:
    net, params = make(symmetry(activation=torch.relu), is_bidirectional=True, is_backward_inverted=True), networks()
    name = list(params)[2]
    params[name] = params[name].masked_fill(torch.arange(params[name].shape[-1]) < 2, 0.0).requires_grad_()
    made = net(params)
    made.sum().backward()
    assert bool(made.isfinite().all())
    gradient = params[name].grad
    assert gradient is not None
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("settings", [{}, *SETTINGS], ids=str)
@pytest.mark.parametrize("head", [ws.Invariant(3), ws.Equivariant()], ids=["numbers", "changes"])
def test_nothing_is_computed_in_vain(settings: dict[str, Any], head: Any) -> None:
    net = make(symmetry(), head, **settings).train()
    made = flat(net(networks()))
    (made * torch.arange(1, 1 + made.numel()).reshape(made.shape).double().sin()).sum().backward()
    without = [name for name, p in net.named_parameters() if p.grad is None or not bool(p.grad.any())]
    assert not without


def test_groups_of_networks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net, params = make(symmetry()), networks()
    whole = net(params)
    monkeypatch.setattr("regauge_papers.chains.scale_net.ENTRIES", 1)
    torch.testing.assert_close(net(params), whole, rtol=1e-12, atol=1e-14)


def test_dropout_is_off_in_evaluation_and_differs_between_networks() -> None:
    net, params = make(symmetry(), dropout=0.5), networks()
    assert torch.equal(net(params), net(params))
    same = {name: tensor[:1].expand(3, *tensor.shape[1:]) for name, tensor in params.items()}
    made = net.train()(same)
    assert not torch.equal(made[0], made[1])


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="at least three linear layers"):
        chains.ChainScaleGMN(symmetry((4, 6, 3)), chains.ChainScaleConfig(), head=ws.Invariant(2))
    with pytest.raises(ValueError, match="all have signs, or all have positive scales"):
        chains.ChainScaleGMN(symmetry(activation=torch.sigmoid), chains.ChainScaleConfig(), head=ws.Invariant(2))
    with pytest.raises(ValueError, match="no head of the published code"):
        chains.ChainScaleGMN(symmetry(), chains.ChainScaleConfig(), head=ws.Equivariant(changes=2))
    with pytest.raises(ValueError, match="sizes are at least 1"):
        chains.ChainScaleConfig(layers=0)
    with pytest.raises(ValueError, match="'gated' or 'perceptron'"):
        chains.ChainScaleConfig(ends="none")  # type: ignore[arg-type]
