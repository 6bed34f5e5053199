"""Alignment of many pairs at once gives the results of a loop over single pairs, and is equally strict about its
input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from coverings import every_other
from symmetries import BY_HAND, closeness, drawn, generator, mlp_symmetry, recurrent
from torch import Tensor, nn
from torch.nn import functional

import regauge as rg
from regauge import Element, Params, Symmetry, WeightMatching
from regauge.alignment import Method, Problem, Results
from regauge.alignment.engine import climbs
from regauge.alignment.engine.climbs import Pursuit
from regauge.alignment.result import join
from regauge.core.families import compared
from regauge.core.params import are_copies
from regauge.core.task import Task


def stacked(networks: Sequence[Params]) -> Params:
    return {name: torch.stack([p[name] for p in networks]) for name in networks[0]}


def population(symmetry: Symmetry, count: int, seed: int = 0) -> Params:
    return stacked([drawn(symmetry, seed + k) for k in range(count)])


def single(params: Mapping[str, Tensor], k: int) -> Params:
    return {name: tensor[k] for name, tensor in params.items()}


@dataclass(frozen=True)
class OneByOne(Method):
    """A method that supports only single pairs."""

    def match(self, problem: Problem) -> Results:
        return join([WeightMatching().match(problem[k : k + 1]) for k in range(problem.pairs)])


# --- what a loop does --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dihedral", "signed experts", "attention"])
def test_methods_for_single_pairs_are_looped_over(name: str) -> None:
    symmetry = BY_HAND[name]
    a, b = population(symmetry, 3), population(symmetry, 3, seed=50)
    result = rg.alignment.align_pairs(a, b, symmetry, method=OneByOne())
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


# --- a batch is a loop ---------------------------------------------------------------------------------------------


STARTS = [
    *(pytest.param(name, "barycenter") for name in BY_HAND),
    *(pytest.param(*case.values, "identity", marks=case.marks) for case in every_other(BY_HAND, part=0)),
]
"""Every symmetry with the barycenter as start, and every second symmetry also with only the identity."""


@pytest.mark.parametrize(("name", "start"), STARTS)
def test_a_batch_reaches_what_single_pairs_reach(name: str, start: Literal["barycenter", "identity"]) -> None:
    symmetry = BY_HAND[name]
    count = 4
    a, b = population(symmetry, count), population(symmetry, count, seed=100)
    kept = {key: (a[key].clone(), b[key].clone()) for key in b}
    method = WeightMatching(start=start)
    result = rg.alignment.align_pairs(a, b, symmetry, method=method)
    assert all(torch.equal(x, a[key]) and torch.equal(y, b[key]) for key, (x, y) in kept.items())
    moved = symmetry.act(result.element, b)
    assert all(torch.equal(moved[key], result.params[key]) for key in b)
    assert bool((result.history.diff(dim=0) >= 0).all())
    assert bool((result.objective >= result.initial).all())
    for k in range(count):
        one = rg.align(single(a, k), single(b, k), symmetry, method=method)
        assert float(result.initial[k]) == pytest.approx(one.initial, rel=1e-9, abs=1e-9)
        assert float(result.objective[k]) == pytest.approx(one.objective, rel=1e-9)
        assert bool(result.is_converged[k]) == one.is_converged
        assert all(torch.allclose(result.params[n][k], one.params[n], atol=1e-7) for n in b)


@pytest.mark.parametrize("name", ["signed", "dihedral", "recurrent", "stream", "experts"])
def test_the_objective_is_what_it_says(name: str) -> None:
    symmetry = BY_HAND[name]
    a, b = population(symmetry, 4), population(symmetry, 4, seed=100)
    result = rg.alignment.align_pairs(a, b, symmetry)
    for k in range(4):
        reached = closeness(symmetry, single(a, k), single(result.params, k), single(b, k))
        assert float(result.objective[k]) == pytest.approx(reached, rel=1e-9)


@pytest.mark.parametrize("name", ["scaled", "dihedral", "attention", "stream"])
def test_many_networks_meet_one_reference(name: str) -> None:
    symmetry = BY_HAND[name]
    a, b = drawn(symmetry, 3), population(symmetry, 5, seed=100)
    together = rg.alignment.align_pairs(a, b, symmetry)
    copies = {n: t.expand(5, *t.shape) for n, t in a.items()}
    assert are_copies(copies)
    repeated = rg.alignment.align_pairs(copies, b, symmetry)
    assert all(torch.equal(together.params[n], repeated.params[n]) for n in b)
    written = {n: t.clone() for n, t in copies.items()}  # each is balanced by itself
    assert not are_copies(written)
    apart = rg.alignment.align_pairs(written, b, symmetry)
    assert together.objective.tolist() == pytest.approx(apart.objective.tolist(), rel=1e-9)
    for n in b:
        torch.testing.assert_close(together.params[n], apart.params[n], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["signed", "attention", "rotary", "grouped convolution", "stream"])
def test_portions_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    symmetry = BY_HAND[name]
    a, b = population(symmetry, 7), population(symmetry, 7, seed=100)
    method = WeightMatching(restarts=1)
    whole = rg.alignment.align_pairs(a, b, symmetry, method=method, generator=generator(0))
    monkeypatch.setattr(climbs, "PORTION_PAIRS", 3)
    parts = rg.alignment.align_pairs(a, b, symmetry, method=method, generator=generator(0))
    assert whole.history.shape == parts.history.shape
    assert torch.allclose(whole.history, parts.history, rtol=1e-12)
    assert all(torch.allclose(whole.params[n], parts.params[n], atol=1e-9) for n in b)


def test_portions_side_by_side_are_those_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    symmetry = BY_HAND["signed"]
    a, b = population(symmetry, 7), population(symmetry, 7, seed=100)
    monkeypatch.setattr(climbs, "PORTION_PAIRS", 2)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(rg.alignment.align_pairs(a, b, symmetry))
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(threads)
    assert torch.allclose(found[0].history, found[1].history, rtol=1e-12)
    assert all(torch.allclose(found[0].params[n], found[1].params[n], atol=1e-9) for n in b)


def test_what_fails_in_a_portion_fails() -> None:
    def work(part: slice) -> int:
        return 1 // part.start

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            climbs.side_by_side(work, [slice(2, 4), slice(0, 2)])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_portions_are_even_and_bound_what_is_held() -> None:
    small = {"w": torch.zeros(1000, 10)}
    sizes = [part.stop - part.start for part in climbs.portions(small, small)]
    assert sizes == [250] * 4
    large = {"w": torch.zeros(1, 1).expand(5, 3 << 22)}
    sizes = [part.stop - part.start for part in climbs.portions(large, large)]
    assert sizes == [1] * 5


def test_buffers_move_and_do_not_count() -> None:
    symmetry = Symmetry.from_axes({"w": ("h", None), "v": (None, "h"), "mean": ("h",)}, buffers=["mean"])
    g = generator(0)
    a = {"w": torch.randn(3, 6, 4, generator=g), "v": torch.randn(3, 3, 6, generator=g), "mean": torch.zeros(3, 6)}
    a["steps"] = torch.arange(3)
    planted = torch.stack([torch.randperm(6, generator=g) for _ in range(3)])
    b = {
        "w": torch.stack([x[p] for x, p in zip(a["w"], planted, strict=True)]),
        "v": torch.stack([x[:, p] for x, p in zip(a["v"], planted, strict=True)]),
        "mean": 1000 * torch.arange(18.0).reshape(3, 6),
        "steps": a["steps"] + 7,
    }
    result = rg.alignment.align_pairs(a, b, symmetry)
    assert torch.equal(result.params["w"], a["w"])
    assert torch.equal(result.params["mean"], b["mean"].gather(1, planted.argsort(1)))
    assert torch.equal(result.params["steps"], b["steps"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_matched_in_single_and_kept(dtype: torch.dtype) -> None:
    symmetry = mlp_symmetry(20, 60, 5)
    a = {n: t.to(dtype) for n, t in population(symmetry, 3).items()}
    result = rg.alignment.align_pairs(a, symmetry.act(symmetry.random(generator(1), batch=(3,)), a), symmetry)
    assert all(t.dtype == dtype and torch.equal(t, a[n]) for n, t in result.params.items())


def test_single_precision_loses_nothing_that_counts() -> None:
    symmetry = mlp_symmetry(20, 64, 64, 5)
    a, b = population(symmetry, 6), population(symmetry, 6, seed=100)
    exact = rg.alignment.align_pairs(a, b, symmetry)
    single_precision = rg.alignment.align_pairs(*({n: t.float() for n, t in p.items()} for p in (a, b)), symmetry)
    assert bool((single_precision.history.diff(dim=0) >= 0).all())
    assert torch.allclose(single_precision.objective, exact.objective, rtol=1e-5)


def test_nothing_to_choose() -> None:
    symmetry = Symmetry((), {})
    b = {"w": torch.arange(6.0).reshape(3, 2)}
    result = rg.alignment.align_pairs({"w": torch.ones(3, 2)}, b, symmetry)
    assert torch.equal(result.params["w"], b["w"])
    assert result.objective.tolist() == [0, 0, 0]


def test_pairs_whose_climb_ends_below_the_identity_fall_back_to_it() -> None:
    symmetry = mlp_symmetry(1, 12, 12, 12, 1, kind="orthogonal")
    a, noise = population(symmetry, 3, seed=22), population(symmetry, 3, seed=23)
    close = {n: t + 0.1 * noise[n] for n, t in a.items()}
    result = rg.alignment.align_pairs(a, close, symmetry)
    assert bool((result.objective >= result.initial).all())
    singles = [rg.align(single(a, k), single(close, k), symmetry) for k in range(3)]
    assert [len(one.starts) for one in singles] == [1, 2, 1]
    assert result.objective.tolist() == pytest.approx([one.objective for one in singles], rel=1e-9)
    assert torch.allclose(result.history[-1], result.objective)


# --- restarts, warm starts ---------------------------------------------------------------------------------------


def climbed(symmetry: Symmetry, a: Params, b: Params, start: Element) -> float:
    """Run a single ascent from an element."""
    first, second = compared([a, b], symmetry)
    pursuit = Pursuit(symmetry, first, second, start)
    pursuit.climb(1000)
    return sum(float((first[name] * moved).sum()) for name, moved in pursuit.second.items())


@pytest.mark.parametrize("name", ["permutation", "signed", "orthogonal", "recurrent", "grouped convolution"])
def test_restarts_as_a_batch_are_climbs_one_by_one(name: str) -> None:
    symmetry = BY_HAND[name]
    a, b = drawn(symmetry, 1), drawn(symmetry, 2)
    result = rg.align(a, b, symmetry, method=WeightMatching(restarts=5), generator=generator(7))
    chance = generator(7)
    parts = ("permutation", "sign", "linear")
    alone = [climbed(symmetry, a, b, symmetry.random(chance, parts)) for _ in range(5)]
    # Rotations in a chain converge slowly, so where they stop depends on rounding.
    assert list(result.starts[1:6]) == pytest.approx(alone, rel=1e-5 if name == "orthogonal" else 1e-9)
    assert result.objective == max(result.starts)


def test_restarts_of_pairs_are_at_least_as_good_as_none() -> None:
    symmetry = recurrent(10)
    a, b = population(symmetry, 6), population(symmetry, 6, seed=100)
    once = rg.alignment.align_pairs(a, b, symmetry)
    many = rg.alignment.align_pairs(a, b, symmetry, method=WeightMatching(restarts=6), generator=generator(0))
    assert bool((many.objective >= once.objective).all())
    assert bool((many.objective > once.objective).any())


@pytest.mark.parametrize("name", BY_HAND)
def test_a_warm_start_goes_on_from_any_element(name: str) -> None:
    """From an optimum, nothing changes. From an element with scales and stretching matrices, the ascent works as
    usual.
    """
    symmetry = BY_HAND[name]
    method = WeightMatching(scales="keep" if name == "linear" else "balance")  # Matrices are rounded to rotations.
    a, b = drawn(symmetry, 1), drawn(symmetry, 2)
    first = rg.align(a, b, symmetry, method=method)
    again = rg.align(a, b, symmetry, method=replace(method, init=first.element))
    assert again.objective >= first.objective - 1e-9 * abs(first.objective)
    assert again.objective == pytest.approx(first.objective, rel=1e-3)
    assert again.history[0] == pytest.approx(first.objective, rel=1e-9)
    other = symmetry.random(generator(3))
    result = rg.align(a, b, symmetry, method=replace(method, init=other))
    assert result.objective >= result.initial == pytest.approx(first.initial)
    moved = symmetry.act(result.element, b)
    assert all(torch.equal(moved[key], result.params[key]) for key in b)


def test_pairs_start_from_one_element_or_from_one_each() -> None:
    symmetry = BY_HAND["signed"]
    a, b = population(symmetry, 3), population(symmetry, 3, seed=100)
    each = symmetry.random(generator(0), batch=(3,))
    result = rg.alignment.align_pairs(a, b, symmetry, method=WeightMatching(init=each))
    shared = rg.alignment.align_pairs(a, b, symmetry, method=WeightMatching(init=each.item(1)))
    for k in range(3):
        for found, init in ((result, each.item(k)), (shared, each.item(1))):
            one = rg.align(single(a, k), single(b, k), symmetry, method=WeightMatching(init=init))
            assert float(found.objective[k]) == pytest.approx(one.objective, rel=1e-9)


def test_elements_that_do_not_fit_are_refused() -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    a = drawn(symmetry, 0)
    with pytest.raises(ValueError, match=r"init is a batch of elements of shape \(2,\); give a single one"):
        rg.align(a, a, symmetry, method=WeightMatching(init=symmetry.identity((2,))))
    many = population(symmetry, 3)
    with pytest.raises(
        ValueError,
        match=r"init is a batch of elements of shape \(2,\);.* for 3 pairs, or one for each",
    ):
        rg.alignment.align_pairs(many, many, symmetry, method=WeightMatching(init=symmetry.identity((2,))))
    with pytest.raises(ValueError, match=r"init does not fit group 'h1' of 3 units"):
        rg.align(a, a, symmetry, method=WeightMatching(init=mlp_symmetry(2, 4, 2).identity()))
    with pytest.raises(ValueError, match=r"init has no value for group 'h1'; it belongs to another symmetry"):
        rg.align(a, a, symmetry, method=WeightMatching(init=recurrent(3).identity()))


# --- a task chooses between restarts -----------------------------------------------------------------------------


class Tanh(nn.Module):
    """A small network with an odd activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 6), nn.Linear(6, 5), nn.Linear(5, 1)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)  # type: ignore[no-any-return]


