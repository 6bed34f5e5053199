"""Exact linear assignment: the permutation that maximizes a sum of profits."""

import importlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Solver = Callable[[Floats], NDArray[np.int64]]

WARM_SIZE = 48
"""The size below which assignment problems are solved without reductions and potentials, which is faster."""
POTENTIAL_ROUNDS = 2
"""The number of rounds that recover dual potentials from an optimal assignment.

More rounds do not shorten the search for the next assignment.
"""


def assign(profit: Floats) -> NDArray[np.int64]:
    """Return the permutation c that maximizes `sum_i profit[i, c[i]]`, exactly.

    First, row and column minima are subtracted from the cost `-profit`. The reduced cost matrix is nonnegative and has
    many zeros. Subtracting a constant from a row or column changes the cost of every permutation equally, so the
    optimal permutation stays the same. For the heavy-tailed profits of trained networks, subtracting minima makes the
    search several times shorter.

    Args:
        profit: The profits as a square matrix, `[n, n]`.

    Returns:
        The column assigned to each row, `[n]`. If several permutations are optimal, every call returns the same one.

    Raises:
        ValueError: The matrix is not square, or contains NaN or Inf.

    References:
        Jonker and Volgenant (1987); Crouse (2016), the algorithm in scipy.
    """
    profit = np.asarray(profit, dtype=np.float64)
    if profit.ndim != 2 or profit.shape[0] != profit.shape[1]:
        raise ValueError(f"an assignment needs a square matrix of profits; this one has shape {profit.shape}")
    _require_finite(torch.from_numpy(profit), "this assignment")
    if len(profit) < WARM_SIZE:
        return _scipy(-profit)
    reduced = np.subtract(profit.max(axis=1, keepdims=True), profit, order="C")
    reduced -= reduced.min(axis=0)
    return _solver()(reduced)


