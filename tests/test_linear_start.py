"""The linear start of predictors: laws of the reader of statistics, of its fit, and of its share in the output."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from predicted_networks import CONFIG, NETWORKS, generator, sirens
from torch import Tensor
from weightspace_cases import NAMES, population, symmetry

import regauge as rg
from regauge import learn
from regauge import weightspace as ws
from regauge.core.element import PARTS
from regauge.core.params import Params, select
from regauge.learn.linear_start import PENALTIES, _path, fit_linear
from regauge.nets.mlp import mlp
from regauge.nets.resnet import resnet20
from regauge.nets.siren import Siren
from regauge.weightspace.linear_reader import FURTHEST, statistics_of


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def linear_net(case: str) -> ws.Metanet:
    """Return a net whose output is only its linear reader, with random weights."""
    net = ws.Metanet(
        symmetry(case), head=ws.Invariant(3), width=8, depth=1, is_linear=True, generator=generator(0)
    ).double()
    reader = net.linear_reader(0)
    reader.standardize(net.statistics(population(case, 8, seed=5)))
    reader.weight.normal_(generator=generator(1))
    net.linear_share.fill_(1.0)
    return net


def slopes(net: ws.Metanet, networks: Params, answer: Callable[[Params], Tensor]) -> dict[str, float]:
    """Return the changes of the outputs if the columns of each tensor grow by different shares."""
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in networks.items()}
    outputs = answer(leaves)
    mixed = (
        outputs * torch.randn(outputs.shape, generator=generator(2), dtype=torch.float64) / outputs.detach().abs().max()
    )
    names = [n for n, leaf in leaves.items() if leaf.requires_grad and leaf.shape[-1] > 1]
    found = torch.autograd.grad(mixed.sum(), [leaves[n] for n in names], materialize_grads=True, allow_unused=True)
    own = {
        name: float((slope * networks[name] * torch.linspace(-0.5, 0.5, slope.shape[-1], dtype=slope.dtype)).sum())
        for name, slope in zip(names, found, strict=True)
    }
    tied = {name: next((group for group in net.layout.symmetry.tied if name in group), (name,)) for name in own}
    return {name: abs(sum(own[one] for one in tied[name])) for name in net.layout.parameters if name in own}


@pytest.mark.parametrize("case", NAMES)
def test_a_linear_reader_respects_the_symmetry_and_sees_every_tensor(case: str) -> None:
    net, networks = linear_net(case), population(case)
    with torch.no_grad():
        found = net(networks)
        moved = symmetry(case).act(symmetry(case).random(generator(1), net.parts, (3,)), networks)
        assert far(net(moved), found) < 1e-8
        assert torch.equal(found, net.read_linear(networks))
    changes, weights = slopes(net, networks, net), slopes(net, networks, net.read_weights)
    seen = [name for name, slope in weights.items() if slope > 1e-9]  # Of what has no influence, nothing is read.
    for name in (name for name in seen if changes[name] < 1e-6):  # Of gains that are folded there are no slopes.
        share = torch.linspace(0.5, 1.5, networks[name].shape[-1], dtype=torch.float64)
        with torch.no_grad():
            assert far(net(networks | {name: networks[name] * share}), found) > 1e-6, name
    assert len(seen) > 1


WIDTHS = {
    "mlp": lambda wide: (mlp(4, 10, 8, 3) if wide else mlp(4, 6, 6, 3), torch.zeros(2, 4)),
    "siren": lambda wide: (Siren(2, 12 if wide else 8, 1, depth=3), torch.zeros(2, 2)),
    "resnet": lambda wide: (resnet20(shortcut="B", blocks=1, width=2 if wide else 1), torch.zeros(2, 3, 32, 32)),
}


@pytest.mark.parametrize("family", WIDTHS)
@torch.no_grad()
def test_other_widths_are_read_by_the_same_weights(family: str) -> None:
    found = []
    for wide in (False, True):
        module, inputs = WIDTHS[family](wide)
        own = rg.discover(module.eval(), (inputs,), verify=False)
        noise = {n: torch.rand(3, *t.shape, generator=generator(3)) for n, t in module.state_dict().items()}
        found.append((own, {n: t.double() + 0.1 for n, t in noise.items() if not n.endswith("num_batches_tracked")}))
    (first, networks), (second, others) = found
    net = ws.Metanet(first, head=ws.Invariant(2), width=8, depth=1, is_linear=True, generator=generator(0)).double()
    net.linear_reader(0).standardize(net.statistics(networks))
    net.linear_reader(0).weight.fill_(1.0)
    net.adapt(second)
    answers = net.read_linear(others)
    moved = second.act(second.random(generator(2), net.parts, (3,)), others)
    assert far(net.read_linear(moved), answers) < 1e-8
    assert answers.shape == (3, 2)


def test_statistics_are_those_of_numpy_and_finite_for_every_size() -> None:
    values = torch.randn(4, 3, 5, generator=generator(0), dtype=torch.float64)
    flat = values.flatten(1).numpy()
    wanted = np.stack([flat.mean(1), flat.std(1), *np.quantile(flat, (0, 0.25, 0.5, 0.75, 1), axis=1)], 1)
    np.testing.assert_allclose(statistics_of({"one": values}).numpy(), wanted, rtol=1e-12)
    sizes = torch.tensor([1e-38, 1.0, 1e38, 0.0]).reshape(-1, 1, 1)
    huge = statistics_of({"one": values.float() * sizes, "none": torch.zeros(4, 0)})
    assert bool(huge.isfinite().all())
    assert huge.shape == (4, 14)


def squared(outputs: Tensor, encoded: Tensor) -> Tensor:
    return (outputs.squeeze(-1) - encoded).square().mean() / 2


@pytest.mark.parametrize("count", [20, 200])
def test_of_squared_errors_the_fit_is_ridge_regression(count: int) -> None:
    features = torch.randn(count, 40, generator=generator(0), dtype=torch.float64) * torch.logspace(-2, 0, 40)
    targets = features @ torch.randn(40, generator=generator(1)).double() + 3
    middle, own = features.mean(0), features - features.mean(0)
    for penalty, (weight, bias) in zip(PENALTIES, _path(features, targets, squared, 1), strict=True):
        gram = own.T @ own / count + penalty * torch.eye(40).double()
        wanted = torch.linalg.solve(gram, own.T @ (targets - targets.mean()) / count)
        assert far(weight[0], wanted) < 1e-5
        assert float(bias[0]) == pytest.approx(float(targets.mean() - wanted @ middle), rel=1e-6)


def test_cross_validation_chooses_the_penalty_and_nothing_where_nothing_is_known() -> None:
    features = torch.randn(200, 100, generator=generator(0), dtype=torch.float64)
    noise = torch.randn(200, generator=generator(2), dtype=torch.float64)
    weight, bias = fit_linear(features, noise - noise.mean(), squared, 1)
    assert float((features @ weight.T + bias).std()) < 0.3
    clear = features[:, :3].sum(1)
    weight, bias = fit_linear(features, clear, squared, 1)
    assert far((features @ weight.T + bias).squeeze(), clear) < 1e-3
    assert not fit_linear(features[:1], clear[:1], squared, 1)[0].any()


@cache
def known_target() -> Tensor:
    """Return a target that is linear in the statistics of layers."""
    weights = sirens()[2]["layers.1.weight"].flatten(1)
    return weights.abs().mean(1) + weights.std(1)


TARGETS = {
    "numbers": lambda: known_target(),
    "fractions": lambda: known_target().sub(1.0).sigmoid(),
    "classes": lambda: (known_target() > known_target().median()).long(),
    "outputs": lambda: sirens()[3][:, 5],
    "noise": lambda: torch.rand(NETWORKS, generator=generator(5)),
}


@pytest.mark.parametrize("lr", [1e-5, 1e-2])
@pytest.mark.parametrize("name", TARGETS)
def test_no_predictor_is_worse_than_its_linear_start_on_kept_networks(name: str, lr: float) -> None:
    _, found, networks, _ = sirens()
    kind = name if name in ("fractions", "classes") else "numbers"
    targets = TARGETS[name]()
    parts = learn.populations.split_networks(learn.populations.Collection(networks), np.arange(NETWORKS), None)
    config = replace(CONFIG, epochs=3, lr=lr, kind=kind, statistics=False)
    made = learn.fit_predictor(networks, targets, found, config, generator=generator(), split=parts)
    kept = select(networks, torch.from_numpy(parts["validation"]))
    encoded = made.target.encode(targets.numpy()[parts["validation"]])
    with torch.no_grad():
        whole, start = made.net(kept), made.net.read_linear(kept)
    orders = []
    for outputs in (whole, start):
        error = (outputs.argmax(-1) != encoded).double().mean() if kind == "classes" else torch.zeros(())
        orders.append((round(float(error), 6), float(made.target.loss(outputs, encoded))))
    assert orders[0][0] <= orders[1][0]
    assert orders[0][0] < orders[1][0] or orders[0][1] <= orders[1][1] + 1e-5
    if name == "outputs" and lr > 1e-3:
        assert orders[0][1] < 0.8 * orders[1][1]  # What no statistics know the net adds.
    score = next(iter(made.about["scores"]["net"].values()))
    if name in ("numbers", "fractions", "classes"):
        assert score > 0.85
        alone = learn.fit_predictor(
            networks, targets, found, replace(config, linear=False, lr=1e-5), generator=generator(), split=parts
        )
        assert next(iter(alone.about["scores"]["net"].values())) < score


def test_a_saved_predictor_has_its_start_and_widening_leaves_it_out(tmp_path: Path) -> None:
    _, found, networks, _ = sirens()
    config = replace(CONFIG, epochs=1, statistics=False)
    made = learn.fit_predictor(networks, known_target(), found, config, generator=generator())
    assert float(made.net.linear_share) > 0
    again = learn.load_predictor(made.save(tmp_path / "p.safetensors"))
    np.testing.assert_array_equal(again.predict(networks), made.predict(networks))
    wide = learn.fit_predictor(networks, known_target(), found, replace(config, widening=True), generator=generator())
    assert not wide.net.settings.is_linear
    with pytest.raises(ValueError, match="no linear reader"):
        wide.net.read_linear(networks)
    with pytest.raises(ValueError, match="needs an `Invariant` head"):
        ws.Metanet(found, head=ws.Equivariant(), is_linear=True)
    with pytest.raises(ValueError, match="needs an `Invariant` head"):
        ws.Metanet(found, head=ws.Invariant(1), is_linear=True, readers=ws.find_readers(found))


@torch.no_grad()
def test_answers_to_networks_that_are_far_away_are_bounded() -> None:
    net = linear_net("mlp_relu")
    networks = population("mlp_relu")
    large = {name: 1e6 * tensor for name, tensor in networks.items()}
    bound = FURTHEST * net.linear_reader(0).weight.abs().sum(1)
    assert bool((net(large).abs() <= bound).all())
    assert far(net(large), net(networks)) > 0.1
    assert set(net.parts) <= {*PARTS, "translation"}