def test_with_a_task_the_loss_halfway_chooses_between_climbs() -> None:
    module = Tanh().double()
    axes = {
        "layers.0.weight": ("h1", None),
        "layers.0.bias": ("h1",),
        "layers.1.weight": ("h2", "h1"),
        "layers.1.bias": ("h2",),
        "layers.2.weight": (None, "h2"),
    }
    symmetry = Symmetry.from_axes(axes, kinds={"h1": "signed", "h2": "signed"})
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    g = generator(0)
    a, b = ({n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()} for _ in range(2))
    x = torch.randn(64, 2, generator=g, dtype=torch.float64)
    task = Task(module, [(x, torch.func.functional_call(module, a, (x,)))], criterion=functional.mse_loss)
    method = WeightMatching(restarts=12)
    plain = rg.align(a, b, symmetry, method=method, generator=generator(1))
    judged = rg.align(a, b, symmetry, method=method, task=task, generator=generator(1))
    assert judged.starts == plain.starts
    assert judged.objective >= judged.initial
    assert task.midpoint_loss(a, judged.params) < task.midpoint_loss(a, plain.params)
    assert judged.objective < plain.objective
    pairs = [stacked([p, p]) for p in (a, b)]
    both = rg.alignment.align_pairs(*pairs, symmetry, method=method, task=task, generator=generator(1))
    best = rg.alignment.align_pairs(*pairs, symmetry, method=method, generator=generator(1))
    for k in range(2):
        assert task.midpoint_loss(a, single(both.params, k)) <= task.midpoint_loss(a, single(best.params, k))
    assert bool((both.objective >= both.initial).all())


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["first", "second"])
def test_the_network_that_is_not_finite_is_named(bad: float, which: str) -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    a, b = population(symmetry, 4), population(symmetry, 4, seed=10)
    (a if which == "first" else b)["0.bias"][2, 1] = bad
    with pytest.raises(ValueError, match=rf"'0.bias' of network 2 of the {which} population holds NaN or Inf in 1 of"):
        rg.alignment.align_pairs(a, b, symmetry)


