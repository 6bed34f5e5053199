"""Laws of flows over weights: points and paths, priors, samplers, densities, guidance, files."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pretend_device import PretendDevice
from torch import Tensor, nn

import regauge as rg
from regauge import flow
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.writing import save
from regauge.core.element import Value
from regauge.core.params import Params, select
from regauge.core.symmetry import Symmetry
from regauge.flow.alignment import align_points
from regauge.flow.choosing import ChosenNetworks
from regauge.flow.components import find_classes
from regauge.flow.design import build_velocity
from regauge.flow.fitting import FlowFitting
from regauge.flow.flow_config import Design
from regauge.flow.likelihood import integrate_density
from regauge.flow.moments import Moments, find_covariance
from regauge.flow.nets import find_tokens
from regauge.flow.sampling import Guidance, diffuse, integrate
from regauge.flow.space import LOG_NORM, Representation, Space
from regauge.flow.velocity import Velocity
from regauge.nets.mlp import mlp
from regauge.weightspace import LAYERS, MessagePassing, Propagation


class Normed(nn.Module):
    """A convolution, batch normalization and a linear layer, which together have buffers and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x)).relu().flatten(1))


def waves() -> nn.Module:
    class Tanh(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).tanh())

    return Tanh()


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(4, 6, 5, 3), (4,)),
    "tanh": (waves, (3,)),
    "normed": (Normed, (2, 4, 4)),
}


def networks(name: str, count: int = 12) -> tuple[nn.Module, Symmetry, Params, Tensor]:
    """Return random networks of an architecture in float64, its symmetry, and inputs."""
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module = make().double().eval()
    inputs = torch.randn(7, *shape, dtype=torch.float64)
    symmetry = rg.discover(module, (inputs,))
    made = []
    for k in range(count):
        chance = torch.Generator().manual_seed(k)
        one = {}
        for key, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                drawn = torch.randn(tensor.shape, generator=chance, dtype=torch.float64)
                one[key] = drawn.abs() + 0.5 if key.endswith("running_var") else drawn
            else:
                one[key] = tensor
        made.append(one)
    return module, symmetry, {key: torch.stack([one[key] for one in made]) for key in made[0]}, inputs


def outputs(module: nn.Module, params: Params, inputs: Tensor) -> Tensor:
    count = len(next(iter(params.values())))
    return torch.stack([torch.func.functional_call(module, select(params, k), (inputs,)) for k in range(count)])


REPRESENTATIONS = [
    ("mlp", Representation()),
    ("mlp", Representation("sphere")),
    ("mlp", Representation("flat")),
    ("mlp", Representation("keep")),
    ("mlp", Representation("sphere", head="layers.2.weight", head_form="direction")),
    ("tanh", Representation()),
    ("normed", Representation()),
    ("normed", Representation("sphere")),
    ("normed", Representation("keep")),
]


@pytest.mark.parametrize(("name", "how"), REPRESENTATIONS, ids=str)
def test_points_are_networks_of_the_same_function(name: str, how: Representation) -> None:
    module, symmetry, population, inputs = networks(name)
    space = Space.of(population, symmetry, how)
    x = space.enter(population, torch.float64)
    again = space.leave(x)
    assert again.keys() == population.keys()
    assert torch.allclose(outputs(module, again, inputs), outputs(module, population, inputs), atol=1e-10)
    assert torch.allclose(space.enter(again, torch.float64), x, atol=1e-12)
    assert (space.project(x) - x).abs().max() < 1e-12
    if how.scales != "keep":  # One point for all networks that scales make of one.
        moved = symmetry.act(symmetry.random(torch.Generator().manual_seed(1), ("scale",), batch=(12,)), population)
        assert torch.allclose(space.enter(moved, torch.float64), x, atol=1e-9)


def test_the_unit_head_of_the_thesis_keeps_the_order_of_outputs_alone() -> None:
    module, symmetry, population, inputs = networks("mlp")
    how = Representation(head="layers.2.weight", head_form="unit", head_bias="layers.2.bias")
    space = Space.of(population, symmetry, how)
    made = space.leave(space.enter(population, torch.float64))
    before, after = outputs(module, population, inputs), outputs(module, made, inputs)
    assert not torch.allclose(before, after)
    assert torch.equal(before.argsort(-1), after.argsort(-1))


@pytest.mark.parametrize(("name", "how"), REPRESENTATIONS, ids=str)
def test_paths_are_geodesics_that_end_where_they_should(name: str, how: Representation) -> None:
    _, symmetry, population, _ = networks(name)
    space = Space.of(population, symmetry, how)
    x = space.enter(population, torch.float64)
    x0 = Design().prior.build(space, Moments.of([x], space)).sample(12, torch.Generator().manual_seed(0), torch.float64)
    t = torch.linspace(0, 0.95, 12, dtype=torch.float64)
    at, rate = space.path(x0, x, t)
    assert torch.allclose(space.tangent(at, rate), rate, atol=1e-10)
    assert torch.allclose(space.exp(at, (1 - t).unsqueeze(1) * rate), x, atol=1e-10)
    assert torch.allclose(space.log(at, x) / (1 - t).unsqueeze(1), rate, atol=1e-8)
    h = 1e-6
    ahead, behind = (space.path(x0, x, t + step)[0] for step in (h, -h))
    assert torch.allclose((ahead - behind) / (2 * h), rate, atol=1e-7)
    assert torch.allclose(space.distance(x0, x), torch.linalg.vector_norm(rate, dim=1), atol=1e-9)


def test_a_unit_without_incoming_weights_has_no_place_on_a_sphere() -> None:
    _, symmetry, population, _ = networks("mlp")
    space = Space.of(population, symmetry, Representation("sphere"))
    population["layers.0.weight"][3, 2] = 0
    with pytest.raises(ValueError, match=r"network 3 has a unit .* without incoming weights"):
        space.enter(population)


@pytest.mark.parametrize("name", MODULES)
def test_statistics_know_no_order_of_units(name: str) -> None:
    _, symmetry, population, _ = networks(name)
    space = Space.of(population, symmetry)
    element = symmetry.random(torch.Generator().manual_seed(0), ("permutation", "sign"))
    moved = symmetry.act(element, population)
    first, second = (Moments.of([space.enter(one, torch.float64)], space) for one in (population, moved))
    for field in ("mean", "deviation", "root"):
        assert torch.allclose(getattr(first, field), getattr(second, field), atol=1e-9)
    whole = space.arrange(first.deviation.unsqueeze(0))
    turned = symmetry.act(element, {n: t[0].abs() for n, t in whole.items()} | _missing(population, whole))
    assert all(torch.allclose(turned[n].abs(), whole[n][0], atol=1e-12) for n in whole)


