"""Sinkhorn: plans are doubly stochastic with correct gradients, even near saturation, and matching never becomes
worse.
"""

import importlib
import itertools
import math
from dataclasses import replace

import mpmath
import pytest
import torch
from methods import two_students
from models import CASES, symmetry_of
from symmetries import BY_HAND, drawn, experts, generator, mlp_symmetry, normalized_groups
from torch import Tensor, nn

import regauge as rg
from regauge import Params, Sinkhorn, Symmetry, WeightMatching
from regauge.relaxed.sinkhorn_layer import sinkhorn


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def unrolled(logits: Tensor, temperature: float, iterations: int) -> Tensor:
    """Return the same plan, differentiated through all iterations."""
    plan = logits / temperature
    for _ in range(iterations):
        plan = plan - plan.logsumexp(-1, keepdim=True)
        plan = plan - plan.logsumexp(-2, keepdim=True)
    return plan.exp()


# --- the operator ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [10.0, 1.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plans_are_doubly_stochastic(temperature: float, dtype: torch.dtype) -> None:
    logits = normal(3, 12, 12, seed=0, dtype=dtype)
    plan, potentials = sinkhorn(logits, temperature, tolerance=1e-5, max_iterations=5000)
    assert plan.dtype == dtype
    assert torch.allclose(plan.sum(-1), torch.ones(3, 12, dtype=dtype), atol=2e-5)
    assert torch.allclose(plan.sum(-2), torch.ones(3, 12, dtype=dtype), atol=2e-5)
    scaled = plan.log() - logits / temperature - potentials.unsqueeze(-2)
    assert torch.allclose(scaled, scaled[..., :1].expand_as(scaled), atol=1e-3)


def test_a_batch_is_its_members_and_vmap_is_a_batch() -> None:
    logits, gradient = normal(4, 7, 7, seed=0), normal(4, 7, 7, seed=1)

    def pulled(x: Tensor, g: Tensor) -> Tensor:
        return (sinkhorn(x, 0.5, tolerance=1e-12)[0] * g).sum()

    whole = torch.func.grad(pulled)(logits, gradient)
    single = torch.stack([torch.func.grad(pulled)(x, g) for x, g in zip(logits, gradient, strict=True)])
    assert torch.allclose(whole, single, atol=1e-10)
    assert torch.allclose(torch.func.vmap(torch.func.grad(pulled))(logits, gradient), single, atol=1e-10)
    mapped = torch.func.vmap(lambda x: sinkhorn(x, 0.5, tolerance=1e-12)[0], in_dims=2)(logits.movedim(0, 2))
    assert torch.allclose(mapped, sinkhorn(logits, 0.5, tolerance=1e-12)[0], atol=1e-10)


def test_the_gradient_agrees_with_finite_differences() -> None:
    logits = normal(2, 6, 6, seed=0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 0.7, tolerance=1e-14)[0], logits)


@pytest.mark.parametrize("n", [2, 5, 40])
@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_the_gradient_agrees_with_the_unrolled_one(n: int, temperature: float) -> None:
    logits, gradient = normal(n, n, seed=n).requires_grad_(), normal(n, n, seed=1)
    implicit = torch.autograd.grad(
        sinkhorn(logits, temperature, tolerance=1e-13, max_iterations=4000)[0], logits, gradient
    )
    expected = torch.autograd.grad(unrolled(logits, temperature, 4000 if temperature < 1 else 400), logits, gradient)
    assert torch.allclose(implicit[0], expected[0], rtol=1e-6, atol=1e-9 / temperature)


@pytest.mark.parametrize("temperature", [1e-2, 1e-3])
def test_the_gradient_agrees_with_the_unrolled_one_near_saturation(temperature: float) -> None:
    logits = temperature * (normal(8, 8, seed=1) + 6 * torch.eye(8).double()).requires_grad_()
    gradient = normal(8, 8, seed=2)
    plan, _ = sinkhorn(logits, temperature, tolerance=1e-14)
    assert float(plan.detach().diagonal().min()) > 0.8
    (implicit,) = torch.autograd.grad(plan, logits, gradient)
    (expected,) = torch.autograd.grad(unrolled(logits, temperature, 3000), logits, gradient)
    assert torch.allclose(implicit, expected, rtol=1e-6, atol=1e-9 * float(expected.abs().max()))


