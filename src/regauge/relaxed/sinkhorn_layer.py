"""The Sinkhorn operator, which maps logits to a doubly stochastic matrix, with the gradient of its fixed point.

Computing the gradient needs no stored iterations. The cost of the gradient does not depend on the number of iterations.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

RANGE = 12.0
"""Scalings are absorbed into the potentials before their logarithms leave this range."""
CHECKED = 5
"""The number of multiplicative iterations between two checks of the marginals."""
SPREAD = 16.0
"""A range of logits, in units of the temperature. For larger ranges, the iteration starts at higher temperatures."""
ROUGH = 1e-2
"""The tolerance at higher temperatures."""
RIDGE = 8.0
"""The number that is added to the diagonal of the normalized system, in units of the precision times the root of the
system's size."""


def sinkhorn(
    logits: Tensor,
    temperature: float = 1.0,
    *,
    potentials: Tensor | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
) -> tuple[Tensor, Tensor]:
    """Return the doubly stochastic `P = diag(exp f) exp(logits / temperature) diag(exp g)`.

    The plan P maximizes `<P, logits> + temperature * entropy(P)`. As the temperature decreases, the plan tends to the
    optimal permutation for the logits. Columns sum to one up to rounding, and rows up to `tolerance`.

    The gradient is the gradient of the limit of the iteration, by the implicit function theorem. Let H = P * G for the
    incoming gradient G, with marginals a = P 1, b = P' 1. Then

        (diag(a) - P diag(1/b) P') x = H 1 - P diag(1/b) H' 1,   y = (H' 1 - P' x) / b,
        grad = (H - P * (x 1' + 1 y')) / temperature

    The matrix of the linear system is the Laplacian of a graph on the rows. The Laplacian is computed from the graph's
    weights, scaled to a unit diagonal, and solved by Cholesky decomposition. If a plan is nearly a permutation,
    differences such as 1 - P would lose precision. Differences from one are computed as sums over the other entries.
    Even vanishing gradients therefore have the right direction. The gradient itself cannot be differentiated.

    Args:
        logits: The logits, `[..., n, n]`.
        temperature: The positive temperature.
        potentials: The potentials g of similar logits, `[..., n]`, from which the iteration starts.
        tolerance: The largest accepted deviation of a row sum from one.
        max_iterations: The largest number of iterations. Small temperatures need many iterations.

    Returns:
        The plan, and its potentials g for the next call. The potentials have no gradient.

    Raises:
        ValueError: The matrices are not square, or the temperature or the tolerance is not positive.

    References:
        Cuturi (2013); Eisenberger et al. (2022), theorem 3; Pena et al. (2023), section 3.
    """
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; plans need square matrices `[..., n, n]`")
    if not (temperature > 0 and tolerance > 0 and max_iterations > 0):
        raise ValueError(
            f"temperature={temperature}, tolerance={tolerance}, max_iterations={max_iterations}: all must be positive"
        )
    plan, found = _Sinkhorn.apply(logits / temperature, potentials, tolerance, max_iterations)  # type: ignore[no-untyped-call]
    return plan, found


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(
        logits: Tensor, potentials: Tensor | None, tolerance: float, max_iterations: int
    ) -> tuple[Tensor, Tensor]:
        if potentials is None:
            potentials = _anneal(logits, max_iterations)
        return _normalize(logits, potentials, tolerance, max_iterations)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        (plan,) = ctx.saved_tensors
        return _gradient(plan, gradient), None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], logits: Tensor, potentials: Tensor | None, tolerance: float, most: int
    ) -> tuple[Any, tuple[int, int]]:
        tensors = [
            None if t is None else t.expand(info.batch_size, *t.shape) if axis is None else t.movedim(axis, 0)
            for t, axis in zip((logits, potentials), in_dims, strict=False)
        ]
        return _Sinkhorn.apply(*tensors, tolerance, most), (0, 0)  # type: ignore[no-untyped-call]