def _missing(population: Params, known: Params) -> Params:
    return {name: tensor[0] for name, tensor in population.items() if name not in known}


def test_units_of_one_group_on_both_axes_have_two_classes() -> None:
    symmetry = Symmetry.from_axes({"within": ("units", "units"), "bias": ("units",)})
    population = {"within": torch.randn(2, 4, 4), "bias": torch.randn(2, 4)}
    space = Space.of(population, symmetry, Representation("keep"))
    classes = space.arrange(space.exchanged.unsqueeze(0).float())["within"][0]
    assert len(classes.unique()) == 2
    assert (classes.diagonal() == classes[0, 0]).all()


@pytest.mark.parametrize("how", [Representation(), Representation("keep")], ids=str)
def test_a_prior_has_the_density_that_it_is_drawn_from(how: Representation) -> None:
    """By Stein's identity, div f + f . gradient of the log density has mean zero over samples, for tangent fields f."""
    _, known, population, _ = networks("mlp")
    space = Space.of(population, known, how)
    x = space.enter(population, torch.float64)
    prior = flow.MatchedGaussian().build(space, Moments.of([x], space))
    drawn = prior.sample(4000, torch.Generator().manual_seed(0), torch.float64)
    again = prior.log_density(drawn)
    at = drawn.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(prior.log_density(space.project(at)).sum(), at)
    score = space.tangent(drawn, gradient)
    flat = score[:, space.flat_start :]
    assert again.isfinite().all()
    assert (flat.mean(0) * prior.deviation[space.flat_start :]).abs().max() < 0.1
    for one in space.spheres:
        y, s = space.on(one, drawn), space.on(one, score)
        a = torch.randn(one.dim, one.dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        value = y @ a.T
        along = (value * y).sum(-1, keepdim=True)
        tangent = value - along * y
        divergence = a.trace() - one.dim * along[..., 0]
        total = divergence + (tangent * s).sum(-1)
        assert total.mean().abs() < 6 * total.std() / math.sqrt(total.numel()) + 1e-3


def gaussians(mean: float, deviation: float) -> tuple[Space, Moments, flow.PlainGaussian]:
    """Return the space of two values, with normal distributions at both ends."""
    symmetry = Symmetry.from_axes({"x": ("units",), "y": ("units",)}).bind({"x": torch.zeros(1), "y": torch.zeros(1)})
    space = Space.of({"x": torch.zeros(1, 1), "y": torch.zeros(1, 1)}, symmetry, Representation("keep"))
    ones = torch.ones(space.dim, dtype=torch.float64)
    return space, Moments(mean * ones, deviation * ones, ones), flow.PlainGaussian(0.7)


class Nothing(nn.Module):
    """A net and a clock with outputs of zero."""

    def forward(self, z: Tensor, told: Tensor | None) -> Tensor:
        return torch.zeros_like(z)


def exact(predicts: str, mean: float = 1.0, deviation: float = 0.3) -> tuple[Space, Velocity, flow.PlainGaussian]:
    """Return only the closed form between two normal distributions."""
    space, moments, prior = gaussians(mean, deviation)
    design = Design(net=flow.Perceptron(4, 1), prior=prior, predicts=predicts)  # type: ignore[arg-type]
    velocity = build_velocity(
        space, design.prior.build(space, moments), moments, design, 0, torch.Generator().manual_seed(0)
    ).double()
    velocity.net, velocity.clock = Nothing(), Nothing()  # type: ignore[assignment]
    velocity.tables = torch.stack(
        [0 * moments.mean, 0.7 + 0 * moments.mean, moments.mean, moments.deviation, moments.root]
    )
    return space, velocity, prior


def test_full_priors_have_the_covariances_of_the_networks() -> None:
    _, symmetry, _, _ = networks("mlp", 2)
    chance = torch.Generator().manual_seed(0)
    population = {n: torch.randn(4000, *s, generator=chance).double() for n, s in symmetry.shapes.items()}
    population["layers.2.bias"] = population["layers.2.bias"] + population["layers.1.bias"][:, :3]
    space = Space.of(population, symmetry, Representation("keep"))
    x = space.enter(population, torch.float64)
    moments = Moments.of([x], space, is_pooled=False)
    moments = replace(moments, covariance=find_covariance(x, space, moments, 0.01))
    prior = flow.FullGaussian(0.01).build(space, moments)
    drawn = prior.sample(4000, torch.Generator().manual_seed(1), torch.float64)
    assert (torch.cov(drawn.T) - torch.cov(x.T)).abs().max() < 0.25
    assert (torch.cov(drawn.T) - torch.diag(torch.cov(x.T).diagonal())).abs().max() > 0.8


@pytest.mark.parametrize("count", [3, 9, 60, 4000])
def test_full_priors_are_shrunk_covariances_whatever_the_number_of_networks(count: int) -> None:
    shapes = {f"w{k}": (3,) for k in range(4)}
    symmetry = Symmetry.from_axes({name: (name,) for name in shapes}).bind(
        {n: torch.zeros(s) for n, s in shapes.items()}
    )
    chance = torch.Generator().manual_seed(count)
    mix = torch.randn(12, 12, generator=chance, dtype=torch.float64)
    x = torch.randn(count, 12, generator=chance, dtype=torch.float64) @ mix + 3
    space = Space.of({name: x[:, 3 * k : 3 * k + 3] for k, name in enumerate(shapes)}, symmetry, Representation("keep"))
    moments = Moments.of([x], space, is_pooled=False)
    prior = flow.FullGaussian().build(space, replace(moments, covariance=find_covariance(x, space, moments, 0.1)))
    covariance = torch.cov(x.T, correction=0)
    shrunk = 0.9 * covariance + 0.1 * covariance.diagonal().diag()
    noise = torch.eye(12, dtype=torch.float64)
    root = prior.shake(noise)
    assert torch.allclose(root.T @ root, shrunk, atol=1e-9 * float(shrunk.abs().max()))
    exact = torch.distributions.MultivariateNormal(prior.mean, shrunk).log_prob(x[:9] + 1)
    assert torch.allclose(prior.log_density(x[:9] + 1), exact, rtol=1e-9)


@pytest.mark.parametrize("predicts", ["velocity", "end"])
def test_normal_to_normal_has_the_right_moments_and_density(predicts: str) -> None:
    space, velocity, prior = exact(predicts)
    start = prior.build(space, gaussians(1.0, 0.3)[1])
    x0 = start.sample(8000, torch.Generator().manual_seed(0), torch.float64)
    with torch.no_grad():
        x = integrate(space, velocity, x0, steps=40, solver="runge_kutta", end=1.0 if predicts == "velocity" else 0.989)
    assert x.mean() == pytest.approx(1.0 if predicts == "velocity" else 0.989, rel=0.015)
    assert x.std() == pytest.approx(0.3, rel=0.015)
    if predicts == "velocity":
        back, change = integrate_density(space, velocity, x[:50], steps=30, probes=None)
        assert torch.allclose(back, x0[:50], atol=1e-5)
        wanted = torch.distributions.Normal(1.0, 0.3).log_prob(x[:50]).sum(1)
        assert torch.allclose(start.log_density(back) + change, wanted, atol=0.01)
        chance = torch.Generator().manual_seed(0)
        signs = 2 * torch.randint(0, 2, (100, space.dim), generator=chance, dtype=torch.int8) - 1
        _, guessed = integrate_density(space, velocity, x[:8], steps=20, probes=signs)
        assert torch.allclose(guessed, change[:8], atol=0.02)


def test_the_velocity_of_the_thesis_shrinks_normal_distributions() -> None:
    """With `end - start` instead of `(end - x) / (1 - t)`, the result is the average of predicted ends, whose deviation
    is 0.49.
    """
    space, velocity, _ = exact("end", 1.0, 1.0)
    velocity.tables[1] = 1.0
    x0 = torch.randn(8000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x0
    with torch.no_grad():
        for k in range(100):
            t = torch.full((len(x),), k / 100, dtype=torch.float64)
            x = x + (velocity.predict_end(x, t) - x0) / 100
    assert x.std() < 0.6
    with torch.no_grad():
        right = integrate(space, velocity, x0, steps=60, solver="heun", end=0.989)
    assert right.std() == pytest.approx(1.0, rel=0.02)


def test_noise_leaves_distributions_as_they_are() -> None:
    space, velocity, prior = exact("velocity")
    x0 = prior.build(space, gaussians(1.0, 0.3)[1]).sample(8000, torch.Generator().manual_seed(0), torch.float64)
    begin = prior.build(space, gaussians(1.0, 0.3)[1])
    with torch.no_grad():
        x = diffuse(space, velocity, x0, steps=150, noise=2.0, start=begin, generator=torch.Generator().manual_seed(1))
        plain = integrate(space, velocity, x0, steps=150, solver="euler")
    assert x.mean() == pytest.approx(1.0, abs=0.01)
    assert x.std() == pytest.approx(0.3, rel=0.03)
    assert torch.corrcoef(torch.stack([x[:, 0], plain[:, 0]]))[0, 1] < 0.7  # It did move.


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2), ("runge_kutta", 4)])
def test_solvers_have_their_order(solver: str, order: int) -> None:
    _, symmetry, population, _ = networks("mlp", 3)
    space = Space.of(population, symmetry)
    x = space.enter(population, torch.float64)
    turn = torch.randn(space.dim, space.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 6

    def field(y: Tensor, t: Tensor) -> Tensor:
        return space.tangent(y, torch.sin(y @ turn.T + t.unsqueeze(1)))

    def end(steps: int) -> Tensor:
        return integrate(space, field, x, steps=steps, solver=solver)  # type: ignore[arg-type]

    best = integrate(space, field, x, steps=400, solver="runge_kutta")
    coarse, fine = ((end(steps) - best).abs().max() for steps in (10, 20))
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.5)


