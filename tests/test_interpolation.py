"""Points between networks, means and distances: exact endpoints, separate memory, and a single rounding."""

import warnings

import pytest
import torch

from regauge.core.interpolation import combine, distance, interpolate, mean
from regauge.core.params import Params


def draw(seed: int, *batch: int, dtype: torch.dtype = torch.float32) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(*batch, 4, 3, generator=generator).to(dtype),
        "b": torch.randn(*batch, 4, generator=generator).to(dtype),
        "count": torch.full(batch, seed),
    }


def test_populations_take_one_t_for_each_network() -> None:
    a, b, t = draw(1, 3), draw(2, 3), torch.tensor([0.0, 0.25, 1.0])
    many = interpolate(a, b, t)
    for k, each in enumerate(t.tolist()):
        one = interpolate({n: x[k] for n, x in a.items()}, {n: x[k] for n, x in b.items()}, each)
        assert torch.equal(many["w"][k], one["w"])
        assert torch.equal(many["b"][k], one["b"])


def test_points_are_differentiable() -> None:
    a, b = draw(1), draw(2)
    b["w"].requires_grad_()
    (gradient,) = torch.autograd.grad(interpolate(a, b, 0.25)["w"].sum(), b["w"])
    assert torch.equal(gradient, torch.full((4, 3), 0.25))


def test_a_mean_is_rounded_once_and_shares_no_memory() -> None:
    networks = [draw(seed, dtype=torch.float16) for seed in range(5)]
    expected = torch.stack([network["w"].float() for network in networks]).mean(0).half()
    result = mean(networks)
    assert torch.equal(result["w"], expected)
    assert int(result["count"]) == 0
    for shares in (None, [1.0, 0.0, 0.0, 0.0, 0.0]):
        for name, tensor in mean(networks, shares).items():
            assert all(tensor.data_ptr() != network[name].data_ptr() for network in networks)


def test_a_combination_of_nothing_is_zero() -> None:
    assert not combine([draw(1), draw(2)], [0, 0])["w"].any()


def test_distances_leave_out_integers_and_named_buffers() -> None:
    a, b = draw(1), draw(2)
    squares = {name: float((a[name] - b[name]).double().square().sum()) for name in ("w", "b")}
    assert distance(a, b) == pytest.approx(sum(squares.values()) ** 0.5)
    assert distance(a, b, ("b",)) == pytest.approx(squares["w"] ** 0.5)
    assert distance(a, a) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Torch warns if a number is made of a tensor with a gradient.
        trained = {name: t.clone().requires_grad_() if t.is_floating_point() else t for name, t in a.items()}
        assert distance(trained, b) == distance(b, trained) == distance(a, b)
