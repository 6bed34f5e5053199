"""Networks of different widths merged into one."""

import pytest
import torch
from torch import Tensor, nn

import regauge as rg
from regauge import Params, Symmetry


def chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(first: int, second: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, first), nn.ReLU(), nn.Linear(first, second), nn.Tanh(), nn.Linear(second, 3)
    ).double()  # fmt: skip


def symmetry_of(module: nn.Module) -> Symmetry:
    return rg.discover(module, (torch.ones(2, 5, dtype=torch.float64),))


def network(module: nn.Module, seed: int) -> Params:
    g = chance(seed)
    return {n: torch.randn(t.shape, generator=g, dtype=t.dtype) for n, t in module.state_dict().items()}


def doubled(params: Params) -> Params:
    """Return a network with the same function, in which every unit occurs twice."""

    def twice(tensor: Tensor, *axes: int) -> Tensor:
        for axis in axes:
            tensor = torch.cat([tensor, tensor], axis)
        return tensor

    return {
        "0.weight": twice(params["0.weight"], 0),
        "0.bias": twice(params["0.bias"], 0),
        "2.weight": twice(params["2.weight"], 0, 1) / 2,
        "2.bias": twice(params["2.bias"], 0),
        "4.weight": twice(params["4.weight"], 1) / 2,
        "4.bias": params["4.bias"],
    }


@pytest.mark.parametrize("is_wider", [True, False], ids=["wider into narrow", "narrow into wider"])
def test_doubled_units_cost_nothing(is_wider: bool) -> None:
    modules = [mlp(4, 3), mlp(8, 6)]
    symmetries = [symmetry_of(module) for module in modules]
    narrow = network(modules[0], 0)
    networks = [narrow, doubled(narrow)]
    if not is_wider:
        networks, symmetries = networks[::-1], symmetries[::-1]
    networks[1] = symmetries[1].act(symmetries[1].random(chance(1)), networks[1])
    result = rg.merging.merge_widths(networks, symmetries)
    assert all(torch.allclose(result.params[n], t, atol=1e-7) for n, t in networks[0].items())
    assert result.record.after[1] < 1e-6


def test_three_widths_and_a_task() -> None:
    modules = [mlp(4, 3), mlp(7, 3), mlp(4, 3)]
    symmetries = [symmetry_of(module) for module in modules]
    networks = [network(module, seed) for seed, module in enumerate(modules)]
    inputs = torch.randn(20, 5, generator=chance(9), dtype=torch.float64)
    task = rg.Task(modules[0], [(inputs, torch.arange(20) % 3)])
    test = rg.Task(modules[0], [(inputs.flip(0)[:7], torch.arange(7) % 3)])
    result = rg.merging.merge_widths(networks, symmetries, weights=[1, 0, 1], task=task, test=test)
    expected = rg.merge([networks[0], networks[2]], symmetries[0], method=rg.WeightMatching()).params
    pairwise = rg.merging.merge_widths(networks, symmetries, weights=[1, 0, 1], method=rg.WeightMatching())
    assert all(torch.allclose(pairwise.params[n], t) for n, t in expected.items())
    assert result.record.merged_metrics == test.evaluate(result.params)
    assert {n: t.shape for n, t in result.params.items()} == {n: t.shape for n, t in networks[0].items()}


def test_what_does_not_fit_is_refused() -> None:
    module = mlp(4, 3)
    with pytest.raises(ValueError, match="2 symmetries for 1 networks"):
        rg.merging.merge_widths([network(module, 0)], [symmetry_of(module)] * 2)
    with pytest.raises(ValueError, match="there is no network"):
        rg.merging.merge_widths([], [])
    other = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with pytest.raises(ValueError, match="different parameters"):
        rg.merging.merge_widths([network(module, 0), network(other, 0)], [symmetry_of(module), symmetry_of(other)])


def test_settings_reach_the_correspondence_and_the_merge() -> None:
    modules = [mlp(4, 3), mlp(7, 5)]
    symmetries = [symmetry_of(module) for module in modules]
    networks = [network(module, seed) for seed, module in enumerate(modules)]
    merge = rg.merging.merge_widths
    plain = merge(networks, symmetries, labels=["narrow", "wide"])
    assert plain.record.networks == ("narrow", "wide")
    soft = merge(networks, symmetries, regularization=10.0)
    assert not torch.allclose(soft.params["2.weight"], plain.params["2.weight"])
    mapped = merge(networks, symmetries, weights=[0, 1]).params
    arc = merge(networks, symmetries, rule=rg.merging.Slerp())
    expected = rg.merge([networks[0], mapped], symmetries[0], rule=rg.merging.Slerp()).params
    assert all(torch.allclose(arc.params[name], tensor, atol=1e-12) for name, tensor in expected.items())
    random = rg.WeightMatching(restarts=2)
    with pytest.raises(ValueError, match="generator"):
        merge(networks, symmetries, method=random)
    merge(networks, symmetries, method=random, generator=chance(0))