NETS = [flow.Metanetwork(layer=kind(), width=8, depth=2) for kind in LAYERS.values()]


@pytest.mark.parametrize("name", ["mlp", "normed"])
@pytest.mark.parametrize("net", NETS, ids=lambda net: type(net.layer).__name__)
def test_velocities_move_with_the_networks(name: str, net: flow.Metanetwork) -> None:
    _, symmetry, population, _ = networks(name, 3)
    space = Space.of(population, symmetry)
    x = space.enter(population, torch.float64)
    moments = Moments.of([x], space)
    velocity = build_velocity(
        space, Design().prior.build(space, moments), moments, Design(net=net), 0, torch.Generator().manual_seed(0)
    ).double()
    t = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    element = symmetry.random(torch.Generator().manual_seed(2), ("permutation",))
    known = space.arrange(x)
    extra = _missing(population, known)
    moved = space.collect(symmetry.act(element, {**known, **{n: v.expand(3, *v.shape) for n, v in extra.items()}}))
    with torch.no_grad():
        v, turned = velocity(x, t), velocity(moved, t)
    whole = space.arrange(v) | {n: torch.zeros(3, *s.shape, dtype=s.dtype) for n, s in extra.items()}
    wanted = space.collect(symmetry.act(element, whole))
    assert torch.allclose(turned, wanted, atol=1e-9)
    later = velocity(x, t.flip(0))
    assert not torch.allclose(later, v, atol=1e-4)  # It knows the time.


def test_signs_move_velocities_of_layers_that_respect_them() -> None:
    _, symmetry, population, _ = networks("tanh", 3)
    space = Space.of(population, symmetry)
    x = space.enter(population, torch.float64)
    design = Design(net=flow.Metanetwork(Propagation(), 8, 2))
    moments = Moments.of([x], space)
    prior = design.prior.build(space, moments)
    velocity = build_velocity(space, prior, moments, design, 0, torch.Generator().manual_seed(0)).double()
    element = symmetry.random(torch.Generator().manual_seed(2), ("permutation", "sign"))
    t = torch.full((3,), 0.4, dtype=torch.float64)
    with torch.no_grad():
        v = velocity(x, t)
        turned = velocity(space.collect(symmetry.act(element, space.arrange(x))), t)
    assert torch.allclose(turned, space.collect(symmetry.act(element, space.arrange(v))), atol=1e-9)


