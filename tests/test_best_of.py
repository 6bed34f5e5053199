"""The best of several methods has the lowest loss at the midpoint, for any objectives of the methods."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import regauge as rg
from regauge.alignment import Method, Problem, Results


@dataclass(frozen=True)
class Fixed(Method):
    """A method that returns one element with a given objective."""

    element: rg.Element
    objective: float

    def match(self, problem: Problem) -> Results:
        return problem.result(self.element, objective=self.objective, initial=0.0, history=[0.0, self.objective])


def setting() -> tuple[rg.Params, rg.Params, rg.Symmetry, rg.Element, rg.Task]:
    """Return a network, an orbit copy, the element that undoes the copy, and the task of computing A's outputs."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    inputs = torch.randn(32, 4, dtype=torch.float64)
    symmetry = rg.discover(module, (inputs,), verify=False)
    a = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    task = rg.Task(module, [(inputs, module(inputs).detach())], nn.functional.mse_loss)
    away = symmetry.random(torch.Generator().manual_seed(1), parts=("permutation", "sign"))
    return a, symmetry.act(away, a), symmetry, symmetry.inverse(away), task


def test_the_loss_decides_and_not_the_objective() -> None:
    a, b, symmetry, back, task = setting()
    wrong = symmetry.random(torch.Generator().manual_seed(2), parts=("permutation",))
    result = rg.align(a, b, symmetry, method=rg.alignment.BestOf((Fixed(wrong, 100.0), Fixed(back, 1.0))), task=task)
    assert result.objective == pytest.approx(0.0, abs=1e-20)
    kept = task.split(0.75)[1]
    assert result.objective == -kept.midpoint_loss(a, result.params)
    assert result.initial == -kept.midpoint_loss(a, b) < -1e-3
    assert len(result.starts) == 2
    assert list(result.history) == sorted(result.history)
    assert all(torch.allclose(result.params[name], a[name]) for name in a)


def test_no_alignment_is_kept_where_every_method_is_worse() -> None:
    a, _, symmetry, back, task = setting()
    result = rg.align(a, a, symmetry, method=rg.alignment.BestOf((Fixed(back, 100.0),)), task=task)
    assert all(torch.equal(result.params[name], a[name]) for name in a)
    assert result.objective == result.initial


def test_it_needs_methods_and_a_task() -> None:
    a, b, symmetry, _, _ = setting()
    with pytest.raises(ValueError, match="no method to choose from"):
        rg.alignment.BestOf(())
    with pytest.raises(ValueError, match="kept is 1"):
        rg.alignment.BestOf(kept=1)
    with pytest.raises(ValueError, match="BestOf needs data: give align a `task="):
        rg.align(a, b, symmetry, method=rg.alignment.BestOf((rg.WeightMatching(),)))
