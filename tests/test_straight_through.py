"""Straight-through matching: the loss halfway never rises, hidden elements are recovered, and arguments do not
change.
"""

import itertools

import pytest
import torch
from methods import two_students
from symmetries import drawn, generator
from torch import nn

import regauge as rg
from regauge import StraightThrough, Symmetry

PARTS = ("permutation", "sign", "linear")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_midpoint_loss_falls_and_is_what_it_says(dtype: torch.dtype) -> None:
    gained = 0
    for seed in range(3):
        _, symmetry, a, b, task = two_students(10 * seed, dtype)
        kept = {n: t.clone() for n, t in (a | {f"b.{n}": t for n, t in b.items()}).items()}
        start = symmetry.random(generator(seed), PARTS)
        result = rg.align(a, b, symmetry, method=StraightThrough(init=start, steps=40, kept=0), task=task)
        assert result.objective == pytest.approx(-task.midpoint_loss(a, result.params))
        assert result.initial == pytest.approx(-task.midpoint_loss(a, b))
        assert result.objective >= max(result.initial, -task.midpoint_loss(a, symmetry.act(start, b)))
        assert all(x <= y for x, y in itertools.pairwise(result.history))
        assert len(result.history) == len(result.starts) == 5
        assert all(torch.equal(kept[n], t) for n, t in (a | {f"b.{n}": t for n, t in b.items()}).items())
        assert all(torch.equal(t, symmetry.act(result.element, b)[n]) for n, t in result.params.items())
        gained += result.objective > result.history[0]
    assert gained == 3


def test_it_leaves_an_optimum_of_weight_matching_where_the_loss_says_so() -> None:
    """The gradient moves the target of the matching, which would otherwise stay at its initial element."""
    moved = 0
    for seed in range(4):
        _, symmetry, a, b, task = two_students(10 * seed)
        matched = rg.align(a, b, symmetry)
        noise = drawn(symmetry, 10 * seed + 5)
        far = {n: t + 0.5 * noise[n] for n, t in matched.params.items()}
        still = rg.align(a, far, symmetry, method=StraightThrough(steps=20, lr=1e-12, kept=0), task=task)
        result = rg.align(a, far, symmetry, method=StraightThrough(steps=60, lr=0.3, kept=0), task=task)
        assert result.objective >= still.objective - 1e-9
        moved += result.objective > still.objective + 1e-9
    assert moved >= 1


def test_buffers_move_with_the_network() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).eval()
    symmetry = rg.discover(module, (torch.zeros(2, 3),), verify=False)
    a = {n: t + 0.1 * torch.rand_like(t) if t.is_floating_point() else t for n, t in module.state_dict().items()}
    a["1.running_var"] = torch.linspace(0.5, 2, 6)
    b = symmetry.act(symmetry.random(generator(1), ("permutation",)), a)
    inputs = torch.randn(20, 3, generator=generator(2))
    targets = torch.func.functional_call(module, a, (inputs,)).detach()
    task = rg.Task(module, [(inputs, targets)], nn.functional.mse_loss)
    result = rg.align(a, b, symmetry, method=StraightThrough(steps=5, every=5), task=task)
    assert result.objective == pytest.approx(0, abs=1e-8)
    assert torch.allclose(result.params["1.running_var"], a["1.running_var"], rtol=1e-3)


def test_methods_are_checked() -> None:
    with pytest.raises(ValueError, match=r"sweeps=0, .*: there must be a sweep"):
        StraightThrough(sweeps=0)
    with pytest.raises(ValueError, match=r"momentum=1: .*momentum in \[0, 1\)"):
        StraightThrough(momentum=1)


def test_nothing_to_choose() -> None:
    module = nn.Linear(2, 1)
    params = {n: torch.ones(s) for n, s in {"weight": (1, 2), "bias": (1,)}.items()}
    task = rg.Task(module, [(torch.ones(3, 2), torch.ones(3, 1))], nn.functional.mse_loss)
    result = rg.align(params, params, Symmetry(()), method=StraightThrough(steps=4), task=task)
    assert all(torch.equal(t, params[n]) for n, t in result.params.items())