def test_guidance_lowers_the_loss_to_first_order() -> None:
    module, symmetry, population, inputs = networks("mlp", 4)
    space = Space.of(population, symmetry)
    x = space.enter(population, torch.float64)

    def loss(params: Params) -> Tensor:
        run = torch.func.vmap(lambda p: torch.func.functional_call(module, p, (inputs,)))
        return run(dict(params)).square().mean((1, 2))  # type: ignore[no-any-return]

    pull = Guidance(loss, 1.0).pull(space, x)
    h = 1e-6
    before, after = (loss(space.leave(space.exp(x, step * pull))) for step in (-h, h))
    rate = (after - before) / (2 * h)
    assert torch.allclose(rate, -pull.square().sum(1), rtol=1e-5)
    assert (rate < 0).all()


def test_inputs_that_are_dropped_are_others_in_each_call_and_the_same_for_all_networks() -> None:
    inputs = 1 + torch.rand(400, 5, generator=torch.Generator().manual_seed(0))
    task = rg.Task(nn.Linear(5, 5, bias=False), [(inputs, inputs)], criterion=lambda output, _: output)
    same = {"weight": torch.eye(5).expand(3, 5, 5)}
    loss = flow.BatchLoss(task, 0.2)
    first, second = loss(same), loss(same)  # each network returns its inputs
    assert all(torch.equal(first[0], own) for own in first)
    assert float((first != second).double().mean()) > 0.1
    kept = first[0] != 0
    assert float(kept.double().mean()) == pytest.approx(0.8, abs=0.03)
    assert torch.allclose(first[0][kept], inputs[kept] / 0.8)
    assert torch.equal(first, flow.BatchLoss(task, 0.2)(same))
    assert not torch.equal(first, flow.BatchLoss(task, 0.2, torch.Generator().manual_seed(1))(same))
    assert torch.equal(flow.BatchLoss(task)(same)[0], inputs)
    with pytest.raises(ValueError, match=r"dropout=1.0 is a share of the inputs, from 0 to below 1"):
        flow.BatchLoss(task, 1.0)
    words = rg.Task(nn.Embedding(9, 2), [(torch.arange(4), torch.arange(4))])
    with pytest.raises(ValueError, match=r"dropout=0.5 is for inputs .*, but they are torch.int64"):
        flow.BatchLoss(words, 0.5)({"weight": torch.zeros(1, 9, 2)})


def test_assignment_pairs_at_the_least_cost_and_keeps_everyone() -> None:
    space, moments, _ = gaussians(0.0, 1.0)
    x0, x1 = torch.randn(2, 8, 2, generator=torch.Generator().manual_seed(0)).unbind(0)
    start, end = flow.Coupling(assignment=True).pair(space, x0, x1, moments)
    assert torch.equal(end, x1)
    assert torch.equal(start.sort(0).values, x0.sort(0).values)
    cost = (start - end).square().sum()
    for k in range(50):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(k))
        assert cost <= (x0[order] - x1).square().sum() + 1e-6


def test_alignment_brings_ends_nearer_on_their_orbits() -> None:
    module, symmetry, population, inputs = networks("mlp")
    space = Space.of(population, symmetry)
    x = space.enter(population, torch.float64)
    moments = Moments.of([x], space)
    x0 = flow.MatchedGaussian().build(space, moments).sample(12, torch.Generator().manual_seed(0), torch.float64)
    start, end = flow.Coupling(alignment=True).pair(space, x0, x, moments)
    assert torch.equal(start, x0)
    assert (space.distance(x0, end) < space.distance(x0, x)).float().mean() > 0.8
    same = outputs(module, space.leave(end), inputs)
    assert torch.allclose(same, outputs(module, population, inputs), atol=1e-9)


@pytest.fixture(scope="module")
def fitted() -> tuple[flow.Flow, Params]:
    _, symmetry, population, _ = networks("mlp", 60)
    population = {name: tensor.float() for name, tensor in population.items()}
    net = flow.Metanetwork(MessagePassing(), 8, 2)
    config = flow.FlowConfig(net=net, is_aligned=False, epochs=2, batch=16)
    return flow.fit(population, symmetry, config, generator=torch.Generator().manual_seed(0)), population


def test_a_flow_samples_networks_and_knows_their_densities(fitted: tuple[flow.Flow, Params]) -> None:
    found, population = fitted
    made = found.sample(5, generator=torch.Generator().manual_seed(1), steps=4)
    assert {n: t.shape[1:] for n, t in made.items()} == {n: t.shape[1:] for n, t in population.items()}
    again = found.sample(5, generator=torch.Generator().manual_seed(1), steps=4)
    assert all(torch.equal(made[n], again[n]) for n in made)
    density = found.log_density(select(population, slice(0, 4)), steps=4)
    symmetry = found.space.symmetry
    few = select(population, slice(0, 2))
    moved = symmetry.act(symmetry.random(torch.Generator().manual_seed(0)), few)
    first, second = (found.log_density(one, steps=1, probes=None) for one in (few, moved))
    assert torch.allclose(first, second, atol=1e-2)
    assert density.shape == (4,)


ORBITS = [
    ("mlp", flow.Perceptron(8, 1), Representation(), ()),
    ("mlp", flow.Perceptron(8, 1), Representation("sphere"), ()),
    ("mlp", flow.Tokens(8, 1, 2), Representation("flat"), ()),
    ("mlp", flow.Perceptron(8, 1), Representation("keep"), ("permutation",)),
    ("mlp", flow.Perceptron(8, 1), Representation("flat", components=5), ()),
    ("tanh", flow.Perceptron(8, 1), Representation(), ()),
    ("normed", flow.Perceptron(8, 1), Representation(), ()),
    ("normed", flow.Perceptron(8, 1), Representation("sphere"), ()),
    ("normed", flow.Metanetwork(MessagePassing(), 8, 2), Representation(), ()),
    ("tanh", flow.Metanetwork(MessagePassing(), 8, 2), Representation(), ()),
]


