"""Assignment is exact for every size and start, stable, and strict about its input."""

import itertools
from threading import get_ident

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.core import assignment
from regauge.core.assignment import assign, assign_many

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
    assert total(profit, assign(profit)) == pytest.approx(best, abs=1e-12)


def single(profit: np.ndarray, potentials: torch.Tensor | None = None) -> tuple[np.ndarray, torch.Tensor | None]:
    """Return one problem as a batch of one problem."""
    solved = assign_many(torch.from_numpy(profit).unsqueeze(0), potentials)
    return solved.columns[0].numpy(), solved.potentials


@pytest.mark.parametrize("n", [64, 200])
def test_reductions_and_potentials_keep_the_optimum(solver: str, n: int) -> None:
    profit = heavy_tailed(n, 0)
    cold = assignment._scipy(-profit)
    columns, potentials = single(profit)
    for found in (columns, assign(profit)):
        assert sorted(found) == list(range(n))
        assert total(profit, found) == pytest.approx(total(profit, cold), rel=1e-12)
    assert potentials is not None
    changed = profit + 0.05 * heavy_tailed(n, 1)
    warm, _ = single(changed, potentials)
    assert total(changed, warm) == pytest.approx(total(changed, assignment._scipy(-changed)), rel=1e-12)


def test_wrong_potentials_cost_time_and_not_exactness(solver: str) -> None:
    profit = heavy_tailed(100, 2)
    warm, _ = single(profit, torch.from_numpy(np.random.default_rng(0).normal(size=(1, 100)) * 100))
    assert total(profit, warm) == pytest.approx(total(profit, assignment._scipy(-profit)), rel=1e-12)


def test_the_identity_is_recognized_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    profit = np.eye(80) * 5 + np.random.default_rng(0).uniform(size=(80, 80))
    _, potentials = single(profit)
    monkeypatch.setattr(assignment, "_solver", lambda: pytest.fail)
    assert (single(profit, potentials)[0] == np.arange(80)).all()


@pytest.mark.parametrize("n", [5, 60])
def test_potentials_are_found_only_where_they_are_asked_for(n: int) -> None:
    profits = torch.from_numpy(heavy_tailed(n, 4)).unsqueeze(0)
    assert assign_many(profits, is_repeated=False).potentials is None
    assert torch.equal(assign_many(profits, is_repeated=False).columns, assign_many(profits).columns)


def test_dead_and_duplicate_units(solver: str) -> None:
    profit = np.zeros((70, 70))
    profit[:30, :30] = heavy_tailed(30, 3)
    for columns in (assign(profit), single(profit)[0]):
        assert sorted(columns) == list(range(70))
        assert total(profit, columns) == pytest.approx(total(profit, assignment._scipy(-profit)), rel=1e-12)
    assert (assign(np.ones((5, 5))) == assign(np.ones((5, 5)))).all()


def test_empty_and_single() -> None:
    assert assign(np.zeros((0, 0))).tolist() == []
    assert assign(np.array([[-3.0]])).tolist() == [0]


@pytest.mark.parametrize("threads", [1, 3])
def test_without_lapx_searches_share_the_threads_and_find_the_same(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    profits = torch.stack([torch.from_numpy(heavy_tailed(60, seed)) for seed in range(4)])
    scipy, used = assignment._scipy, set[int]()

    def search(cost: np.ndarray) -> np.ndarray:
        used.add(get_ident())
        return scipy(cost)

    monkeypatch.setattr(assignment, "_scipy", search)
    monkeypatch.setattr(assignment, "_solver", lambda: search)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = assign_many(profits).columns
    assert torch.equal(found, torch.stack([torch.from_numpy(scipy(-one.numpy())) for one in profits]))
    assert (used == {get_ident()}) == (threads == 1)


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


@pytest.mark.parametrize("n", [1, 2, 5, 40, 64])
def test_many_problems_are_solved_as_one_by_one(solver: str, n: int) -> None:
    profits = np.stack([heavy_tailed(n, seed) for seed in range(6)])
    best = [total(p, assignment._scipy(-p)) for p in profits]
    first = assign_many(torch.from_numpy(profits))
    assert [total(p, c.numpy()) for p, c in zip(profits, first.columns, strict=True)] == pytest.approx(best, rel=1e-12)
    changed = np.stack([p + 0.05 * heavy_tailed(n, seed + 10) for seed, p in enumerate(profits)])
    best = [total(p, assignment._scipy(-p)) for p in changed]
    for start in (first.potentials, torch.randn(6, n, generator=torch.Generator().manual_seed(0)).double() * 100):
        warm = assign_many(torch.from_numpy(changed), start, current=first.columns)
        reached = [total(p, c.numpy()) for p, c in zip(changed, warm.columns, strict=True)]
        assert reached == pytest.approx(best, rel=1e-12)


def test_many_problems_keep_columns_that_gain_at_most_the_slack_by_another_choice() -> None:
    profits = torch.from_numpy(np.stack([heavy_tailed(20, seed) for seed in range(4)]))
    solved = assign_many(profits)
    swapped = solved.columns.clone()
    swapped[2:, [0, 1]] = swapped[2:, [1, 0]]
    lost = [
        total(p, c) - total(p, s)
        for p, c, s in zip(*(t.numpy() for t in (profits, solved.columns, swapped)), strict=True)
    ]
    assert min(lost[2:]) > 1e-6
    strict = assign_many(profits, solved.potentials, current=swapped, slack=torch.full((4,), 1e-9))
    assert torch.equal(strict.columns, solved.columns)
    bound = [float(profits.abs().sum())] * 4
    assert torch.equal(assign_many(profits, current=swapped, slack=torch.tensor(bound)).columns, swapped)


def test_many_problems_say_how_many_profits_are_not_finite() -> None:
    profits = torch.zeros(3, 4, 4)
    profits[1, 2, 3] = float("nan")
    with pytest.raises(ValueError, match=r"1 of 48 profits of these assignments are NaN or Inf"):
        assign_many(profits)


def test_many_equal_profits_keep_the_identity() -> None:
    assert torch.equal(assign_many(torch.ones(2, 7, 7)).columns, torch.arange(7).expand(2, 7))
