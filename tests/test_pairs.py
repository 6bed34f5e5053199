"""Many pairs at once are what a loop over single pairs is, and as strict about their input."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from test_align import BY_HAND, drawn, generator, mlp_symmetry
from torch import Tensor

import regauge as rg
from regauge import Params, Symmetry, WeightMatching
from regauge.align import Matching
from regauge.core.task import Task


def stacked(networks: Sequence[Params]) -> Params:
    return {name: torch.stack([p[name] for p in networks]) for name in networks[0]}


def population(symmetry: Symmetry, count: int, seed: int = 0) -> Params:
    return stacked([drawn(symmetry, seed + k) for k in range(count)])


def single(params: Mapping[str, Tensor], k: int) -> Params:
    return {name: tensor[k] for name, tensor in params.items()}


@dataclass(frozen=True)
class OneByOne:
    """A method that knows single pairs only."""

    def match(
        self,
        params_a: Mapping[str, Tensor],
        params_b: Mapping[str, Tensor],
        symmetry: Symmetry,
        *,
        task: Task | None,
        generator: torch.Generator | None,
    ) -> Matching:
        return WeightMatching().match(params_a, params_b, symmetry, task=task, generator=generator)


# --- what a loop does --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dihedral", "signed experts", "attention"])
def test_methods_for_single_pairs_are_looped_over(name: str) -> None:
    symmetry = BY_HAND[name]
    a, b = population(symmetry, 3), population(symmetry, 3, seed=50)
    result = rg.align_pairs(a, b, symmetry, method=OneByOne())
    assert result.element.batch == (3,)
    for k in range(3):
        one = rg.align(single(a, k), single(b, k), symmetry)
        assert float(result.objective[k]) == one.objective
        assert float(result.initial[k]) == one.initial
        assert bool(result.is_converged[k]) == one.is_converged
        history = result.history[:, k].tolist()
        assert tuple(history[: len(one.history)]) == one.history
        assert history[len(one.history) :] == [one.history[-1]] * (len(history) - len(one.history))
        assert all(torch.allclose(result.params[n][k], one.params[n], atol=1e-12) for n in b)


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["first", "second"])
def test_the_network_that_is_not_finite_is_named(bad: float, which: str) -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    a, b = population(symmetry, 4), population(symmetry, 4, seed=10)
    (a if which == "first" else b)["0.bias"][2, 1] = bad
    with pytest.raises(ValueError, match=rf"'0.bias' of network 2 of the {which} population holds 1 values"):
        rg.align_pairs(a, b, symmetry)


def test_a_reference_that_is_not_finite_is_named() -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    a = drawn(symmetry, 0)
    a["1.weight"][0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"'1.weight' of the first network holds 1 values"):
        rg.align_pairs(a, population(symmetry, 2), symmetry)


def test_large_half_precision_populations_are_finite_although_their_sum_is_not() -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    a = {n: torch.full_like(t, 60000, dtype=torch.float16) for n, t in population(symmetry, 2).items()}
    assert bool((rg.align_pairs(a, a, symmetry).objective > 0).all())


def test_populations_that_do_not_fit_are_refused() -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    one, many = drawn(symmetry, 0), population(symmetry, 4)
    with pytest.raises(ValueError, match="without one leading model axis; stack the networks along a new first axis"):
        rg.align_pairs(one, one, symmetry)
    with pytest.raises(ValueError, match="there are 3 first networks and 4 second ones"):
        rg.align_pairs(population(symmetry, 3), many, symmetry)
    with pytest.raises(ValueError, match=r"only the first has \['1.bias'\]"):
        rg.align_pairs({**one, "1.bias": torch.zeros(2)}, {n: t for n, t in many.items() if n != "1.bias"}, symmetry)
    with pytest.raises(ValueError, match=r"'0.bias' has shape \(5,\) in the first network and \(3,\)"):
        rg.align_pairs({**one, "0.bias": torch.zeros(5)}, many, symmetry)
    with pytest.raises(ValueError, match=r"'count' has 2 networks along its leading model axis and '0.weight' has 4"):
        rg.align_pairs({**many, "count": torch.zeros(2)}, {**many, "count": torch.zeros(2)}, symmetry)
    with pytest.raises(KeyError, match="the parameters lack"):
        rg.align_pairs(many, {n: t for n, t in many.items() if n != "0.weight"}, symmetry)
    none = {n: t[:0] for n, t in many.items()}
    with pytest.raises(ValueError, match="there must be at least one"):
        rg.align_pairs(none, none, symmetry)


def test_the_report_counts_what_did_not_converge() -> None:
    symmetry = mlp_symmetry(4, 20, 20, 20, 3)
    a, b = population(symmetry, 3), population(symmetry, 3, seed=9)
    short = rg.align_pairs(a, b, symmetry, method=WeightMatching(max_sweeps=1))
    assert f"{3 - int(short.is_converged.sum())} stopped before convergence: raise max_sweeps" in short.report
    assert "local optima: no single group of any pair can be improved" in str(rg.align_pairs(a, b, symmetry))


def test_chance_needs_a_generator() -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    a = population(symmetry, 2)
    with pytest.raises(ValueError, match=r"restarts=2 begin at random elements; give align a torch.Generator"):
        rg.align_pairs(a, a, symmetry, method=WeightMatching(restarts=2))
    with_chance = rg.align_pairs(a, a, symmetry, method=WeightMatching(restarts=2), generator=generator(0))
    assert bool((with_chance.objective >= with_chance.initial).all())