@pytest.mark.parametrize(("name", "net", "how", "parts"), ORBITS, ids=str)
def test_all_networks_of_an_orbit_have_one_density(
    name: str, net: flow.Perceptron, how: Representation, parts: tuple[str, ...], tmp_path: Path
) -> None:
    _, symmetry, population, _ = networks(name, 40)
    is_aligned = not isinstance(net, flow.Metanetwork)
    config = flow.FlowConfig(net=net, representation=how, is_aligned=is_aligned, epochs=1, batch=16)
    found = flow.fit(population, symmetry, config, generator=torch.Generator().manual_seed(0))
    few = select(population, torch.tensor([0, 0, 0, 7, 7, 7]))
    chance = torch.Generator().manual_seed(3)
    moved = symmetry.act(symmetry.random(chance, parts or None, batch=(6,)), few)
    assert not torch.equal(moved[[*few][-2]], few[[*few][-2]])
    first, second = (found.log_density(one, steps=3, probes=4) for one in (few, moved))
    assert first.dtype == torch.float64
    assert torch.allclose(first, second, rtol=1e-9, atol=1e-9)
    assert (first[0] - first[3]).abs() > 1e-3  # Other networks have others.
    loaded = flow.load_flow(found.save(tmp_path / "flow.safetensors"))
    assert torch.equal(loaded.log_density(moved, steps=3, probes=4), second)
    if is_aligned:  # Where nothing is aligned, it is the order of units that is measured.
        space = found.space
        field = replace(found, velocity=found.velocity.double()).field()
        signs = torch.ones(1, space.dim)
        x0, change = integrate_density(space, field, space.enter(moved, torch.float64), steps=3, probes=signs)
        apart = found.prior.log_density(x0) + change
        assert (apart[:3].max() - apart[:3].min()).abs() > 1e-2


def test_split_off_networks_of_a_basin_are_as_dense_as_drawn_ones() -> None:
    module = mlp(3, 6, 2).double()
    symmetry = rg.discover(module, (torch.randn(5, 3, dtype=torch.float64),))
    chance = torch.Generator().manual_seed(0)
    drawn = {
        n: torch.randn(t.shape, generator=chance, dtype=torch.float64)
        + 0.05 * torch.randn(200, *t.shape, generator=chance, dtype=torch.float64)
        for n, t in module.state_dict().items()
    }
    population = symmetry.act(symmetry.random(chance, batch=(200,)), drawn)
    config = flow.FlowConfig(net=flow.Perceptron(16, 1), prior=flow.FullGaussian(), is_aligned=True, epochs=5)
    made = flow.fit(select(population, slice(0, 150)), symmetry, config, generator=chance)
    kept = made.log_density(select(population, slice(150, 200)), steps=5)
    new = made.log_density(made.sample(50, generator=chance, steps=10), steps=5)
    assert (kept.median() - new.median()).abs() < 10


def test_a_file_of_the_first_version_aligns_to_the_mean(tmp_path: Path) -> None:
    _, symmetry, population, _ = networks("mlp", 40)
    config = flow.FlowConfig(net=flow.Perceptron(8, 1), is_aligned=True, epochs=1, batch=16)
    found = flow.fit(population, symmetry, config, generator=torch.Generator().manual_seed(0))
    path = found.save(tmp_path / "flow.safetensors")
    with Checkpoint.open(path) as checkpoint:
        header = dict(checkpoint.header)
        tensors = {name: t for name, t in checkpoint.params.items() if name != "reference"}
    old = save(tensors, tmp_path / "old.safetensors", metadata=header | {"version": "1"})
    loaded = flow.load_flow(old)
    assert torch.equal(loaded.reference, found.moments.mean)  # type: ignore[arg-type]
    moved = symmetry.act(symmetry.random(torch.Generator().manual_seed(1)), population)
    assert torch.allclose(loaded.log_density(population, steps=2), loaded.log_density(moved, steps=2))
    save(tensors, tmp_path / "less.safetensors", metadata=header)
    with pytest.raises(ValueError, match="is damaged"):
        flow.load_flow(tmp_path / "less.safetensors")
    save(tensors, tmp_path / "new.safetensors", metadata=header | {"version": "4"})
    with pytest.raises(ValueError, match="has version 4"):
        flow.load_flow(tmp_path / "new.safetensors")


def test_a_flow_comes_back_from_its_file(fitted: tuple[flow.Flow, Params], tmp_path: Path) -> None:
    found, _ = fitted
    path = found.save(tmp_path / "flow.safetensors")
    loaded = flow.load_flow(path)
    assert loaded.design == found.design
    first, second = (one.sample(3, generator=torch.Generator().manual_seed(1), steps=3) for one in (found, loaded))
    assert all(torch.equal(first[n], second[n]) for n in first)
    with pytest.raises(FileExistsError):
        found.save(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="flow"):
        flow.load_flow(path)
    with pytest.raises(FileNotFoundError, match="regauge flow fit"):
        flow.load_flow(tmp_path / "other.safetensors")


@pytest.mark.parametrize("net", [flow.Perceptron(16, 1), flow.Tokens(8, 1, 2)], ids=lambda net: type(net).__name__)
def test_plain_nets_are_fitted_to_aligned_networks(net: flow.Perceptron | flow.Tokens, tmp_path: Path) -> None:
    _, symmetry, population, _ = networks("mlp", 40)
    config = flow.FlowConfig(net=net, epochs=1, batch=16, is_aligned=True, predicts="end", has_gaussian=False)
    found = flow.fit(population, symmetry, config, generator=torch.Generator().manual_seed(0))
    loaded = flow.load_flow(found.save(tmp_path / "flow.safetensors"))
    first, second = (one.sample(3, generator=torch.Generator().manual_seed(1), steps=3) for one in (found, loaded))
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("name", list(MODULES))
def test_tokens_are_what_permutations_move_together(name: str) -> None:
    """A permutation of the units of one group permutes the tokens of this group and, in other tokens, only single
    values.
    """
    _, symmetry, population, _ = networks(name, 2)
    space = Space.of(population, symmetry, Representation("keep"))
    tokens = find_tokens(space)
    assert torch.cat([index.flatten() for index in tokens]).unique().tolist() == list(range(space.dim))
    numbers = torch.arange(space.dim, dtype=torch.float64).unsqueeze(0)
    for group, index in zip([one for one in space.symmetry.groups if one.is_permuted], tokens, strict=False):
        moved = space.symmetry.identity()
        perm = torch.arange(group.size).roll(1)
        known = moved[group.name]
        moved = moved.replace(group.name, Value(perm=perm).fill(known))
        found = space.collect(space.symmetry.act(moved, space.arrange(numbers)))[0].long()
        assert torch.equal(found[index].sort(1).values, index[perm].sort(1).values)