def assign_rows(profit: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return a different column for each of a few rows, `[rows]`, such that the sum of profits is maximal."""
    return _scipy(-np.asarray(profit, dtype=np.float64))


@dataclass(frozen=True)
class Assignments:
    """The solutions of many assignment problems: the column of each row, and dual variables (potentials)."""

    columns: Int[Tensor, "problem target"]
    potentials: Float[Tensor, "problem source"] | None


def assign_many(
    profits: Float[Tensor, "problem target source"],
    potentials: Float[Tensor, "problem source"] | None = None,
    *,
    current: Int[Tensor, "problem target"] | None = None,
    slack: Float[Tensor, " problem"] | None = None,
    is_repeated: bool = True,
) -> Assignments:
    """Solve many assignment problems of one size at once, in the dtype of the profits; see `assign`.

    Reductions, potentials and the optimality test are computed for all problems together, on the device of the profits.
    Only rows that the reductions leave without a column are assigned by a search on the CPU, one problem after another.
    Potentials (dual variables) of similar problems shorten the search on the CPU. By weak duality, the sum of the
    reduced costs of the current columns bounds the gain of any other permutation. If the bound on the gain is at most
    `slack`, the current columns are kept.

    Args:
        profits: The profits, in float32 or float64.
        potentials: The potentials that a previous call returned for similar problems.
        current: The columns to keep if they are optimal. Default: the identity.
        slack: The current columns are kept unless another permutation gains more than `slack`. Default: 0.
        is_repeated: Whether the caller will solve similar problems later and needs the potentials.

    Raises:
        ValueError: A profit is NaN or Inf.
    """
    _require_finite(profits, "these assignments")
    count, n = profits.shape[:2]
    columns = torch.arange(n).expand(count, n) if current is None else current
    if n < WARM_SIZE and count == 1:
        values, targets = profits[0].cpu().numpy(), np.arange(n)
        found = _scipy(-values)
        best, kept = (values[targets, c].sum(dtype=np.float64) for c in (found, columns[0].numpy()))
        is_better = best - kept > (0.0 if slack is None else slack.item())
        return Assignments(torch.from_numpy(found).unsqueeze(0) if is_better else columns, None)
    start = profits.new_zeros(count, n) if potentials is None else potentials.to(profits)
    reduced = torch.neg(profits) if potentials is None else torch.neg(profits).sub_(start.unsqueeze(1))
    reduced -= reduced.amin(2, keepdim=True)
    # Weak duality: with nonnegative reduced costs, no permutation beats the current one by more than the sum of the
    # current one's reduced costs.
    there = columns.to(profits.device).unsqueeze(2)
    gap = reduced.gather(2, there).squeeze(2).sum(1, dtype=torch.float64).cpu()
    open_ = (gap > (0.0 if slack is None else slack)).nonzero().flatten()
    if not len(open_):
        return Assignments(columns, start)
    is_all = len(open_) == count
    if not is_all:
        here = open_.to(profits.device)
        profits, reduced = profits[here], reduced[here]
    if potentials is None:
        reduced -= reduced.amin(1, keepdim=True)
    solved = _search(reduced)
    if not is_all:
        columns = columns.index_copy(0, open_, solved)
    if not is_repeated:
        return Assignments(solved if is_all else columns, None)
    if is_all:
        return Assignments(solved, _potentials(profits, solved.to(profits.device), start, reduced))
    v = _potentials(profits, solved.to(profits.device), start[here], reduced)
    return Assignments(columns, start.index_copy(0, here, v))


def assign_in_place(profits: Float[Tensor, "target source"], *, slack: float = 0.0) -> Int[Tensor, " target"]:
    """Solve one assignment problem and overwrite the profits to save memory; see `assign_many`.

    Raises:
        ValueError: A profit is NaN or Inf.
    """
    if len(profits) < WARM_SIZE:
        limit = torch.tensor([slack], dtype=torch.float64)
        return assign_many(profits.unsqueeze(0), slack=limit, is_repeated=False).columns[0]
    _require_finite(profits, "this assignment")
    reduced = profits.neg_()
    reduced -= reduced.amin(1, keepdim=True)
    if float(reduced.diagonal().sum(dtype=torch.float64)) <= slack:
        return torch.arange(len(reduced))
    reduced -= reduced.amin(0)
    return _search(reduced.unsqueeze(0))[0]


def assigning_bytes(itemsize: int) -> int:
    """Return the additional bytes that the solver needs for each entry of a cost matrix with `itemsize` bytes per
    entry.
    """
    return 8 if _solver() is _scipy and itemsize < 8 else 0


def _potentials(profits: Tensor, columns: Tensor, start: Tensor, buffer: Tensor) -> Tensor:
    """Return dual variables of the columns for an assignment, computed by a few rounds of a shortest path search from
    `start`. If the assignment is (nearly) optimal, its reduced costs with the dual variables are (nearly) zero.
    """
    chosen = profits.gather(2, columns.unsqueeze(2)).squeeze(2)
    v = start
    # For costs -profit: u_i = cost(i, c_i) - v_(c_i) makes the chosen entries tight, v_j = min_i cost(i, j) - u_i keeps
    # all reduced costs nonnegative. Repeating both steps is Bellman and Ford's search in the residual graph.
    for _ in range(POTENTIAL_ROUNDS):
        torch.sub(profits, (chosen + v.gather(1, columns)).unsqueeze(2), out=buffer)
        v = buffer.amax(1).neg_()
    return v


def _require_finite(profits: Tensor, which: str) -> None:
    if not math.isfinite(profits.sum()) and not bool(profits.isfinite().all()):
        raise ValueError(
            f"{int((~profits.isfinite()).sum())} of {profits.numel()} profits of {which} are NaN or Inf; "
            "the weights or activations that they were computed from are not finite, or overflowed: check the "
            "networks, or use a wider dtype"
        )


@cache
def _solver() -> Solver:
    """Return the Jonker-Volgenant solver of `lapx`, or scipy's solver if the package `lap` has replaced `lapx`."""
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


def _search(reduced: Float[Tensor, "problem target source"]) -> Int[Tensor, "problem target"]:
    """Return the solutions of reduced assignment problems, found by a search on the CPU.

    If the installed `lapx` supports it, one call solves all assignment problems. Other solvers need one call for each
    assignment problem, and torch's threads make the calls in parallel.
    """
    costs, solve = reduced.cpu().numpy(), _solver()
    batched = None
    if len(costs) > 1 and solve is not _scipy:
        batched = getattr(importlib.import_module("lap"), "lapjvh_batch", None)
    if batched is None:
        threads = min(torch.get_num_threads(), len(costs))
        if threads < 2:
            return torch.from_numpy(np.stack([solve(cost) for cost in costs]))
        with ThreadPoolExecutor(threads) as pool:  # scipy's search releases the interpreter lock
            return torch.from_numpy(np.stack(list(pool.map(solve, costs))))
    rows, columns = batched(costs, return_cost=False, n_threads=torch.get_num_threads())
    result = np.empty(costs.shape[:2], dtype=np.int64)
    np.put_along_axis(result, np.stack(rows), np.stack(columns), axis=1)
    return torch.from_numpy(result)


def _scipy(cost: Floats) -> NDArray[np.int64]:
    from scipy.optimize import linear_sum_assignment  # Importing it takes longer than aligning small networks.

    return np.asarray(linear_sum_assignment(cost)[1], dtype=np.int64)
