"""The unit sphere: exact laws in float64, float32 compared with float64, and gradients at coinciding points."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regauge.core import sphere

LAWS = settings(deadline=None, derandomize=True, max_examples=20)
DIMS = st.integers(2, 9)
SEEDS = st.integers(0, 2**31)


def points(dim: int, seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return sphere.normalize(torch.randn(*shape, dim, generator=generator, dtype=torch.float64))


def at_angle(x: Tensor, angle: float, seed: int) -> Tensor:
    """Return points at an exact angle from the points x."""
    away = sphere.normalize(sphere.tangent(x, points(x.shape[-1], seed, *x.shape[:-1])))
    return math.cos(angle) * x + math.sin(angle) * away


@LAWS
@given(dim=DIMS, seed=SEEDS)
def test_the_exponential_undoes_the_logarithm_and_its_length_is_the_distance(dim: int, seed: int) -> None:
    x, y = points(dim, seed, 3, 4), points(dim, seed + 1, 3, 4)
    velocity = sphere.log(x, y)
    assert torch.allclose(sphere.exp(x, velocity), y, atol=1e-9)
    assert torch.allclose(velocity.norm(dim=-1), sphere.distance(x, y), atol=1e-9)
    assert torch.allclose((velocity * x).sum(-1), torch.zeros(3, 4).double(), atol=1e-9)
    short = 0.9 * math.pi * sphere.normalize(sphere.tangent(x, y - x))
    assert torch.allclose(sphere.log(x, sphere.exp(x, short)), short, atol=1e-9)


@LAWS
@given(dim=DIMS, seed=SEEDS)
def test_distance_is_a_metric(dim: int, seed: int) -> None:
    x, y, z = (points(dim, seed + k, 20) for k in range(3))
    assert torch.equal(sphere.distance(x, x), torch.zeros(20).double())
    assert torch.equal(sphere.distance(x, y), sphere.distance(y, x))
    assert bool((sphere.distance(x, z) <= sphere.distance(x, y) + sphere.distance(y, z) + 1e-12).all())
    assert torch.allclose(sphere.distance(x, -x), torch.full((20,), math.pi).double())
    assert torch.allclose(sphere.distance(x, y), (x * y).sum(-1).clamp(-1, 1).acos(), atol=1e-7)


@LAWS
@given(dim=DIMS, seed=SEEDS)
def test_geodesics_have_exact_ends_and_constant_speed(dim: int, seed: int) -> None:
    x, y = points(dim, seed, 5), points(dim, seed + 1, 5)
    assert torch.equal(sphere.geodesic(x, y, 0.0), x)
    assert torch.equal(sphere.geodesic(x, y, 1.0), y)
    whole = sphere.distance(x, y)
    for t in (0.1, 0.5, 0.8):
        here = sphere.geodesic(x, y, t)
        assert torch.allclose(here.norm(dim=-1), torch.ones(5).double(), atol=1e-9)
        assert torch.allclose(sphere.distance(x, here), t * whole, atol=1e-9)
        assert torch.allclose(sphere.distance(here, y), (1 - t) * whole, atol=1e-9)
        assert torch.allclose(here, sphere.exp(x, t * sphere.log(x, y)), atol=1e-9)
    shares = torch.linspace(0, 1, 5, dtype=torch.float64)
    together = sphere.geodesic(x, y, shares)
    assert torch.allclose(together[2], sphere.geodesic(x[2], y[2], 0.5))


@LAWS
@given(dim=DIMS, seed=SEEDS)
def test_means_are_stationary_and_follow_rotations(dim: int, seed: int) -> None:
    center = points(dim, seed, 3)
    cloud = sphere.normalize(center.unsqueeze(-2) + 0.4 * points(dim, seed + 1, 3, 6))
    weights = torch.rand(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    mean = sphere.mean(cloud, weights)
    pull = (weights[:, None] * sphere.log(mean.unsqueeze(-2), cloud)).sum(-2)
    assert torch.allclose(pull, torch.zeros_like(pull), atol=1e-12)
    rotation = torch.linalg.qr(points(dim, seed + 2, dim)).Q
    assert torch.allclose(sphere.mean(cloud @ rotation, weights), mean @ rotation, atol=1e-12)
    two = cloud[:, :2]
    middle = sphere.geodesic(two[:, 0], two[:, 1], 0.5)
    assert torch.allclose(sphere.mean(two), middle, atol=1e-12)
    share = sphere.geodesic(two[:, 0], two[:, 1], 0.25)
    assert torch.allclose(sphere.mean(two, torch.tensor([3.0, 1.0])), share, atol=1e-12)
    assert torch.allclose(sphere.mean(cloud[:, :1]), cloud[:, 0], atol=1e-15)


@pytest.mark.parametrize("angle", [1e-6, 1e-4, 1e-2, 1.0, 3.0])
def test_float32_is_as_good_as_its_points(angle: float) -> None:
    x = points(30, 0, 200)
    y = at_angle(x, angle, 1)
    single, other = x.float(), y.float()
    exact = sphere.distance(sphere.normalize(single.double()), sphere.normalize(other.double()))
    assert torch.allclose(sphere.distance(single, other).double(), exact, rtol=2e-6, atol=2e-9)
    length = sphere.log(single, other).norm(dim=-1).double()
    assert torch.allclose(length, exact, rtol=3e-5, atol=1e-8)
    back = sphere.exp(single, sphere.log(single, other))
    assert torch.allclose(back, other, atol=2e-6)
    half = sphere.geodesic(single, other, 0.5).double()
    assert torch.allclose(half, sphere.geodesic(x, y, 0.5), atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_where_points_coincide(dtype: torch.dtype) -> None:
    x = points(5, 0).to(dtype)
    for function in (
        lambda y: sphere.distance(x, y),
        lambda y: sphere.distance(x, y).square(),
        lambda y: sphere.log(x, y).square().sum(),
        lambda y: sphere.geodesic(x, y, 0.3).sum(),
        lambda y: sphere.exp(x, y - x).sum(),
    ):
        y = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(y), y)
        assert bool(gradient.isfinite().all())
    jacobian = torch.autograd.functional.jacobian(lambda y: sphere.log(x, y), x.clone())
    expected = torch.eye(5, dtype=dtype) - torch.outer(x, x)
    assert torch.allclose(jacobian, expected, atol=1e-6)


def test_the_gradient_of_half_the_squared_distance_is_minus_the_logarithm() -> None:
    x, y = points(6, 0, 7), points(6, 1, 7)
    moving = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(sphere.distance(moving, y).square().sum() / 2, moving)
    assert torch.allclose(sphere.tangent(x, gradient), -sphere.log(x, y), atol=1e-12)


def test_opposite_points_are_told_and_their_means_refused() -> None:
    x = points(4, 0, 3)
    assert sphere.is_antipodal(x, -x).tolist() == [True] * 3
    assert sphere.is_antipodal(x, at_angle(-x, 1e-6, 1)).tolist() == [False] * 3
    with pytest.raises(ValueError, match="no single mean"):
        sphere.mean(torch.stack([x, -x], dim=-2))
    with pytest.raises(ValueError, match="must not be negative"):
        sphere.mean(torch.stack([x, x], dim=-2), torch.tensor([1.0, -1.0]))