@pytest.mark.parametrize("name", list(MODULES))
def test_classes_hold_what_permutations_exchange_in_one_order_of_units(name: str) -> None:
    _, symmetry, population, _ = networks(name, 2)
    space = Space.of(population, symmetry, Representation("keep"))
    classes = find_classes(space)
    assert torch.cat([index.flatten() for index in classes]).sort().values.tolist() == list(range(space.dim))
    numbers = torch.arange(space.dim, dtype=torch.float64).unsqueeze(0)
    moved = symmetry.act(symmetry.random(torch.Generator().manual_seed(0), ("permutation",)), space.arrange(numbers))
    where = space.collect(moved)[0].long()
    for index in classes:
        columns = torch.argsort(where[index], dim=1)  # Every class is permuted in the same way.
        assert torch.equal(where[index].sort(1).values, index.sort(1).values)
        assert bool((columns == columns[:1]).all())


def test_bad_settings_and_requests_are_told() -> None:
    with pytest.raises(ValueError, match="head_form"):
        Representation(head="out.weight")
    with pytest.raises(ValueError, match="predicts"):
        flow.FlowConfig(predicts="noise")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be from 0 to 1"):
        flow.FlowConfig(balance=2.0)
    _, symmetry, population, _ = networks("mlp", 20)
    with pytest.raises(KeyError, match="no parameter 'head'"):
        Space.of(population, symmetry, Representation(head="head", head_form="unit"))
    coupled = flow.FlowConfig(net=flow.Perceptron(8, 1), epochs=1, batch=16, coupling=flow.Coupling(assignment=True))
    found = flow.fit(population, symmetry, coupled, generator=torch.Generator().manual_seed(0))
    chance = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match="noise=0"):
        found.sample(2, generator=chance, noise=1.0)
    with pytest.raises(ValueError, match="no label 7"):
        found.sample(2, generator=chance, label=7)
    with pytest.raises(ValueError, match="must be at least 1"):
        found.sample(0, generator=chance)


def test_running_variances_stay_positive() -> None:
    _, symmetry, population, _ = networks("normed", 20)
    space = Space.of(population, symmetry)
    assert "norm.running_var" in space.positive
    assert LOG_NORM not in space.names
    wild = space.project(10 * torch.randn(5, space.dim))
    assert (space.leave(wild)["norm.running_var"] > 0).all()
    assert torch.equal(space.leave(wild)["norm.num_batches_tracked"], population["norm.num_batches_tracked"][:5])


@pytest.mark.parametrize("scales", ["keep", "sphere"])
def test_a_flow_draws_networks_of_other_widths(scales: str) -> None:
    _, symmetry, population, _ = networks("mlp", 40)
    how = Representation(scales)  # type: ignore[arg-type]
    config = flow.FlowConfig(representation=how, net=flow.Metanetwork(width=8, depth=1), is_aligned=False, epochs=1)
    found = flow.fit(population, symmetry, config, generator=torch.Generator().manual_seed(0))
    same = found.resize(symmetry)
    first, second = (one.sample(3, generator=torch.Generator().manual_seed(1), steps=2) for one in (found, same))
    assert all(torch.equal(first[n], second[n]) for n in first)
    wide = rg.discover(mlp(4, 9, 7, 3), (torch.randn(2, 4),))
    wider = found.resize(wide)
    made = wider.sample(3, generator=torch.Generator().manual_seed(1), steps=2)
    shapes = wider.space.symmetry.shapes
    assert {n: tuple(t.shape[1:]) for n, t in made.items()} == {n: tuple(shape) for n, shape in shapes.items()}
    for name in ("layers.0.bias", "layers.2.weight"):  # Values that permutations exchange have one distribution.
        old = found.space.arrange(found.prior.deviation.unsqueeze(0).float())[name]
        new = wider.space.arrange(wider.prior.deviation.unsqueeze(0).float())[name]
        assert torch.equal(old.flatten().unique(), new.flatten().unique())
    with pytest.raises(ValueError, match="values, but had"):
        found.resize(rg.discover(mlp(5, 9, 7, 3), (torch.randn(2, 5),)))
    plain = flow.FlowConfig(net=flow.Perceptron(8, 1), is_aligned=True, epochs=1)
    with pytest.raises(ValueError, match="the numbers of units are fixed"):
        flow.fit(population, symmetry, plain, generator=torch.Generator().manual_seed(0)).resize(wide)


def test_flat_points_leave_as_canonical_networks() -> None:
    _, symmetry, population, _ = networks("mlp")
    flat, round_ = (Space.of(population, symmetry, Representation(scales)) for scales in ("flat", "sphere"))
    x = flat.enter(population, torch.float64)
    assert not flat.spheres
    assert flat.normed == round_.spheres
    made = flat.leave(x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))
    assert torch.allclose(made["layers.0.weight"].norm(dim=2), torch.ones(()).double())
    assert torch.allclose(flat.enter(made, torch.float64), round_.enter(made, torch.float64))


@pytest.mark.parametrize("net", [flow.Metanetwork(MessagePassing(), 8, 1), flow.Tokens(8, 1, 2), flow.Perceptron(8, 1)])
def test_networks_are_drawn_where_the_velocity_is(net: flow.Metanetwork | flow.Tokens | flow.Perceptron) -> None:
    _, symmetry, population, _ = networks("mlp", 24)
    population = {name: tensor.float() for name, tensor in population.items()}
    how = Representation("flat", components=5) if isinstance(net, flow.Perceptron) else Representation()
    config = flow.Config(net=net, representation=how, is_aligned=not isinstance(net, flow.Metanetwork), epochs=1)
    found = flow.fit(population, symmetry, config)
    here = found.sample(3, steps=2), found.log_density(population, steps=2)
    with PretendDevice() as device:
        device.adopt(found.velocity)
        there = found.sample(3, steps=2), found.log_density(device.bring(population), steps=2)
        assert all(device.holds(tensor) for tensor in (*there[0].values(), there[1]))
        assert all(device.holds(tensor) for tensor in found.sample(2, start=device.bring(there[0]), steps=2).values())
        assert all(torch.allclose(there[0][name].cpu(), here[0][name]) for name in here[0])
        assert torch.allclose(there[1].cpu(), here[1])


# --- never below a normal distribution -----------------------------------------------------------------------------


