"""Flows in principal components: networks from few coordinates, and their residuals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regauge as rg
from regauge import flow
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.flow.components import Components
from regauge.flow.space import Representation, Space
from regauge.nets.mlp import mlp

REPRESENTATION = Representation("keep", components=2)
CONFIG = flow.FlowConfig(representation=REPRESENTATION, net=flow.Perceptron(16, 2), is_aligned=True, epochs=1, batch=64)


def bent(count: int) -> tuple[Space, Symmetry, Params, Tensor]:
    """Return networks on a curve in a plane, with noise in the first layer that is correlated over its inputs."""
    module = mlp(4, 6, 5, 3).double()
    symmetry = rg.discover(module, (torch.randn(2, 4, dtype=torch.float64),))
    chance = torch.Generator().manual_seed(0)
    population = {
        name: torch.randn(3, *shape, generator=chance, dtype=torch.float64) for name, shape in symmetry.shapes.items()
    }
    space = Space.of(population, symmetry, Representation("keep"))
    middle, *axes = space.enter(population, torch.float64)
    s = 2 * torch.rand(count, 1, generator=chance, dtype=torch.float64) - 1
    x = middle + 0.6 * (s * axes[0] + s.square() * axes[1])
    root = torch.tril(torch.ones(4, 4, dtype=torch.float64))
    noise = {name: torch.zeros(count, *symmetry.shapes[name], dtype=torch.float64) for name in space.names}
    first = torch.randn(count, 6, 4, generator=chance, dtype=torch.float64)
    noise["layers.0.weight"] = 0.06 * first @ root
    return space, symmetry, space.leave(x + space.collect(noise)), 0.0036 * root.T @ root


def test_networks_on_few_components_come_back() -> None:
    space, _, population, _ = bent(400)
    made = Components.of(space, space.enter(population), 2, 1.0)
    z = torch.randn(9, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.allclose(made.enter(made.leave(z), torch.float64), z, atol=1e-5)
    whole = made.with_rest(9, torch.Generator().manual_seed(2))
    assert torch.allclose(whole.enter(whole.leave(z), torch.float64), z, atol=1e-4)  # The rest is orthogonal to them.
    assert not torch.allclose(whole.expand(z), made.expand(z), atol=0.02)
    found = made.enter(population, torch.float64)
    assert torch.allclose(found.std(0), torch.ones(2, dtype=torch.float64), atol=1e-4)
    assert found.mean(0).abs().max() < 1e-4


def test_values_that_hardly_move_do_not_outweigh_those_of_their_tensor_that_do() -> None:
    space, _, _, _ = bent(3)
    chance = torch.Generator().manual_seed(5)
    places = (space.tensors == space.tensors.mode().values).nonzero()[:, 0]  # The largest tensor.
    points = 1e-6 * torch.randn(300, space.dim, generator=chance, dtype=torch.float64)
    points[:, places[1:]] += 0.01 * torch.randn(300, 1, generator=chance, dtype=torch.float64)  # All of these as one.
    points[:, places[0]] += torch.randn(300, generator=chance, dtype=torch.float64)
    made = Components.of(space, points, 2, 1.0)
    assert made.axes[0, places[0]].abs() > 0.99


def test_what_is_left_over_has_the_covariances_of_inputs() -> None:
    space, _, population, covariance = bent(4000)
    made = Components.of(space, space.enter(population), 2, 1.0)
    rest = made.with_rest(4000, torch.Generator().manual_seed(0)).rest
    assert rest is not None
    first = space.arrange(rest)["layers.0.weight"].double()
    found = torch.einsum("mui,muj->ij", first, first) / (4000 * 6)
    # Two of 24 directions are components.
    assert torch.allclose(found, covariance, rtol=0.2, atol=0.0012)
    others = [tensor.std() for name, tensor in space.arrange(rest).items() if name != "layers.0.weight"]
    assert max(others) < 0.3 * first.std()


def test_a_flow_of_components_learns_a_curve_and_comes_back_from_its_file(tmp_path: Path) -> None:
    _, symmetry, population, _ = bent(1200)
    config = replace(CONFIG, net=flow.Perceptron(64, 2), epochs=60, lr=3e-3)
    made = flow.fit(population, symmetry, config, generator=torch.Generator().manual_seed(0))
    assert isinstance(made.space, Components)
    drawn = made.sample(300, generator=torch.Generator().manual_seed(1), steps=20)
    known, new = made.space.enter(population), made.space.enter(drawn)
    normal = made.prior.sample(300, torch.Generator().manual_seed(1))
    distance, far = (torch.cdist(one, known).min(1).values.mean() for one in (new, normal))
    assert distance < 0.4 * far
    assert (new.std(0) - 1).abs().max() < 0.2
    density = made.log_density(drawn, steps=10, probes=None)
    assert density.mean() > made.prior.log_density(new).mean()
    loaded = flow.load_flow(made.save(tmp_path / "flow.safetensors"))
    again = loaded.sample(300, generator=torch.Generator().manual_seed(1), steps=20)
    assert all(torch.equal(drawn[name], again[name]) for name in drawn)
    assert loaded.design == made.design


def test_guidance_knows_what_is_left_over() -> None:
    _, symmetry, population, _ = bent(200)
    made = flow.fit(population, symmetry, CONFIG, generator=torch.Generator().manual_seed(0))
    seen = []

    def loss(params: Params) -> Tensor:
        seen.append({name: tensor.detach() for name, tensor in params.items()})
        return params["layers.0.weight"].square().flatten(1).sum(1)

    pull = flow.Guidance(loss, 0.01)
    drawn = made.sample(5, generator=torch.Generator().manual_seed(1), steps=4, solver="euler", guidance=pull)
    assert isinstance(made.space, Components)
    points = [made.space.networks.enter(params) for params in (seen[0], seen[-1], drawn)]
    rests = [x - made.space.expand(made.space.reduce(x)) for x in points]
    assert rests[0].std() > 0.01
    assert torch.allclose(rests[0], rests[2], atol=1e-4)
    assert torch.allclose(rests[1], rests[2], atol=1e-4)


def test_components_are_refused_where_they_mean_nothing() -> None:
    _, symmetry, population, _ = bent(40)
    with pytest.raises(ValueError, match="components=2 with scales='sphere'"):
        Representation("sphere", components=2)
    with pytest.raises(ValueError, match="components=0"):
        Representation("keep", components=0)
    with pytest.raises(ValueError, match="Perceptron"):
        replace(CONFIG, net=flow.Tokens(8, 1, 2))
    with pytest.raises(ValueError, match="is_aligned=True"):
        replace(CONFIG, is_aligned=False)
    many = replace(CONFIG, representation=Representation("keep", components=99))
    with pytest.raises(ValueError, match="fewer principal components than 99"):
        flow.fit(population, symmetry, many, generator=torch.Generator().manual_seed(0))
