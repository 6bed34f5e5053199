"""Assignment: exact for every size and start, stable, and strict about what it is given."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.core import assignment
from regauge.core.assignment import assign

SOLVERS = ["installed", "scipy"]


@pytest.fixture(params=SOLVERS)
def solver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "scipy":
        monkeypatch.setattr(assignment, "_solver", lambda: assignment._scipy)
    return str(request.param)


def total(profit: np.ndarray, columns: np.ndarray) -> float:
    return float(profit[np.arange(len(profit)), columns].sum())


def heavy_tailed(n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    left = rng.normal(size=(n, 8)) * np.exp(rng.normal(size=(n, 1)))
    return left @ (left[rng.permutation(n)] + 0.5 * rng.normal(size=(n, 8))).T


@settings(deadline=None, derandomize=True, max_examples=60)
@given(n=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_equals_brute_force(n: int, seed: int) -> None:
    profit = np.random.default_rng(seed).normal(size=(n, n))
    best = max(total(profit, np.array(p)) for p in itertools.permutations(range(n)))
    assert total(profit, assign(profit).columns) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("n", [64, 200])
def test_reductions_and_potentials_keep_the_optimum(solver: str, n: int) -> None:
    profit = heavy_tailed(n, 0)
    cold = assignment._scipy(-profit)
    first = assign(profit, is_repeated=True)
    assert sorted(first.columns) == list(range(n))
    assert total(profit, first.columns) == pytest.approx(total(profit, cold), rel=1e-12)
    assert first.potentials is not None
    changed = profit + 0.05 * heavy_tailed(n, 1)
    warm = assign(changed, first.potentials)
    assert total(changed, warm.columns) == pytest.approx(total(changed, assignment._scipy(-changed)), rel=1e-12)


def test_wrong_potentials_cost_time_and_not_exactness(solver: str) -> None:
    profit = heavy_tailed(100, 2)
    warm = assign(profit, np.random.default_rng(0).normal(size=100) * 100)
    assert total(profit, warm.columns) == pytest.approx(total(profit, assignment._scipy(-profit)), rel=1e-12)


def test_the_identity_is_recognized_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    profit = np.eye(80) * 5 + np.random.default_rng(0).uniform(size=(80, 80))
    first = assign(profit, is_repeated=True)
    monkeypatch.setattr(assignment, "_solver", lambda: pytest.fail)
    assert (assign(profit, first.potentials).columns == np.arange(80)).all()


def test_dead_and_duplicate_units(solver: str) -> None:
    profit = np.zeros((70, 70))
    profit[:30, :30] = heavy_tailed(30, 3)
    columns = assign(profit, is_repeated=True).columns
    assert sorted(columns) == list(range(70))
    assert total(profit, columns) == pytest.approx(total(profit, assignment._scipy(-profit)), rel=1e-12)
    assert (assign(np.ones((5, 5))).columns == assign(np.ones((5, 5))).columns).all()


def test_empty_and_single() -> None:
    assert assign(np.zeros((0, 0))).columns.tolist() == []
    assert assign(np.array([[-3.0]])).columns.tolist() == [0]


def test_a_module_named_lap_without_the_solver_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assignment._solver.cache_clear()
    monkeypatch.setattr(assignment.importlib, "import_module", lambda name: object())
    assert assignment._solver() is assignment._scipy
    assignment._solver.cache_clear()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_refuses_what_is_not_finite(bad: float) -> None:
    profit = np.zeros((3, 3))
    profit[1, 2] = bad
    with pytest.raises(ValueError, match="1 of 9 profits of this assignment are NaN or Inf"):
        assign(profit)


def test_refuses_rectangles() -> None:
    with pytest.raises(ValueError, match=r"square matrix of profits; this one has shape \(2, 3\)"):
        assign(np.zeros((2, 3)))
