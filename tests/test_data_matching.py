"""The default method with a task returns the result with the lowest loss on examples not used for matching, and reports
if nothing changed.
"""

from dataclasses import replace

import pytest
import torch
from methods import two_students
from symmetries import generator

import regauge as rg


@pytest.mark.parametrize("seed", range(4))
def test_it_keeps_what_is_lower_on_kept_examples(seed: int) -> None:
    _, symmetry, a, b, task = two_students(seed)
    seen, kept = task.split(0.75)
    methods = (rg.alignment.MixedMatching(), rg.ActivationMatching(), rg.WeightMatching())
    tried = [rg.align(a, b, symmetry, method=method, task=seen) for method in methods]
    losses = [kept.midpoint_loss(a, one.params) for one in tried]
    found = rg.align(a, b, symmetry, task=task)
    expected = tried[losses.index(min(losses))]
    assert all(torch.equal(found.params[n], expected.params[n]) for n in a)
    assert found.objective == expected.objective
    assert kept.midpoint_loss(a, found.params) == min(losses)


def test_every_method_is_kept_somewhere() -> None:
    """Each method is the best method in some case."""
    kept = set()
    for seed in range(16):
        _, symmetry, a, b, task = two_students(seed)
        task = replace(task, batches=[(x[:4], y[:4]) for x, y in task.batches[:1]])  # type: ignore[index]
        found = rg.align(a, b, symmetry, task=task)
        for method in (rg.alignment.MixedMatching(), rg.ActivationMatching(), rg.WeightMatching()):
            one = rg.align(a, b, symmetry, method=method, task=task.split(0.75)[0])
            if all(torch.equal(found.params[n], one.params[n]) for n in a):
                kept.add(type(method))
                break
    assert len(kept) == 3


def test_a_single_example_chooses_itself() -> None:
    _, symmetry, a, b, task = two_students(0)
    single = replace(task, batches=[(x[:1], y[:1]) for x, y in task.batches[:1]])  # type: ignore[index]
    found = rg.align(a, b, symmetry, task=single)
    assert found.objective >= found.initial


def test_the_share_is_checked() -> None:
    with pytest.raises(ValueError, match="kept is 1"):
        rg.alignment.DataMatching(kept=1)


def test_a_method_that_changed_nothing_says_so() -> None:
    _, symmetry, a, _, task = two_students(0)
    found = rg.align(a, a, symmetry, method=rg.Sinkhorn(steps=2, every=2, init=symmetry.identity()), task=task)
    assert "nothing changed: of 1 elements that were tried, none is better than the start" in str(found)
    best = rg.align(a, a, symmetry, method=rg.alignment.BestOf((rg.WeightMatching(),)), task=task)
    assert "better than the identity" in str(best)
    moved = symmetry.act(symmetry.random(generator(5), ("permutation",)), a)
    gained = rg.align(a, moved, symmetry, method=rg.alignment.BestOf((rg.WeightMatching(),)), task=task)
    assert "nothing changed" not in str(gained)