def line_of_networks(count: int, noise: float = 0.02) -> tuple[Symmetry, Params, rg.Task]:
    """Return networks along three directions around one network, and a task that the central network solves."""
    torch.manual_seed(0)
    module = mlp(3, 6, 2)
    symmetry = rg.discover(module, (torch.randn(5, 3),))
    chance = torch.Generator().manual_seed(1)
    made = {}
    sizes = torch.randn(count, 3, generator=chance)
    for name, tensor in module.state_dict().items():
        ways = torch.randn(3, *tensor.shape, generator=chance) / 4
        rest = noise * torch.randn(count, *tensor.shape, generator=chance)
        made[name] = tensor + torch.tensordot(sizes, ways, 1) + rest
    inputs = torch.randn(64, 3, generator=chance)
    with torch.no_grad():
        answers = module(inputs).argmax(-1)
    return symmetry, made, rg.Task(module, [(inputs, answers)])


def test_a_net_that_learned_nothing_adds_nothing() -> None:
    """With a learning rate at which no net learns, the flow samples from the normal distribution, bit by bit."""
    symmetry, population, _ = line_of_networks(60)
    config = flow.FlowConfig(net=flow.Perceptron(8, 1), epochs=2, batch=16, lr=30.0, clip=1e9, average=None)
    found = flow.fit(population, symmetry, config, generator=torch.Generator().manual_seed(0))
    assert found.about["share"] == 0 == float(found.velocity.share)
    drawn = found.sample(5, generator=torch.Generator().manual_seed(1), steps=20)
    starts = found.draw_starts(5, torch.Generator().manual_seed(1))
    assert all(torch.allclose(drawn[name], starts[name], atol=2e-3) for name in drawn)


def test_what_the_net_adds_is_no_worse_than_nothing_on_held_out_networks() -> None:
    symmetry, population, _ = line_of_networks(60)
    config = flow.FlowConfig(net=flow.Perceptron(32, 2), epochs=30, batch=16)
    fits = {}
    for lr in (3e-3, 3e-2):
        one = flow.fit(population, symmetry, replace(config, lr=lr), generator=torch.Generator().manual_seed(0))
        kept = min(row["validation_loss"] for row in one.trained.history)  # type: ignore[union-attr]
        fits[one.about["share"]] = one.about["scores"]["flow"]["validation loss"]
        assert one.about["scores"]["flow"]["validation loss"] <= kept + 1e-9
    assert all(loss <= 1.2 for loss in fits.values())  # A normal distribution has about one.