def reference(plan: Tensor, gradient: Tensor) -> Tensor:
    """Solve the same system of equations with sixty digits."""
    n = len(plan)
    with mpmath.workdps(60):
        p = mpmath.matrix(plan.tolist())
        h = mpmath.matrix(n, n)
        for i, j in itertools.product(range(n), range(n)):
            h[i, j] = p[i, j] * mpmath.mpf(float(gradient[i, j]))
        left, right = mpmath.matrix(2 * n - 1, 2 * n - 1), mpmath.matrix(2 * n - 1, 1)
        for i, j in itertools.product(range(n), range(n)):  # The last of y is zero: constants do not matter.
            left[i, i] += p[i, j]
            right[i] += h[i, j]
            if j < n - 1:
                left[n + j, n + j] += p[i, j]
                left[i, n + j] = left[n + j, i] = p[i, j]
                right[n + j] += h[i, j]
        found = [*mpmath.lu_solve(left, right), mpmath.mpf(0)]
        rows = [[float(h[i, j] - p[i, j] * (found[i] + found[n + j])) for j in range(n)] for i in range(n)]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("margin", [0, 5, 12, 25])
def test_vanishing_gradients_of_saturated_plans_keep_their_direction(margin: int) -> None:
    """Everything except a permutation has the size exp(-margin), and so does the gradient."""
    n = 7
    order = torch.randperm(n, generator=generator(0))
    logits, gradient = normal(n, n, seed=1), normal(n, n, seed=2)
    logits[torch.arange(n), order] += margin
    logits.requires_grad_()
    for dtype, least in ((torch.float64, 1e-6), (torch.float32, 2e-3)):
        plan, _ = sinkhorn(logits.to(dtype), tolerance=1e-6)
        (found,) = torch.autograd.grad(plan, logits, gradient.to(dtype))
        expected = reference(plan.detach().double(), gradient.to(dtype).double())
        assert float(expected.abs().max()) < 20 * math.exp(-margin)
        assert float((found - expected).abs().max()) < least * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-2, 1e-3, 1e-5])
def test_gradients_are_finite_and_bounded_at_small_temperatures(temperature: float, dtype: torch.dtype) -> None:
    logits = normal(5, 20, 20, seed=0, dtype=dtype).requires_grad_()
    plan, _ = sinkhorn(logits, temperature, max_iterations=2000)
    gradient = normal(5, 20, 20, seed=1, dtype=dtype)
    assert torch.allclose(plan.sum(-1), torch.ones(5, 20, dtype=dtype), atol=1e-2)
    (found,) = torch.autograd.grad(plan, logits, gradient)
    assert bool(found.isfinite().all())
    assert bool(plan.isfinite().all())
    assert torch.allclose(found.sum(-1), torch.zeros(5, 20, dtype=dtype), atol=1e-3 / temperature)
    exact = (1000 * torch.eye(20, dtype=dtype)).requires_grad_()
    (none,) = torch.autograd.grad(sinkhorn(exact, temperature)[0], exact, gradient[0])
    assert torch.equal(none, torch.zeros_like(none))


def test_old_potentials_save_iterations_and_change_nothing() -> None:
    logits = 3 * normal(30, 30, seed=0)
    plan, potentials = sinkhorn(logits, 0.5, tolerance=1e-10, max_iterations=100_000)
    once, _ = sinkhorn(logits, 0.5, potentials=potentials, max_iterations=1)
    assert torch.allclose(once, plan, atol=1e-8)
    cold, _ = sinkhorn(logits, 0.5, max_iterations=1)
    assert not torch.allclose(cold, plan, atol=1e-3)


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logits have shape \(2, 3\); plans need square matrices"):
        sinkhorn(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="temperature=0, tolerance=1e-06, max_iterations=1000: all must be positive"):
        sinkhorn(torch.zeros(2, 2), 0)


# --- matching --------------------------------------------------------------------------------------------------

PARTS = ("permutation", "sign", "linear")
SHORT = {"steps": 6, "every": 2}


def distance(a: Params, b: Params) -> float:
    return sum(float((a[n] - b[n]).square().sum()) for n in a)


@pytest.mark.parametrize("name", BY_HAND)
def test_it_never_falls_nor_ends_below_its_start_and_reports_what_it_reaches(name: str) -> None:
    symmetry = BY_HAND[name]
    a, b = drawn(symmetry, 0), drawn(symmetry, 1)
    for start in (None, symmetry.random(generator(0), PARTS), WeightMatching()):
        result = rg.align(a, b, symmetry, method=Sinkhorn(loss="l2", init=start, **SHORT))
        if isinstance(start, rg.Element):
            assert result.objective >= -distance(a, symmetry.act(start, b)) - 1e-9
        assert result.objective >= result.initial == pytest.approx(-distance(a, b))
        assert result.objective == pytest.approx(-distance(a, result.params))
        assert all(x <= y for x, y in itertools.pairwise(result.history))
        assert len(result.history) == (1 if name in ("orthogonal", "centered", "rotation", "linear") else 4)
        moved = symmetry.act(result.element, b)
        assert all(torch.equal(moved[key], result.params[key]) for key in b)


