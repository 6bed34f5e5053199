"""Methods that learn an element from a task reserve examples for selection, and a longer run is never worse on these
examples.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from methods import two_students
from symmetries import generator
from torch import Tensor, nn
from torch.nn import functional

import regauge as rg
from regauge import Params, Symmetry
from regauge.alignment.descent_method import LINE_POINTS, DescentMethod
from regauge.core.params import select

METHODS: dict[str, Callable[..., DescentMethod]] = {
    "straight-through": rg.StraightThrough,
    "sinkhorn, midpoint": rg.Sinkhorn,
    "sinkhorn, random": lambda **settings: rg.Sinkhorn("random", **settings),
    "continuous descent, midpoint": lambda **settings: rg.ContinuousDescent("midpoint", **settings),
    "continuous descent, random": rg.ContinuousDescent,
}
"""Every method that learns an element from a task, by the quantity on which it descends."""
each_method = pytest.mark.parametrize("name", METHODS)
PARTS = ("permutation", "sign")


class Rectified(nn.Module):
    """A network with all kinds of units that the methods can change: permuted and rescaled units."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(3, 10), nn.Linear(10, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(x).relu()).relu())


def case(seed: int) -> tuple[Symmetry, Params, Params, rg.Task]:
    """Return two networks that learned the same classes with errors, in batches that can all be split."""
    module = Rectified().double()
    symmetry = rg.discover(module, (torch.randn(4, 3).double(),), verify=False)
    chance = generator(seed)
    drawn = [{n: torch.randn(t.shape, generator=chance).double() for n, t in module.state_dict().items()} for _ in "ab"]
    a = drawn[0]
    b = {name: tensor + 0.7 * drawn[1][name] for name, tensor in a.items()}
    b = symmetry.act(symmetry.random(chance, PARTS), b)
    inputs = torch.randn(60, 3, generator=chance).double()
    targets = torch.func.functional_call(module, a, (inputs,)).argmax(-1)
    return symmetry, a, b, rg.Task(module, list(zip(inputs.split(20), targets.split(20), strict=True)))


def on_line(task: rg.Task, a: Params, b: Params, method: DescentMethod) -> float:
    """Return the mean loss at the points where a method evaluates elements."""
    points = LINE_POINTS if getattr(method, "loss", "") == "random" else (0.5,)
    between = [{name: torch.lerp(a[name], b[name], t) for name in a} for t in points]
    return sum(task.evaluate(one)["loss"] for one in between) / len(between)


@each_method
def test_all_such_methods_are_in_the_list(name: str) -> None:
    found = {type(make()) for make in METHODS.values()}
    assert found == set(DescentMethod.__subclasses__())
    assert {row.load() for row in rg.alignment.METHODS.values()} >= found
    assert isinstance(METHODS[name](), rg.alignment.Method)


@each_method
@pytest.mark.parametrize("seed", range(3))
def test_a_longer_run_goes_on_where_a_shorter_one_ends_and_is_never_worse(name: str, seed: int) -> None:
    symmetry, a, b, task = case(seed)
    runs = [
        rg.align(a, b, symmetry, method=METHODS[name](steps=steps, every=6), task=task, generator=generator(1))
        for steps in (6, 12, 30)
    ]
    for short, long in itertools.pairwise(runs):
        assert long.starts[: len(short.starts)] == short.starts
        assert long.history[: len(short.history)] == short.history
        assert long.objective >= short.objective
    assert [len(one.starts) for one in runs] == [2, 3, 6]


@each_method
@pytest.mark.parametrize("seed", range(3))
def test_the_objective_is_that_of_examples_from_which_nothing_is_learned(name: str, seed: int) -> None:
    symmetry, a, b, task = case(seed)
    method = METHODS[name](steps=6, every=3)
    found = rg.align(a, b, symmetry, method=method, task=task)
    _, kept = task.split(0.75)
    assert found.objective == pytest.approx(-on_line(kept, a, found.params, method), rel=1e-9)
    assert found.initial == pytest.approx(-on_line(kept, a, b, method), rel=1e-9)
    assert found.objective >= found.initial
    assert list(found.history) == sorted(found.history)
    assert found.objective == max(found.initial, *found.starts)
    assert not any("too few examples" in note for note in found.notes)


