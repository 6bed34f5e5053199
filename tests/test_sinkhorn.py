"""Sinkhorn: plans are doubly stochastic and their gradients right, also near saturation; matching never loses."""

import itertools
import math

import mpmath
import pytest
import torch
from test_align import generator
from torch import Tensor

from regauge.align.sinkhorn_layer import sinkhorn


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def unrolled(logits: Tensor, temperature: float, iterations: int) -> Tensor:
    """The same plan, differentiated through all iterations."""
    plan = logits / temperature
    for _ in range(iterations):
        plan = plan - plan.logsumexp(-1, keepdim=True)
        plan = plan - plan.logsumexp(-2, keepdim=True)
    return plan.exp()


# --- the operator ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [10.0, 1.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plans_are_doubly_stochastic(temperature: float, dtype: torch.dtype) -> None:
    logits = normal(3, 12, 12, seed=0, dtype=dtype)
    plan, potentials = sinkhorn(logits, temperature, tolerance=1e-5, max_iterations=5000)
    assert plan.dtype == dtype
    assert torch.allclose(plan.sum(-1), torch.ones(3, 12, dtype=dtype), atol=2e-5)
    assert torch.allclose(plan.sum(-2), torch.ones(3, 12, dtype=dtype), atol=2e-5)
    scaled = plan.log() - logits / temperature - potentials.unsqueeze(-2)
    assert torch.allclose(scaled, scaled[..., :1].expand_as(scaled), atol=1e-3)


def test_a_batch_is_its_members_and_vmap_is_a_batch() -> None:
    logits, gradient = normal(4, 7, 7, seed=0), normal(4, 7, 7, seed=1)

    def pulled(x: Tensor, g: Tensor) -> Tensor:
        return (sinkhorn(x, 0.5, tolerance=1e-12)[0] * g).sum()

    whole = torch.func.grad(pulled)(logits, gradient)
    single = torch.stack([torch.func.grad(pulled)(x, g) for x, g in zip(logits, gradient, strict=True)])
    assert torch.allclose(whole, single, atol=1e-10)
    assert torch.allclose(torch.func.vmap(torch.func.grad(pulled))(logits, gradient), single, atol=1e-10)
    mapped = torch.func.vmap(lambda x: sinkhorn(x, 0.5, tolerance=1e-12)[0], in_dims=2)(logits.movedim(0, 2))
    assert torch.allclose(mapped, sinkhorn(logits, 0.5, tolerance=1e-12)[0], atol=1e-10)


def test_the_gradient_agrees_with_finite_differences() -> None:
    logits = normal(2, 6, 6, seed=0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 0.7, tolerance=1e-14)[0], logits)


@pytest.mark.parametrize("n", [2, 5, 40])
@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_the_gradient_agrees_with_the_unrolled_one(n: int, temperature: float) -> None:
    logits, gradient = normal(n, n, seed=n).requires_grad_(), normal(n, n, seed=1)
    implicit = torch.autograd.grad(
        sinkhorn(logits, temperature, tolerance=1e-13, max_iterations=4000)[0], logits, gradient
    )
    expected = torch.autograd.grad(unrolled(logits, temperature, 4000 if temperature < 1 else 400), logits, gradient)
    assert torch.allclose(implicit[0], expected[0], rtol=1e-6, atol=1e-9 / temperature)


@pytest.mark.parametrize("temperature", [1e-2, 1e-3])
def test_the_gradient_agrees_with_the_unrolled_one_near_saturation(temperature: float) -> None:
    logits = temperature * (normal(8, 8, seed=1) + 6 * torch.eye(8).double()).requires_grad_()
    gradient = normal(8, 8, seed=2)
    plan, _ = sinkhorn(logits, temperature, tolerance=1e-14)
    assert float(plan.detach().diagonal().min()) > 0.8
    (implicit,) = torch.autograd.grad(plan, logits, gradient)
    (expected,) = torch.autograd.grad(unrolled(logits, temperature, 3000), logits, gradient)
    assert torch.allclose(implicit, expected, rtol=1e-6, atol=1e-9 * float(expected.abs().max()))