@pytest.mark.parametrize(
    "symmetry",
    [mlp_symmetry(6, 7, 4), mlp_symmetry(6, 7, 4, kind="signed"), experts(3, 4, 6), normalized_groups(3, 4, 12)],
    ids=["permutation", "signed", "experts", "normalized groups"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_recovers_what_was_planted_from_the_identity(symmetry: Symmetry, dtype: torch.dtype) -> None:
    for seed in range(3):
        a = drawn(symmetry, seed, dtype)
        b = symmetry.act(symmetry.random(generator(seed), PARTS), a)
        result = rg.align(a, b, symmetry, method=Sinkhorn(loss="l2", init=None, steps=80, lr=0.3))
        assert all(torch.equal(result.params[key], a[key]) for key in a)
        assert result.params["w1" if "w1" in a else next(iter(a))].dtype == dtype


@pytest.mark.parametrize("loss", ["midpoint", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_between_the_networks_falls(loss: str, dtype: torch.dtype) -> None:
    gained = 0
    for seed in range(3):
        _, symmetry, a, b, task = two_students(10 * seed, dtype)
        start = symmetry.random(generator(seed), PARTS)
        method = Sinkhorn(loss=loss, init=start, steps=40, kept=0)  # type: ignore[arg-type]
        result = rg.align(a, b, symmetry, method=method, task=task, generator=generator(0))
        points = (0.5,) if loss == "midpoint" else (0.25, 0.5, 0.75)

        def judged(moved: Params, task: rg.Task = task, a: Params = a, points: tuple[float, ...] = points) -> float:
            between = [{n: torch.lerp(a[n], moved[n], t) for n in a} for t in points]
            return -sum(task.evaluate(p)["loss"] for p in between) / len(points)

        assert result.objective == pytest.approx(judged(result.params), rel=1e-5)
        assert result.initial == pytest.approx(judged(b), rel=1e-5)
        assert result.objective >= max(result.initial, judged(symmetry.act(start, b)) - 1e-6)
        gained += result.objective > result.history[0]
    assert gained == 3


def test_many_pairs_are_the_single_ones() -> None:
    _, symmetry, a, b, task = two_students(0)
    others = [symmetry.act(symmetry.random(generator(k), PARTS), b) for k in range(3)]
    many = {n: torch.stack([other[n] for other in others]) for n in b}
    starts = symmetry.random(generator(5), PARTS, batch=(3,))
    for loss in ("l2", "midpoint"):
        method = Sinkhorn(loss=loss, init=starts, **SHORT)  # type: ignore[arg-type]
        together = rg.alignment.align_pairs(a, many, symmetry, method=method, task=task)
        for k, other in enumerate(others):
            alone = Sinkhorn(loss=loss, init=starts.item(k), **SHORT)  # type: ignore[arg-type]
            single = rg.align(a, other, symmetry, method=alone, task=task)
            assert float(together.objective[k]) == pytest.approx(single.objective)
            assert together.history[:, k].tolist() == pytest.approx(list(single.history))
            assert all(torch.allclose(together.params[n][k], single.params[n]) for n in b)


def test_pairs_that_take_turns_are_those_of_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    symmetry = BY_HAND["signed experts"]
    a = {n: torch.stack([t, 2 * t, -t]) for n, t in drawn(symmetry, 0).items()}
    b = {n: torch.stack([t, t.flip(0), t + 1]) for n, t in drawn(symmetry, 1).items()}
    whole = rg.alignment.align_pairs(a, b, symmetry, method=Sinkhorn(loss="l2", **SHORT))
    size = sum(t[0].numel() for t in b.values())
    monkeypatch.setattr(importlib.import_module("regauge.alignment.descent_method"), "PROGRAM", 2 * size)
    parts = rg.alignment.align_pairs(a, b, symmetry, method=Sinkhorn(loss="l2", **SHORT))
    assert torch.allclose(whole.objective, parts.objective)
    assert torch.allclose(whole.history, parts.history)
    assert all(torch.allclose(whole.params[n], parts.params[n]) for n in b)


@pytest.mark.parametrize("name", ["cnn_flatten", "grouped_conv", "torch_transformer", "lstm", "resnet20_layer_B"])
def test_architectures(name: str) -> None:
    """With a hidden element and noise, a few steps from the identity remove nearly all of the distance."""
    (case,) = [case for case in CASES if case.name == name]
    symmetry = symmetry_of(case)
    a = {n: normal(*s, seed=k, dtype=torch.float32) for k, (n, s) in enumerate(symmetry.shapes.items())}
    moved = symmetry.act(symmetry.random(generator(0), ("permutation", "sign")), a)
    b = {n: t + 0.1 * normal(*t.shape, seed=1000 + k, dtype=torch.float32) for k, (n, t) in enumerate(moved.items())}
    # As they are: gains drawn around zero would multiply the noise of what reads behind them.
    symmetry = replace(symmetry, translations=(), gains=())
    result = rg.align(a, b, symmetry, method=Sinkhorn(loss="l2", init=None, steps=8))
    assert result.objective > 0.05 * result.initial


def test_many_pairs_with_buffers() -> None:
    module = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    symmetry = rg.discover(module.eval(), (torch.zeros(2, 3),), verify=False)
    state = {n: t.float() for n, t in module.state_dict().items() if t.is_floating_point()}
    a = {n: t + 0.3 * torch.rand(t.shape, generator=generator(k)) for k, (n, t) in enumerate(state.items())}
    a["1.num_batches_tracked"] = torch.tensor(3)
    b = {
        n: torch.stack([symmetry.act(symmetry.random(generator(k), ("permutation",)), a)[n] for k in range(2)])
        for n in a
    }
    inputs = normal(20, 3, seed=0, dtype=torch.float32)
    targets = torch.func.functional_call(module, a, (inputs,)).detach()
    task = rg.Task(module, [(inputs, targets)], nn.functional.mse_loss)
    result = rg.alignment.align_pairs(a, b, symmetry, method=Sinkhorn(steps=4), task=task)
    assert float(result.objective.abs().max()) < 1e-6
    assert torch.allclose(result.params["1.running_var"], a["1.running_var"].expand(2, 6), rtol=1e-3)


def test_buffers_move_but_do_not_count_and_half_precision_is_kept() -> None:
    symmetry = Symmetry.from_axes({"w": ("h", None), "v": (None, "h"), "mean": ("h",)}, buffers=["mean"])
    a = {n: normal(*s, seed=k, dtype=torch.bfloat16) for k, (n, s) in enumerate({"w": (6, 9), "v": (3, 6)}.items())}
    order = torch.randperm(6, generator=generator(0))
    b = {"w": a["w"][order], "v": a["v"][:, order], "mean": torch.arange(6).bfloat16()}
    result = rg.align(
        {**a, "mean": torch.zeros(6).bfloat16()}, b, symmetry, method=Sinkhorn(loss="l2", init=None, lr=0.3)
    )
    assert torch.equal(result.params["w"], a["w"])
    assert torch.equal(result.params["mean"], b["mean"][order.argsort()])


def test_nothing_to_choose() -> None:
    symmetry, params = Symmetry((), {"w": (2,)}), {"w": torch.ones(2)}
    result = rg.align(params, {"w": torch.zeros(2)}, symmetry, method=Sinkhorn(loss="l2"))
    assert torch.equal(result.params["w"], torch.zeros(2))


def test_the_last_element_is_kept_where_it_is_wanted_even_if_it_is_worse() -> None:
    symmetry = mlp_symmetry(6, 7, 4)
    a, b = drawn(symmetry, 0), drawn(symmetry, 1)
    best, last = (
        rg.align(a, b, symmetry, method=Sinkhorn(loss="l2", lr=30.0, steps=3, every=3, keeps=keeps))  # type: ignore[arg-type]
        for keeps in ("best", "last")
    )
    assert best.starts == last.starts
    assert last.starts[-1] < last.starts[0]
    assert best.objective == best.starts[0] == pytest.approx(-distance(a, best.params))
    assert last.objective == last.starts[-1] == pytest.approx(-distance(a, last.params))
    assert last.history == pytest.approx(last.starts)


def test_methods_are_checked() -> None:
    with pytest.raises(ValueError, match="loss is 'middle'; choose 'l2', 'midpoint' or 'random'"):
        Sinkhorn(loss="middle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"confidence=1: lr and temperature must be positive and confidence between"):
        Sinkhorn(confidence=1)
