"""Optimal transport between units with equal masses: exact plans, and soft plans with an entropy term."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array
from torch import Tensor

from regauge.core.assignment import Floats, assign
from regauge.relaxed.sinkhorn_layer import normalize

REPLICAS = 4
"""The largest factor by which the number of units may grow when units are split to get equal numbers on both sides."""
PRICED = 8
"""The number of pairs per unit with which a linear program starts, and the largest number that is added at a time."""
PRICE_TOLERANCE = 1e-9
"""A pair is added only if its gain is at least this fraction of the largest profit."""


def transport(
    profit: Tensor, regularization: float = 0.0, *, tolerance: float = 1e-9, max_iterations: int = 5000
) -> Tensor:
    """Return the plan T that maximizes `<T, profit> + regularization * entropy(T)`.

    Rows of T sum to 1/n and columns sum to 1/m. The entropy is `entropy(T) = -sum T log T`. Without regularization, the
    optimum is exact. If n = m, the optimum is an assignment: n T is a permutation. If n and m have a small common
    multiple, each unit is split into equal parts, and the optimum is an assignment of these parts. In all other cases,
    the optimum is the solution of a linear program. With regularization, Sinkhorn's iteration runs on logarithms while
    the regularization decreases to its final strength. The returned plan is close to Sinkhorn's result and has exact
    marginals.

    Args:
        profit: The profits, `[n, m]`.
        regularization: The nonnegative weight of the entropy.
        tolerance: Sinkhorn's iteration ends when the relative error of the marginals is below this number.
        max_iterations: The largest number of iterations at each strength of the regularization.

    Returns:
        The plan, float64 `[n, m]`.

    Raises:
        ValueError: The profits are not a matrix or are not finite, or the regularization is negative.

    References:
        Cuturi (2013), Sinkhorn distances; Schmitzer (2019), stabilized scaling; Altschuler et al. (2017), algorithm 2.
    """
    if profit.ndim != 2 or not bool(profit.isfinite().all()):
        raise ValueError(
            f"the profits of a transport must be a matrix of finite numbers; these have shape {tuple(profit.shape)} "
            f"and {int((~profit.isfinite()).sum())} entries that are NaN or Inf"
        )
    if not 0 <= regularization < math.inf:
        raise ValueError(f"regularization is {regularization}; it must be finite and not negative")
    profit = profit.detach().double().cpu()
    if regularization:
        rows_of_one = normalize(profit / regularization, tolerance, max_iterations)
        return _marginals_corrected(rows_of_one / len(profit))
    n, m = profit.shape
    common = math.lcm(n, m)
    if common <= REPLICAS * max(n, m):
        return _split_units(profit.numpy(), common)
    return _marginals_corrected(_linear_program(profit.numpy()))


def in_order(n: int, m: int) -> Tensor:
    """Return the plan that pairs the units of both sides in their given order, which is `eye(n) / n` if n = m."""
    cuts = [torch.arange(size + 1) * other for size, other in ((n, m), (m, n))]  # In units of 1 / (n m).
    upper = torch.minimum(cuts[0][1:].unsqueeze(1), cuts[1][1:].unsqueeze(0))
    lower = torch.maximum(cuts[0][:-1].unsqueeze(1), cuts[1][:-1].unsqueeze(0))
    return (upper - lower).clamp_min(0).double() / (n * m)


def entropy(plan: Tensor) -> float:
    """Return `-sum T log T` in nats, where `0 log 0 = 0`."""
    return -float(torch.xlogy(plan, plan).sum())


def _split_units(profit: Floats, common: int) -> Tensor:
    n, m = profit.shape
    rows, columns = np.arange(common) // (common // n), np.arange(common) // (common // m)
    taken = columns[assign(profit[rows][:, columns])]
    counts = np.zeros((n, m))
    np.add.at(counts, (rows, taken), 1.0)
    return torch.from_numpy(counts / common)


def _linear_program(profit: Floats) -> Tensor:
    """Solve a transport problem by column generation: start with few pairs, and add pairs with which the optimum
    improves.
    """
    n, m = profit.shape
    cost = -profit / (np.abs(profit).max() or 1.0)
    masses = np.concatenate([np.full(n, 1 / n), np.full(m, 1 / m)])
    is_used = in_order(n, m).numpy() > 0  # These pairs alone allow a plan, so every program has a solution.
    reduced = cost - cost.min(axis=1, keepdims=True)
    reduced -= reduced.min(axis=0)
    is_used |= _cheapest(reduced, PRICED)
    while True:
        rows, columns = np.nonzero(is_used)
        at = np.arange(len(rows))
        marginals = csr_array(
            (np.ones(2 * len(rows)), (np.concatenate([rows, n + columns]), np.concatenate([at, at]))),
            shape=(n + m, len(rows)),
        )
        solved = linprog(  # type: ignore[call-overload]  # The stubs admit no sparse constraints.
            cost[is_used], A_eq=marginals, b_eq=masses, method="highs-ds"
        )
        dual = np.asarray(solved.eqlin.marginals, dtype=np.float64)
        reduced = np.where(is_used, np.inf, cost - dual[:n, None] - dual[n:])
        gains = reduced < -PRICE_TOLERANCE
        if not gains.any():
            plan = np.zeros((n, m))
            plan[is_used] = np.maximum(solved.x, 0)
            return torch.from_numpy(plan)
        is_used |= gains & _cheapest(reduced, PRICED)


def _cheapest(cost: Floats, count: int) -> NDArray[np.bool_]:
    """Return a mask of the `count` smallest entries in every row and every column."""
    rows, columns = (min(count, size) - 1 for size in (cost.shape[1], cost.shape[0]))
    in_row = cost <= np.partition(cost, rows, axis=1)[:, rows, None]
    in_column = cost <= np.partition(cost, columns, axis=0)[columns]
    return np.asarray(in_row | in_column)


def _marginals_corrected(plan: Tensor) -> Tensor:
    """Return a plan with exact marginals: rows and columns with too much mass are scaled down, and missing mass is
    added.
    """
    n, m = plan.shape
    plan = plan * (1 / (n * plan.sum(1, keepdim=True))).clamp_max(1)
    plan = plan * (1 / (m * plan.sum(0, keepdim=True))).clamp_max(1)
    rows, columns = 1 / n - plan.sum(1, keepdim=True), 1 / m - plan.sum(0, keepdim=True)
    missing = float(rows.sum())
    return plan if missing <= 0 else plan + rows.clamp_min(0) * columns.clamp_min(0) / missing