def test_a_reference_that_is_not_finite_is_named() -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    a = drawn(symmetry, 0)
    a["1.weight"][0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"'1.weight' of the first network holds NaN or Inf in 1 of"):
        rg.alignment.align_pairs(a, population(symmetry, 2), symmetry)


def test_large_half_precision_populations_are_finite_although_their_sum_is_not() -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    a = {n: torch.full_like(t, 60000, dtype=torch.float16) for n, t in population(symmetry, 2).items()}
    assert bool((rg.alignment.align_pairs(a, a, symmetry).objective > 0).all())


def test_populations_that_do_not_fit_are_refused() -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    one, many = drawn(symmetry, 0), population(symmetry, 4)
    with pytest.raises(ValueError, match="without one leading model axis; stack the networks along a new first axis"):
        rg.alignment.align_pairs(one, one, symmetry)
    with pytest.raises(ValueError, match="there are 3 first networks and 4 second ones"):
        rg.alignment.align_pairs(population(symmetry, 3), many, symmetry)
    with pytest.raises(ValueError, match=r"only the first has '1.bias'"):
        rg.alignment.align_pairs(
            {**one, "1.bias": torch.zeros(2)}, {n: t for n, t in many.items() if n != "1.bias"}, symmetry
        )
    with pytest.raises(ValueError, match=r"'0.bias' has shape \(5,\) in the first network and \(3,\)"):
        rg.alignment.align_pairs({**one, "0.bias": torch.zeros(5)}, many, symmetry)
    with pytest.raises(ValueError, match=r"'count' has 2 networks along its leading model axis and '0.weight' has 4"):
        rg.alignment.align_pairs({**many, "count": torch.zeros(2)}, {**many, "count": torch.zeros(2)}, symmetry)
    with pytest.raises(KeyError, match="the parameters lack"):
        rg.alignment.align_pairs(many, {n: t for n, t in many.items() if n != "0.weight"}, symmetry)
    none = {n: t[:0] for n, t in many.items()}
    with pytest.raises(ValueError, match="there must be at least one"):
        rg.alignment.align_pairs(none, none, symmetry)


def test_the_report_counts_what_did_not_converge() -> None:
    symmetry = mlp_symmetry(4, 20, 20, 20, 3)
    a, b = population(symmetry, 3), population(symmetry, 3, seed=9)
    short = rg.alignment.align_pairs(a, b, symmetry, method=WeightMatching(max_sweeps=1))
    moving = 3 - int(short.is_converged.sum())
    assert f"{moving} were stopped before convergence: allow the method more sweeps" in short.report
    assert "a local optimum of the method's own objective" in str(rg.alignment.align_pairs(a, b, symmetry))


def test_chance_needs_a_generator() -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    a = population(symmetry, 2)
    with pytest.raises(ValueError, match=r"restarts=2 begin at random elements; give align a torch.Generator"):
        rg.alignment.align_pairs(a, a, symmetry, method=WeightMatching(restarts=2))
    with_chance = rg.alignment.align_pairs(a, a, symmetry, method=WeightMatching(restarts=2), generator=generator(0))
    assert bool((with_chance.objective >= with_chance.initial).all())