@each_method
def test_kept_examples_do_not_teach(name: str) -> None:
    """Other labels of the reserved examples change the selection, but not the tried elements."""
    symmetry, a, b, task = case(0)
    seen, kept = task.split(0.75)
    wrong = [(x, (y + 1) % 3) for x, y in kept.batches]

    class Divided(rg.Task):
        labels: Any = kept.batches

        def split(self, share: float = 0.5, *, generator: torch.Generator | None = None) -> tuple[rg.Task, rg.Task]:
            return seen, replace(kept, batches=type(self).labels)

    tried: list[Tensor] = []
    for labels in (kept.batches, wrong):
        Divided.labels = labels
        given = Divided(task.module, task.batches)
        method = METHODS[name](init=symmetry.identity(), steps=6, every=6)
        losses = rg.alignment.Problem.line_losses

        def measure(self: Any, params: Any, *rest: Any, losses: Any = losses) -> Tensor:
            tried.append(torch.cat([tensor.flatten() for tensor in params.values()]))
            return losses(self, params, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rg.alignment.Problem, "line_losses", measure)
            rg.align(a, b, symmetry, method=method, task=given)
    half = len(tried) // 2
    assert half == 3
    assert all(torch.equal(x, y) for x, y in zip(tried[:half], tried[half:], strict=True))


@each_method
def test_it_is_never_worse_than_its_start_or_the_identity(name: str) -> None:
    symmetry, a, b, task = case(1)
    kept = task.split(0.75)[1]
    wild = {"lr": 50.0, "steps": 2, "every": 1}
    method = METHODS[name](init=None, **wild)
    assert rg.align(a, b, symmetry, method=method, task=task).objective >= -on_line(kept, a, b, method)
    bad = METHODS[name](init=symmetry.random(generator(5)), **wild)
    found = rg.align(a, a, symmetry, method=bad, task=task)
    assert found.objective >= -on_line(kept, a, a, bad)
    start = rg.align(a, b, symmetry, method=rg.WeightMatching())
    method = METHODS[name](init=start.element, **wild)
    found = rg.align(a, b, symmetry, method=method, task=task)
    assert found.objective >= -on_line(kept, a, start.params, method)


@each_method
def test_what_cannot_be_split_teaches_and_chooses_and_the_result_says_so(name: str) -> None:
    symmetry, a, b, task = case(0)
    single = replace(task, batches=[(x[:1], y[:1]) for x, y in task.batches[:1]])  # type: ignore[index]
    method = METHODS[name](steps=3, every=3)
    found = rg.align(a, b, symmetry, method=method, task=single)
    assert "there are too few examples to keep some" in str(found)
    assert found.objective == pytest.approx(-on_line(single, a, found.params, method), rel=1e-9)
    everything = METHODS[name](steps=3, every=3, kept=0)
    found = rg.align(a, b, symmetry, method=everything, task=task)
    assert found.objective == pytest.approx(-on_line(task, a, found.params, method), rel=1e-9)
    assert "too few" not in str(found)


@each_method
def test_methods_within_others_choose_on_the_same_examples(name: str) -> None:
    symmetry, a, b, task = case(2)
    kept = task.split(0.75)[1]
    inner = METHODS[name](steps=6, every=3)
    alone = rg.align(a, b, symmetry, method=inner, task=task)
    for outer in (rg.alignment.BestOf((inner,)), rg.ContinuousDescent("midpoint", init=inner, steps=3, every=3)):
        found = rg.align(a, b, symmetry, method=outer, task=task)
        halfway = -kept.midpoint_loss(a, alone.params)
        assert found.objective >= halfway - 1e-12
        assert found.objective == pytest.approx(-kept.midpoint_loss(a, found.params), rel=1e-9)


@each_method
def test_seconds_end_a_run_at_a_judgement(name: str) -> None:
    symmetry, a, b, task = case(0)
    short = METHODS[name](steps=10_000, every=4, seconds=1e-9)
    once = METHODS[name](steps=4, every=4)
    found, wanted = (rg.align(a, b, symmetry, method=method, task=task) for method in (short, once))
    assert found.starts == wanted.starts
    assert all(torch.equal(found.params[n], wanted.params[n]) for n in a)


