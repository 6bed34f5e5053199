"""Exact linear assignment: which source each target takes, so that the summed profit is largest."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

Floats = NDArray[np.float64]
Solver = Callable[[Floats], NDArray[np.int64]]

WARM_SIZE = 48
"""Below this size a cold solution is cheaper than reductions and potentials."""
POTENTIAL_ROUNDS = 3
"""Rounds in which potentials are recovered from an optimal assignment; more do not shorten the next search."""


@dataclass(frozen=True)
class Assignment:
    """The solution of one problem.

    Attributes:
        columns: For each row the column that it is assigned to, `[n]`.
        potentials: Column potentials to start a similar problem from, `[n]`; None for small problems.
    """

    columns: NDArray[np.int64]
    potentials: Floats | None


def assign(profit: Floats, potentials: Floats | None = None, *, is_repeated: bool = False) -> Assignment:
    """The permutation c that maximizes `sum_i profit[i, c[i]]`, exactly.

    The cost `-profit` is first made nonnegative with many zeros: by its row and column minima, or by the
    potentials of a similar problem solved before. Either changes the value of every permutation by the same
    constant, so the optimum stays, and the search that remains is several times shorter on the heavy-tailed
    profits of trained networks. When the identity has only zeros left it is returned without a search.

    Args:
        profit: Square matrix, `[n, n]`.
        potentials: What a similar problem returned, its columns in the order of this one's.
        is_repeated: Whether a similar problem will follow, so that potentials are worth their computation.

    Returns:
        The optimum; among equally good ones it is the same in every run.

    Raises:
        ValueError: The matrix is not square, or holds NaN or Inf.

    References:
        Jonker and Volgenant (1987); Crouse (2016), the algorithm in scipy.
    """
    profit = np.asarray(profit, dtype=np.float64)
    if profit.ndim != 2 or profit.shape[0] != profit.shape[1]:
        raise ValueError(f"an assignment needs a square matrix of profits; this one has shape {profit.shape}")
    if not np.isfinite(profit.sum()) and not np.isfinite(profit).all():
        raise ValueError(
            f"{int((~np.isfinite(profit)).sum())} of {profit.size} profits of this assignment are NaN or Inf; "
            "the weights or activations that they were computed from are not finite, or overflowed"
        )
    n = profit.shape[0]
    if n < WARM_SIZE:
        return Assignment(_scipy(-profit), None)
    start = np.zeros(n) if potentials is None else potentials
    # One buffer serves the reduced cost and the rounds below: at these sizes allocation costs as much as arithmetic.
    reduced = np.subtract(-start, profit, order="C")
    reduced -= reduced.min(axis=1, keepdims=True)
    if potentials is None:
        reduced -= reduced.min(axis=0)
    elif not reduced.diagonal().any():
        return Assignment(np.arange(n), potentials)
    columns = _solver()(reduced)
    return Assignment(columns, _potentials(profit, columns, start, reduced) if is_repeated else None)


@dataclass(frozen=True)
class Assignments:
    """The solutions of many problems.

    Attributes:
        columns: For each row the column that it is assigned to, int64 `[problem, n]`.
        potentials: Column potentials to start similar problems from, `[problem, n]`.
    """

    columns: Tensor
    potentials: Tensor


def assign_many(
    profits: Tensor,
    potentials: Tensor | None = None,
    *,
    current: Tensor | None = None,
    slack: Tensor | None = None,
) -> Assignments:
    """`assign` for many problems of one size at once, in the precision of the profits.

    What can be done for all problems together (reductions, potentials, the test for optimality) is; only the
    search that remains runs problem by problem. By weak duality the reduced costs of the current columns sum up
    to at least what any other permutation gains over them: where that is no more than `slack`, they stay.

    Args:
        profits: float32 or float64 `[problem, n, n]`.
        potentials: What similar problems returned, `[problem, n]`.
        current: Columns to keep where they are best, `[problem, n]`; the identity unless given.
        slack: Gains that are not worth a change, `[problem]`; zero unless given.

    Raises:
        ValueError: A profit is NaN or Inf.
    """
    count, n = profits.shape[:2]
    if not bool(profits.sum().isfinite()) and not bool(profits.isfinite().all()):
        raise ValueError(
            f"{int((~profits.isfinite()).sum())} of {profits.numel()} profits of these assignments are NaN or Inf; "
            "the weights or activations that they were computed from are not finite, or overflowed"
        )
    start = profits.new_zeros(count, n) if potentials is None else potentials.to(profits)
    columns = torch.arange(n).expand(count, n) if current is None else current
    reduced = torch.neg(profits).sub_(start.unsqueeze(1))
    reduced -= reduced.amin(2, keepdim=True)
    gap = reduced.gather(2, columns.unsqueeze(2)).squeeze(2).sum(1, dtype=torch.float64)
    open_ = (gap > (0.0 if slack is None else slack)).nonzero().flatten()
    if not len(open_):
        return Assignments(columns, start)
    is_all = len(open_) == count
    if not is_all:
        profits, reduced = profits[open_], reduced[open_]
    reduced -= reduced.amin(1, keepdim=True)
    solved = torch.from_numpy(_search_many(reduced.numpy()))
    v = _many_potentials(profits, solved, start if is_all else start[open_], reduced)
    if is_all:
        return Assignments(solved, v)
    return Assignments(columns.index_copy(0, open_, solved), start.index_copy(0, open_, v))


def _many_potentials(profits: Tensor, columns: Tensor, start: Tensor, buffer: Tensor) -> Tensor:
    """`_potentials` for many problems."""
    chosen = profits.gather(2, columns.unsqueeze(2)).squeeze(2)
    v = start
    for _ in range(POTENTIAL_ROUNDS):
        torch.sub(profits, (chosen + v.gather(1, columns)).unsqueeze(2), out=buffer)
        v = buffer.amax(1).neg_()
    return v


def _potentials(profit: Floats, columns: NDArray[np.int64], start: Floats, buffer: Floats) -> Floats:
    """Column potentials that (nearly) prove the optimum: a few rounds of shortest paths from `start`."""
    chosen = profit[np.arange(len(columns)), columns]
    v = start
    for _ in range(POTENTIAL_ROUNDS):
        np.add(profit, (-chosen - v[columns])[:, None], out=buffer)
        v = -buffer.max(axis=0)
    return v


@cache
def _solver() -> Solver:
    """The Jonker-Volgenant variant of `lapx`, or scipy's where the package `lap` has replaced it."""
    try:
        lap = importlib.import_module("lap")
    except ImportError:
        return _scipy
    search = getattr(lap, "lapjvh", None)  # Both packages install a module `lap`; only lapx has this solver.
    if search is None:
        return _scipy

    def solve(cost: Floats) -> NDArray[np.int64]:
        rows, columns = search(cost, return_cost=False)
        result = np.empty(len(rows), dtype=np.int64)
        result[rows] = columns
        return result

    return solve


def _search_many(costs: NDArray[Any]) -> NDArray[np.int64]:
    """All problems in one call of `lapx` where it can, else one call for each."""
    solve = _solver()
    batched = None if solve is _scipy else getattr(importlib.import_module("lap"), "lapjvh_batch", None)
    if batched is None:
        return np.stack([solve(cost) for cost in costs])
    rows, columns = batched(costs, return_cost=False, n_threads=torch.get_num_threads())
    result = np.empty(costs.shape[:2], dtype=np.int64)
    np.put_along_axis(result, np.stack(rows), np.stack(columns), axis=1)
    return result


def _scipy(cost: Floats) -> NDArray[np.int64]:
    return np.asarray(linear_sum_assignment(cost)[1], dtype=np.int64)