def reference(plan: Tensor, gradient: Tensor) -> Tensor:
    """The same system of equations, solved with sixty digits."""
    n = len(plan)
    with mpmath.workdps(60):
        p = mpmath.matrix(plan.tolist())
        h = mpmath.matrix(n, n)
        for i, j in itertools.product(range(n), range(n)):
            h[i, j] = p[i, j] * mpmath.mpf(float(gradient[i, j]))
        left, right = mpmath.matrix(2 * n - 1, 2 * n - 1), mpmath.matrix(2 * n - 1, 1)
        for i, j in itertools.product(range(n), range(n)):  # The last of y is zero: constants do not matter.
            left[i, i] += p[i, j]
            right[i] += h[i, j]
            if j < n - 1:
                left[n + j, n + j] += p[i, j]
                left[i, n + j] = left[n + j, i] = p[i, j]
                right[n + j] += h[i, j]
        found = [*mpmath.lu_solve(left, right), mpmath.mpf(0)]
        rows = [[float(h[i, j] - p[i, j] * (found[i] + found[n + j])) for j in range(n)] for i in range(n)]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("margin", [0, 5, 12, 25])
def test_vanishing_gradients_of_saturated_plans_keep_their_direction(margin: int) -> None:
    """All but a permutation is of the order exp(-margin), and so is the gradient."""
    n = 7
    order = torch.randperm(n, generator=generator(0))
    logits, gradient = normal(n, n, seed=1), normal(n, n, seed=2)
    logits[torch.arange(n), order] += margin
    logits.requires_grad_()
    for dtype, least in ((torch.float64, 1e-6), (torch.float32, 2e-3)):
        plan, _ = sinkhorn(logits.to(dtype), tolerance=1e-6)
        (found,) = torch.autograd.grad(plan, logits, gradient.to(dtype))
        expected = reference(plan.detach().double(), gradient.to(dtype).double())
        assert float(expected.abs().max()) < 20 * math.exp(-margin)
        assert float((found - expected).abs().max()) < least * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-2, 1e-3, 1e-5])
def test_gradients_are_finite_and_bounded_at_small_temperatures(temperature: float, dtype: torch.dtype) -> None:
    logits = normal(5, 20, 20, seed=0, dtype=dtype).requires_grad_()
    plan, _ = sinkhorn(logits, temperature, max_iterations=2000)
    gradient = normal(5, 20, 20, seed=1, dtype=dtype)
    assert torch.allclose(plan.sum(-1), torch.ones(5, 20, dtype=dtype), atol=1e-2)
    (found,) = torch.autograd.grad(plan, logits, gradient)
    assert bool(found.isfinite().all())
    assert bool(plan.isfinite().all())
    assert torch.allclose(found.sum(-1), torch.zeros(5, 20, dtype=dtype), atol=1e-3 / temperature)
    exact = (1000 * torch.eye(20, dtype=dtype)).requires_grad_()
    (none,) = torch.autograd.grad(sinkhorn(exact, temperature)[0], exact, gradient[0])
    assert torch.equal(none, torch.zeros_like(none))


def test_old_potentials_save_iterations_and_change_nothing() -> None:
    logits = 3 * normal(30, 30, seed=0)
    plan, potentials = sinkhorn(logits, 0.5, tolerance=1e-10, max_iterations=100_000)
    once, _ = sinkhorn(logits, 0.5, potentials=potentials, max_iterations=1)
    assert torch.allclose(once, plan, atol=1e-8)
    cold, _ = sinkhorn(logits, 0.5, max_iterations=1)
    assert not torch.allclose(cold, plan, atol=1e-3)


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logits have shape \(2, 3\); plans need square matrices"):
        sinkhorn(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="temperature=0, tolerance=1e-06, max_iterations=1000: all must be positive"):
        sinkhorn(torch.zeros(2, 2), 0)