@each_method
def test_pairs_are_as_they_are_alone(name: str) -> None:
    symmetry, a, b, task = case(0)
    pairs = [(a, b), (b, a)]
    first, second = ({n: torch.stack([pair[k][n] for pair in pairs]) for n in a} for k in (0, 1))
    method = METHODS[name](init=rg.WeightMatching(), steps=6, every=3)
    together = rg.alignment.align_pairs(first, second, symmetry, method=method, task=task)
    for k, (x, y) in enumerate(pairs):
        alone = rg.align(x, y, symmetry, method=method, task=task)
        assert together.history[:, k].tolist() == pytest.approx(list(alone.history), rel=1e-6)
        assert all(torch.allclose(select(together.params, k)[n], alone.params[n], rtol=1e-5, atol=1e-8) for n in a)


@each_method
def test_without_targets_outputs_of_both_ends_teach(name: str) -> None:
    """The result does not depend on the values in place of targets. On the line, the network learns the interpolated
    outputs.
    """
    symmetry, a, b, task = case(1)
    method = METHODS[name](init=rg.WeightMatching(), steps=12, every=6)
    inputs = [x for x, _ in task.batches]
    given = [[(x, None) for x in inputs], [(x, torch.ones(len(x))) for x in inputs]]
    blank = [replace(task, batches=batches, has_targets=False) for batches in given]
    found, other = (rg.align(a, b, symmetry, method=method, task=one) for one in blank)
    assert found.history == other.history
    assert all(torch.equal(found.params[n], other.params[n]) for n in a)
    kept = replace(task, has_targets=False).split(0.75)[1]
    inputs = [x for x, _ in kept.batches]
    points = LINE_POINTS if getattr(method, "loss", "") == "random" else (0.5,)
    wanted = []
    for t in points:
        between = {n: torch.lerp(a[n], found.params[n], t) for n in a}
        errors = [(task.run(between, x) - torch.lerp(task.run(a, x), task.run(b, x), t)).square() for x in inputs]
        wanted.append(float(torch.cat(errors).mean()))
    assert found.objective == pytest.approx(-sum(wanted) / len(wanted), rel=1e-9)


@each_method
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kept": 1}, "kept is 1, but this share of the examples must be at least 0"),
        ({"kept": -0.1}, "kept is -0.1"),
        ({"steps": 0}, r"steps=0, every=\d+: both must be at least 1"),
        ({"every": 0}, "every=0: both must be at least 1"),
        ({"seconds": 0}, "seconds is 0, but a limit must be positive and finite"),
        ({"seconds": float("inf")}, "seconds is inf"),
        ({"lr": 0.0}, r"lr.* must be positive|both must be positive|lr and temperature must be positive"),
    ],
)
def test_settings_are_checked(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        METHODS[name](**settings)


@each_method
def test_data_are_needed(name: str) -> None:
    _, symmetry, a, b, task = two_students(0)
    with pytest.raises(ValueError, match=r"needs data: give align a `task=regauge.Task"):
        rg.align(a, b, symmetry, method=METHODS[name]())
    with pytest.raises(ValueError, match="the task has no batches"):
        rg.align(a, b, symmetry, method=METHODS[name](init=None), task=rg.Task(task.module, []))


def test_learning_helps_on_examples_that_neither_taught_nor_chose() -> None:
    """Forty examples are not memorized: the selected element is also better on other examples."""
    module = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 2)).double()
    symmetry = rg.discover(module, (torch.randn(4, 3).double(),), verify=False)
    gains = []
    for seed in range(3):
        chance = generator(seed)
        a, b = (
            {n: torch.randn(t.shape, generator=chance).double() for n, t in module.state_dict().items()} for _ in "ab"
        )
        inputs = torch.randn(440, 3, generator=chance).double()
        ends = [torch.func.functional_call(module, params, (inputs,)) for params in (a, b)]
        targets = sum(ends) / 2
        task, elsewhere = (
            rg.Task(module, [(inputs[rows], targets[rows])], functional.mse_loss)
            for rows in (slice(40), slice(40, None))
        )
        start = rg.align(a, b, symmetry)
        method = rg.ContinuousDescent("midpoint", init=start.element, steps=200)
        found = rg.align(a, b, symmetry, method=method, task=task)
        gains.append(elsewhere.midpoint_loss(a, found.params) / elsewhere.midpoint_loss(a, start.params))
    assert max(gains) < 1
    assert sum(gains) / 3 < 0.8
