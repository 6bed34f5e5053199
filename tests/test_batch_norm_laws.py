"""Networks with batch normalization: aligned networks have their original losses, with stored or recomputed
statistics.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from coverings import covering
from methods import EVERY, network_for
from symmetries import generator
from torch import Tensor, nn

import regauge as rg
from regauge.comparison.match_whole import measure_function
from regauge.core.params import Params
from regauge.report.line_figures import path_figure
from regauge.zoo.populations.pairs import Barriers

ERROR = 1e-10
"""The largest relative change of outputs in float64."""


class Skip(nn.Module):
    """A block with a shortcut around two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm_a, self.norm_b = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm_b(self.second(self.norm_a(self.first(x)).relu()))
        return torch.relu(x + branch)


def plain() -> nn.Module:
    first = (nn.Conv2d(1, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU())
    second = (nn.Conv2d(5, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*first, *second, nn.Linear(6, 3))


def residual() -> nn.Module:
    stem = (nn.Conv2d(1, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU())
    return nn.Sequential(*stem, Skip(5), Skip(5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3))


def with_bias() -> nn.Module:
    first = (nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*first, nn.Linear(80, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


MODULES: dict[str, Callable[[], nn.Module]] = {"plain": plain, "residual": residual, "with bias": with_bias}


@cache
def setting(name: str) -> tuple[nn.Module, rg.Symmetry, Params, Params, Tensor]:
    """Return a module, two networks with the statistics of their own activations, and the images."""
    module = MODULES[name]().double().eval()
    images = torch.randn((24, 1, 6, 6), generator=generator(0), dtype=torch.float64)
    symmetry = rg.discover(module, (images[:2],), verify=False)
    networks = []
    for seed in (1, 2):
        chance = generator(seed)
        drawn = {
            n: t + 0.4 * torch.randn(t.shape, generator=chance, dtype=t.dtype) if t.is_floating_point() else t
            for n, t in module.state_dict().items()
        }
        networks.append(rg.connect.reset_batchnorm(drawn, module, [images]))
    return module, symmetry.bind(networks[0]), *networks, images


def both_ways(name: str, params: Params) -> tuple[Tensor, Tensor]:
    """Return the outputs with stored statistics and with recomputed statistics."""
    module, *_, images = setting(name)
    anew = rg.connect.reset_batchnorm(params, module, [images[:12]])
    stored, computed = (torch.func.functional_call(module, one, (images,)).detach() for one in (params, anew))
    return stored, computed


def changes(name: str, before: Params, after: Params) -> list[float]:
    pairs = zip(both_ways(name, before), both_ways(name, after), strict=True)
    return [float((x - y).norm() / x.norm()) for x, y in pairs]


def task_of(name: str) -> rg.Task:
    module, _, a, _, images = setting(name)
    targets = torch.func.functional_call(module, a, (images,)).detach()
    return rg.Task(module, list(zip(images.split(8), targets.split(8), strict=True)), nn.functional.mse_loss)


def with_scales(method: Any, scales: str) -> Any:
    """Return the method with a treatment of scales, if the method or its initial method has this setting."""
    settings = {"scales": scales} if hasattr(method, "scales") else {}
    inner = {n: with_scales(v, scales) for n, v in vars(method).items() if isinstance(v, rg.alignment.Method)}
    several = {
        n: tuple(with_scales(one, scales) for one in v)
        for n, v in vars(method).items()
        if isinstance(v, tuple) and v and isinstance(v[0], rg.alignment.Method)
    }
    return type(method)(**{**vars(method), **settings, **inner, **several})


@pytest.mark.parametrize(("label", "name", "scales"), covering(EVERY, MODULES, ["balance", "recompute", "keep"], of=1))
def test_an_aligned_network_evaluates_as_before(label: str, name: str, scales: str) -> None:
    _, symmetry, a, b, _ = setting(name)
    method = with_scales(EVERY[label], scales)
    result = rg.align(
        network_for(method, a),
        network_for(method, b),
        symmetry,
        method=method,
        task=task_of(name),
        generator=generator(0),
    )
    moved = result.params[0] if isinstance(result.params, tuple) else result.params
    assert max(changes(name, b, moved)) <= ERROR


@pytest.mark.parametrize("name", MODULES)
def test_the_law_sees_what_moves_statistics_against_activations(name: str) -> None:
    """If a scale of filters is undone by gamma, recomputed statistics change the outputs, and stored statistics do
    not.
    """
    _, symmetry, _, b, _ = setting(name)
    stored, anew = changes(name, b, symmetry.act(symmetry.random(generator(3), ("scale",)), b))
    assert stored <= ERROR < 1e-2 < anew


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    "method", [rg.WeightMatching(), rg.alignment.MixedMatching(), rg.FrankWolfe(), rg.alignment.MergeMany()], ids=str
)
def test_copies_with_moved_statistics_are_found(name: str, method: rg.alignment.Method) -> None:
    _, symmetry, a, _, _ = setting(name)
    b = symmetry.act(symmetry.random(generator(4)), a)
    moved = rg.align(a, b, symmetry, method=method, task=task_of(name)).params
    assert all(torch.allclose(moved[n], a[n], rtol=1e-6, atol=1e-8) for n in a)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("decay", [0.8, 0.99])
def test_a_network_that_was_trained_on_keeps_its_statistics(name: str, decay: float) -> None:
    """The filters are shorter, and the statistics follow them. The network is no copy with transformed statistics."""
    module, symmetry, a, _, images = setting(name)
    shorter = {n: decay * t if t.ndim == 4 else t for n, t in a.items()}
    near = {
        n: t + 1e-3 * torch.randn(t.shape, generator=generator(5), dtype=t.dtype) if t.is_floating_point() else t
        for n, t in shorter.items()
    }
    b = rg.connect.reset_batchnorm(near, module, [images])
    assert max(changes(name, b, rg.align(a, b, symmetry).params)) <= ERROR


@pytest.mark.parametrize("name", MODULES)
def test_there_is_one_barrier(name: str) -> None:
    """A line, the matrix of a population and a picture give the same barrier, because every network is prepared in the
    same way.
    """
    module, _, a, b, images = setting(name)
    task = replace(task_of(name), prepare=lambda params: rg.connect.reset_batchnorm(params, module, [images[:12]]))
    curve = rg.line(a, b, task, points=5)
    both = {n: torch.stack([a[n], b[n]]) for n in a}
    matrix = Barriers(task, points=5)(both, both)
    assert float(matrix[0, 1]) == pytest.approx(curve.barrier, rel=1e-9, abs=1e-12)
    assert curve.barrier == max(0.0, *curve.excess)
    figure = path_figure({"": curve.table}, "loss", ("A", "B"))
    assert f"barrier {curve.barrier:.3g}" in figure.axes[0].get_title(loc="left")
    comparison = measure_function(a, b, (a, b), task)
    assert comparison["barrier as stored"] == pytest.approx(rg.line(a, b, task, points=11).barrier)