@pytest.mark.parametrize(("gain", "noise"), [(1.0, 0.0), (0.05, 0.5), (-1.0, 0.0)])
@pytest.mark.parametrize("has_task", [False, True])
def test_the_net_is_used_only_where_its_gain_is_clear(
    gain: float, noise: float, has_task: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the flow is the normal distribution, even if the mean loss with the net is lower."""
    symmetry, population, task = line_of_networks(60)

    def losses(self: FlowFitting, *_: object) -> torch.Tensor:
        spread = noise * torch.linspace(-1, 1, 6, dtype=torch.float64)
        return 5 - float(self.net.share) * (gain + spread)

    monkeypatch.setattr(FlowFitting, "_held_out_losses", losses if not has_task else lambda *_: torch.zeros(6))
    monkeypatch.setattr(FlowFitting, "_drawn_losses", losses)
    config = flow.FlowConfig(net=flow.Perceptron(8, 1), epochs=1, batch=16)
    found = flow.fit(population, symmetry, config, task=task if has_task else None)
    assert found.about["share"] == float(found.velocity.share)
    assert (found.about["share"] > 0) == (gain == 1)
    assert found.about["gain"]["count"] == 6
    assert (found.about["gain"]["mean"] > found.about["gain"]["error"]) == (gain == 1)


def test_a_task_keeps_the_epoch_whose_networks_do_best() -> None:
    symmetry, population, task = line_of_networks(80)
    config = flow.FlowConfig(net=flow.Perceptron(16, 2), epochs=12, batch=16)
    found = flow.fit(population, symmetry, config, task=task, generator=torch.Generator().manual_seed(0))
    history = found.trained.history  # type: ignore[union-attr]
    assert all(row["drawn_loss"] > 0 for row in history)
    plain = flow.fit(population, symmetry, config, generator=torch.Generator().manual_seed(0))
    assert [row["loss"] for row in history] == [row["loss"] for row in plain.trained.history]  # type: ignore[union-attr]
    assert "drawn loss" in found.about["scores"]["flow"]
    assert "drawn loss" not in plain.about["scores"]["flow"]


def test_a_task_chooses_the_best_of_many_draws() -> None:
    symmetry, population, task = line_of_networks(60)
    config = flow.FlowConfig(net=flow.Perceptron(8, 1), epochs=1, batch=16)
    found = flow.fit(population, symmetry, config, generator=torch.Generator().manual_seed(0))
    every = found.sample(320, generator=torch.Generator().manual_seed(1), steps=5)
    losses = task.evaluate_each(every)["loss"]
    kept = losses.argsort(stable=True)[:32].sort().values
    best = found.sample(32, generator=torch.Generator().manual_seed(1), steps=5, task=task, moves=0)
    assert all(torch.equal(best[name], every[name][kept]) for name in best)
    chosen, before = losses[kept].double(), torch.inf
    for moves in (1, 10, 50):
        moved = found.sample(32, generator=torch.Generator().manual_seed(1), steps=5, task=task, moves=moves)
        after = task.evaluate_each(moved)["loss"].double()
        assert bool((after <= chosen + 1e-6).all())  # No move makes a network worse.
        assert float(after.mean()) < min(before, float(chosen.mean()))
        before = float(after.mean())
    with pytest.raises(ValueError, match="moves=-1"):
        found.sample(7, task=task, moves=-1)
    all_of_them = found.sample(7, generator=torch.Generator().manual_seed(1), steps=5, task=task, keep=1.0)
    assert all(len(tensor) == 7 for tensor in all_of_them.values())
    with pytest.raises(ValueError, match="keep=0"):
        found.sample(7, task=task, keep=0.0)
    with pytest.raises(ValueError, match="none of given starts"):
        found.sample(7, task=task, start=population)


def test_moves_leave_the_distribution_of_starts_as_it_is() -> None:
    """If every move is accepted, values stay standard normal. A plain step of the same size would increase their
    variance.
    """

    class Falling(rg.Task):
        """A task whose losses decrease with every call, for any networks."""

        def evaluate_each(self, params: Params) -> dict[str, torch.Tensor]:
            calls.append(len(next(iter(params.values()))))
            return {"loss": torch.full((calls[-1],), -float(len(calls)), dtype=torch.float64)}

    calls: list[int] = []
    task = Falling(torch.nn.Linear(1, 1), [])
    noise = torch.randn(256, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chosen = ChosenNetworks.of(task, lambda values: {"w": values.clone()}, noise, 256)
    chosen.move(60, torch.Generator().manual_seed(1))
    assert len(calls) == 61
    assert torch.equal(chosen.networks["w"], chosen.noise)
    assert float((chosen.noise * noise).mean().abs()) < 0.05  # Nothing of the first values is left.
    assert abs(float(chosen.noise.square().mean()) - 1) < 4 * (2 / noise.numel()) ** 0.5
    assert abs(float(chosen.noise.mean())) < 4 / noise.numel() ** 0.5


def test_a_task_that_does_not_fit_is_refused_in_a_sentence() -> None:
    symmetry, population, task = line_of_networks(60)
    config = flow.FlowConfig(net=flow.Perceptron(8, 1), epochs=1, batch=16)
    found = flow.fit(population, symmetry, config)
    other = rg.Task(mlp(5, 6, 2), [(torch.randn(4, 5), torch.zeros(4, dtype=torch.int64))])
    broken = rg.Task(task.module, [(torch.full((4, 3), torch.nan), torch.zeros(4, dtype=torch.int64))])
    for call in (lambda one: found.sample(2, task=one), lambda one: flow.fit(population, symmetry, config, task=one)):
        with pytest.raises(TypeError, match=r"the task is a .*, but a regauge\.Task is expected"):
            call(task.module)
        with pytest.raises(ValueError, match=r"has 'layers\.0\.weight' of shape \(6, 5\), but .* \(6, 3\) there"):
            call(other)
        with pytest.raises(ValueError, match="no sampled network has a finite loss on the task"):
            call(broken)


def test_a_warning_tells_what_cannot_work_before_the_training() -> None:
    symmetry, population, task = line_of_networks(200)
    config = flow.FlowConfig(net=flow.Perceptron(8, 1), epochs=1, batch=64)
    near = {name: tensor.mean(0) + (tensor - tensor.mean(0)) / 3 for name, tensor in population.items()}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plain = flow.fit(near, symmetry, config)
        measured = flow.fit(near, symmetry, config, task=task)
    assert not told
    good = plain.about["outlook"]
    assert good["spread"] < 0.6
    assert good["kept"] is None
    points = plain.space.enter(select(near, torch.from_numpy(flow.divide(near)["train"])))
    aligned = align_points(plain.networks, plain.reference, points)  # type: ignore[arg-type]
    assert good["spread"] ** 2 == pytest.approx(float(aligned.var(0).sum() / aligned.mean(0).square().sum()), rel=1e-4)
    assert measured.about["outlook"] == good  # Here validation networks are no better than one answer for all.
    chance = torch.Generator().manual_seed(3)
    apart = {name: torch.randn(60, *tensor.shape[1:], generator=chance) for name, tensor in population.items()}
    with pytest.warns(UserWarning, match=r"have little in common: .*With a task, fit measures"):
        poor = flow.fit(apart, symmetry, config).about["outlook"]
    assert poor["spread"] > 1.1


def bent_networks(noise: float) -> tuple[Symmetry, Params, rg.Task]:
    """Return networks that all predict correctly because a bias is a product of other values, which no covariance
    represents.
    """
    chance = torch.Generator().manual_seed(4)
    module = mlp(1, 3, 2)
    weight, bias, out = (1 + noise * torch.randn(300, 3, generator=chance).abs() for _ in range(3))
    bias = bias + torch.arange(3)
    slope = torch.stack([out, torch.zeros_like(out)], 1)
    level = torch.stack([-(out * (3.5 * weight + bias)).sum(1), torch.zeros(300)], 1)
    made = dict(zip(module.state_dict(), (weight.unsqueeze(2), bias, slope, level), strict=True))
    inputs = torch.linspace(3, 4, 200).unsqueeze(1)
    return rg.discover(module, (inputs,)), made, rg.Task(module, [(inputs, (inputs[:, 0] < 3.5).long())])


@pytest.mark.parametrize(
    ("noise", "said"), [(0.02, None), (0.15, "work worse than trained ones"), (1.0, "do not work")]
)
def test_with_a_task_the_warning_is_about_what_drawn_networks_do(noise: float, said: str | None) -> None:
    symmetry, population, task = bent_networks(noise)
    assert float(task.evaluate_each(population)["accuracy"].min()) > 0.98
    config = flow.FlowConfig(net=flow.Perceptron(8, 1), epochs=1, batch=64)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plain = flow.fit(population, symmetry, config)
        found = flow.fit(population, symmetry, config, task=task)
    outlook = found.about["outlook"]
    assert plain.about["outlook"]["spread"] < 1.1  # The spread alone does not know.
    assert ([] if said is None else [said]) == [said for one in told if said and said in str(one.message)]
    assert len(told) == (said is not None)
    drawn = task.evaluate_each(found.draw_starts(400))["accuracy"].mean()
    assert outlook["kept"] == pytest.approx(2 * float(drawn) - 1, abs=0.1)


def test_a_file_with_a_triangular_root_is_the_same_flow(tmp_path: Path) -> None:
    symmetry, population, _ = line_of_networks(60)
    config = flow.FlowConfig(net=flow.Perceptron(8, 1), epochs=1, batch=16)
    found = flow.fit(population, symmetry, config, generator=torch.Generator().manual_seed(0))
    with Checkpoint.open(found.save(tmp_path / "flow.safetensors")) as checkpoint:
        header, tensors = dict(checkpoint.header), dict(checkpoint.params)
    old = {n: t for n, t in tensors.items() if not n.startswith("covariance/") and n != "velocity/share"}
    root = found.prior.shake(torch.eye(found.space.dim, dtype=torch.float64))
    old["prior/factor"] = torch.linalg.cholesky(root.T @ root).float()
    loaded = flow.load_flow(save(old, tmp_path / "old.safetensors", metadata=header | {"version": "2"}))
    x = found.space.enter(population, torch.float64)[:9]
    assert torch.allclose(loaded.prior.log_density(x), found.prior.log_density(x), rtol=1e-3)
