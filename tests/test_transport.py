"""Transport plans: exact without entropy, optimal with entropy, and always with the correct marginals."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regauge.alignment.transport_plans import _linear_program, _split_units, entropy, in_order, transport


def drawn(n: int, m: int, seed: int) -> Tensor:
    return torch.randn(n, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_marginals(plan: Tensor) -> None:
    n, m = plan.shape
    assert bool((plan >= 0).all())
    assert torch.allclose(plan.sum(1), torch.full((n,), 1 / n).double(), atol=1e-12)
    assert torch.allclose(plan.sum(0), torch.full((m,), 1 / m).double(), atol=1e-12)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    n=st.integers(1, 9), m=st.integers(1, 9), regularization=st.sampled_from([0.0, 0.01, 1.0]), seed=st.integers(0, 999)
)
def test_masses_are_right(n: int, m: int, regularization: float, seed: int) -> None:
    assert_marginals(transport(drawn(n, m, seed), regularization))
    assert_marginals(in_order(n, m))


def test_equal_widths_give_the_best_permutation() -> None:
    for n in range(1, 6):
        profit = drawn(n, n, n)
        best = max(float(profit[range(n), p].sum()) for p in itertools.permutations(range(n))) / n
        plan = transport(profit)
        assert float((plan * profit).sum()) == pytest.approx(best)
        assert bool(((plan == 0) | (plan == 1 / n)).all())


@pytest.mark.parametrize(("n", "m"), [(4, 2), (3, 9), (4, 6), (5, 7), (1, 6)])
def test_split_units_and_the_linear_program_agree(n: int, m: int) -> None:
    for seed in range(3):
        profit = drawn(n, m, seed)
        split = _split_units(profit.numpy(), int(np.lcm(n, m)))
        program = _linear_program(profit.numpy())
        assert float((split * profit).sum()) == pytest.approx(float((program * profit).sum()))


def test_pricing_finds_the_optimum_of_the_whole_program() -> None:
    """There are many more pairs than in the first program, so pairs must be added. The result agrees with an
    assignment.
    """
    profit = drawn(40, 50, 0) + 3 * drawn(40, 1, 1) * drawn(1, 50, 2)
    best = float((_split_units(profit.numpy(), 200) * profit).sum())
    assert float((_linear_program(profit.numpy()) * profit).sum()) == pytest.approx(best)


def test_widths_without_a_small_multiple_are_solved_too() -> None:
    profit = drawn(13, 11, 0)
    plan = transport(profit)
    assert_marginals(plan)
    assert float((plan * profit).sum()) == pytest.approx(float((_split_units(profit.numpy(), 143) * profit).sum()))


@pytest.mark.parametrize("regularization", [0.003, 0.1, 0.5, 2.0])
def test_entropic_plans_are_optimal(regularization: float) -> None:
    profit = drawn(6, 8, 0)
    plan = transport(profit, regularization)

    def value(other: Tensor) -> float:
        return float((other * profit).sum()) + regularization * entropy(other)

    others = [transport(profit), in_order(6, 8), torch.full((6, 8), 1 / 48).double()]
    others += [0.9 * plan + 0.1 * other for other in others]
    assert all(value(plan) >= value(other) - 1e-9 for other in others)
    if regularization >= 0.5:  # Where no mass is too small for the tolerance, the optimum has a product form.
        rest = plan.log() - profit / regularization
        assert torch.allclose(rest - rest[:, :1], (rest - rest[:, :1])[:1].expand_as(rest), atol=1e-5)


def test_less_regularization_is_closer_to_the_exact_plan() -> None:
    profit = drawn(10, 10, 1)
    exact = transport(profit)
    away = [float((transport(profit, r) - exact).abs().sum()) for r in (1.0, 0.3, 0.1, 0.03, 0.01)]
    assert all(x > y for x, y in itertools.pairwise(away))
    assert away[-1] < 1e-3


def test_extreme_profits_do_not_overflow() -> None:
    profit = 1e8 * drawn(5, 7, 0)
    assert_marginals(transport(profit, 1e-3, max_iterations=20))


def test_pairs_in_order() -> None:
    assert torch.equal(in_order(7, 7) * 7, torch.eye(7).double())
    assert torch.equal(in_order(2, 4) * 4, torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]]).double())
    assert torch.allclose(in_order(2, 3) * 6, torch.tensor([[2, 1, 0], [0, 1, 2]]).double())


def test_what_cannot_be_solved_is_refused() -> None:
    with pytest.raises(ValueError, match="1 entries that are NaN or Inf"):
        transport(torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(ValueError, match=r"have shape \(3,\)"):
        transport(torch.ones(3))
    with pytest.raises(ValueError, match="regularization is -1"):
        transport(torch.ones(2, 2), -1)