def normalize(logits: Tensor, tolerance: float, max_iterations: int) -> Tensor:
    """Return the plan `diag(exp f) exp(logits) diag(exp g)`, `[..., n, m]`, whose columns have equal sums.

    The rows of the plan sum to one. The result has no gradient. See `sinkhorn` for the other arguments.
    """
    return _normalize(logits, _anneal(logits, max_iterations), tolerance, max_iterations)[0]


def _anneal(logits: Tensor, max_iterations: int) -> Tensor:
    """Return initial potentials, computed at higher temperatures that are halved until the requested temperature is
    reached.
    """
    g = torch.zeros_like(logits[..., 0, :])
    spread = float(logits.amax() - logits.amin()) if logits.numel() else 0.0
    doublings = max(0, math.ceil(math.log2(max(spread, 1.0) / SPREAD)))
    for k in range(doublings, 0, -1):
        # Potentials are in units of the temperature: at half of it they are about twice as large.
        g = 2 * _normalize(logits / 2**k, g, ROUGH, max_iterations)[1]
    return g


def _normalize(logits: Tensor, g: Tensor, tolerance: float, max_iterations: int) -> tuple[Tensor, Tensor]:
    """Return the plan and the potentials g. Iterations use products and quotients as long as numbers stay in range, and
    otherwise logarithms.
    """
    done, mass = 0, logits.shape[-2] / logits.shape[-1]
    while True:
        plan = torch.softmax(logits + g.unsqueeze(-2), -1)
        columns = plan.sum(-2) / mass
        if bool((columns > math.exp(-RANGE)).all()):
            plan, g = plan / columns.unsqueeze(-2), g - columns.log()
        else:
            moved = logits - torch.logsumexp(logits + g.unsqueeze(-2), -1, keepdim=True)
            g = math.log(mass) - torch.logsumexp(moved, -2)
            plan = (moved + g.unsqueeze(-2)).exp()
        done += 1
        is_in_range = True
        while is_in_range:
            rows = plan.sum(-1)
            if done >= max_iterations or not bool(((rows - 1).abs() > tolerance).any()):
                return plan, g
            # u scales rows and v scales columns. Vectors are on the left, because products of many matrices with
            # columns are slow.
            v = torch.ones_like(g).unsqueeze(-2)
            for _ in range(CHECKED):
                u = (v @ plan.mT).reciprocal()
                v = mass * (u @ plan).reciprocal()
            done += CHECKED
            step = v.log()
            is_in_range = bool((u.log().abs() < RANGE).all()) and bool((step.abs() < RANGE).all())
            if is_in_range:
                plan, g = plan * u.mT * v, g + step.squeeze(-2)


def _gradient(plan: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient with respect to the logits. The rows and columns of the gradient sum to zero."""
    n, eps, tiny = plan.shape[-1], torch.finfo(plan.dtype).eps, torch.finfo(plan.dtype).tiny
    b = plan.sum(-2, keepdim=True)
    h = (plan * gradient).sum(-2, keepdim=True)
    # In each row and column, at most one entry is above one half. Cancellation occurs only at such entries.
    is_large = (plan > 0.5).to(plan.dtype)
    large = plan * is_large
    small = plan - large
    small_h = (small * gradient).sum(-2, keepdim=True)
    right = small * (gradient - h / b) + large * (gradient * (small.sum(-2, keepdim=True) / b) - small_h / b)
    right = right.sum(-1, keepdim=True)

    weights = (plan / b) @ plan.mT
    weights = weights - torch.diag_embed(weights.diagonal(dim1=-2, dim2=-1))
    scale = (weights.sum(-1, keepdim=True) + tiny).rsqrt()
    # Constants are in the kernel of this map, so any constant may be added.
    kernel = 1 / scale
    kernel = kernel / torch.linalg.vector_norm(kernel, dim=-2, keepdim=True)
    ridge = (1 + RIDGE * n**0.5 * eps) * torch.eye(n, dtype=plan.dtype, device=plan.device)
    factor, _ = torch.linalg.cholesky_ex(kernel * kernel.mT - weights * scale * scale.mT + ridge)
    x = torch.cholesky_solve(right * scale, factor) * scale
    y = (h - (x.mT @ plan)) / b
    found = small * (gradient - x - y)
    return found - is_large * found.sum(-1, keepdim=True)
