"""Continuous descent is never worse, stays on the orbit, and improves if rotations and scales are free."""

import importlib

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import regauge as rg
from regauge.alignment.result import Results
from regauge.core.behind_gains import lower
from regauge.core.params import Params
from regauge.nets.transformer import GPT


class Stream(nn.Module):
    """A stream that only linear layers and a normalization without gain use, with ReLU units inside of its blocks."""

    def __init__(self, has_mean: bool) -> None:
        super().__init__()
        self.embed, self.up = nn.Linear(3, 6, bias=False), nn.Linear(6, 5)
        self.down, self.head = nn.Linear(5, 6), nn.Linear(6, 4)
        self.has_mean = has_mean

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        normal = functional.layer_norm if self.has_mean else functional.rms_norm
        x = x + self.down(self.up(normal(x, (6,))).relu())
        return self.head(normal(x, (6,)))


def drawn(module: nn.Module, seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        for name, tensor in module.state_dict().items()
    }


def taught(module: nn.Module, teacher: Params) -> rg.Task:
    """Return examples whose classes one network knows."""
    inputs = torch.randn(80, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    targets = torch.func.functional_call(module, teacher, (inputs,)).argmax(-1)
    return rg.Task(module, [(inputs[:40], targets[:40]), (inputs[40:], targets[40:])])


@pytest.fixture(params=[False, True], ids=["rms", "layer"])
def case(request: pytest.FixtureRequest) -> tuple[rg.Symmetry, rg.Task, Params, Params]:
    module = Stream(request.param).double()
    symmetry = rg.discover(module, (torch.randn(4, 3).double(),))
    assert {group.kind for group in symmetry.groups} == {"centered" if request.param else "orthogonal", "scaled"}
    a = drawn(module, 1)
    b = {name: tensor + 0.3 * drawn(module, 2)[name] for name, tensor in a.items()}
    b = symmetry.act(symmetry.random(torch.Generator().manual_seed(3)), b)
    return symmetry, taught(module, a), a, b


@pytest.mark.parametrize("loss", ["midpoint", "random"])
def test_it_lowers_the_loss_halfway_and_stays_on_the_orbit(
    case: tuple[rg.Symmetry, rg.Task, Params, Params], loss: str
) -> None:
    symmetry, task, a, b = case
    start = rg.align(a, b, symmetry)
    method = rg.ContinuousDescent(loss, init=start.element, steps=24, lr=0.06, every=8, kept=0)
    results = [
        rg.align(a, b, symmetry, method=method, task=task, generator=torch.Generator().manual_seed(0)) for _ in range(2)
    ]
    found = results[0]
    before, after = task.midpoint_loss(a, start.params), task.midpoint_loss(a, found.params)
    assert after < 0.9 * before
    if loss == "midpoint":
        assert found.objective == pytest.approx(-after, rel=1e-9)
        assert found.initial == pytest.approx(-task.midpoint_loss(a, b), rel=1e-9)
    assert list(found.history) == sorted(found.history)
    moved = symmetry.act(found.element, b)
    assert all(torch.equal(found.params[name], moved[name]) for name in b)
    assert all(torch.equal(found.params[name], results[1].params[name]) for name in b)
    x = task.batches[0][0]  # type: ignore[index]
    assert torch.allclose(task.run(found.params, x), task.run(b, x), rtol=1e-9, atol=1e-9)
    stream = next(group for group in symmetry.groups if group.matrix == "orthogonal")
    rotation = found.element[stream.name].matrix
    assert rotation is not None
    assert torch.allclose(rotation @ rotation.mT, torch.eye(6, dtype=torch.float64), atol=1e-12)
    if stream.keeps_ones:
        assert torch.allclose(rotation.sum(-1), torch.ones(6, dtype=torch.float64), atol=1e-12)


def test_it_is_never_worse_than_its_start_or_the_identity(case: tuple[rg.Symmetry, rg.Task, Params, Params]) -> None:
    symmetry, task, a, b = case
    wild = rg.ContinuousDescent("midpoint", init=None, steps=2, lr=50.0, every=2, kept=0)
    assert rg.align(a, b, symmetry, method=wild, task=task).objective >= -task.midpoint_loss(a, b)
    bad = symmetry.random(torch.Generator().manual_seed(5))
    wild = rg.ContinuousDescent("midpoint", init=bad, steps=2, lr=50.0, every=2, kept=0)
    found = rg.align(a, a, symmetry, method=wild, task=task)
    assert found.objective == -task.midpoint_loss(a, a)
    assert all(torch.equal(found.params[name], a[name]) for name in a)


def test_a_copy_stays_found(case: tuple[rg.Symmetry, rg.Task, Params, Params]) -> None:
    symmetry, task, a, _ = case
    copy = symmetry.act(symmetry.random(torch.Generator().manual_seed(4)), a)
    found = rg.align(a, copy, symmetry, method=rg.ContinuousDescent("midpoint", steps=8, kept=0), task=task)
    assert -found.objective <= task.midpoint_loss(
        a, rg.align(a, copy, symmetry, method=rg.alignment.MixedMatching(), task=task).params
    )
    assert task.midpoint_loss(a, found.params) <= task.evaluate(a)["loss"] * (1 + 1e-6)


def test_only_the_continuous_part_moves() -> None:
    module = GPT(7, 5, width=8, layers=1, heads=2).double()
    tokens = torch.randint(0, 7, (6, 5), generator=torch.Generator().manual_seed(0))
    symmetry = rg.discover(module, (tokens,))
    a, b = drawn(module, 1), drawn(module, 2)
    task = rg.Task(module, [(tokens[:, :-1], tokens[:, 1:])])
    start = symmetry.random(torch.Generator().manual_seed(1))
    method = rg.ContinuousDescent("midpoint", init=start, steps=20, lr=0.1, every=20, kept=0)
    found = rg.align(a, b, symmetry, method=method, task=task, rotate="never")
    first, second = (symmetry.split(one)[0] for one in (a, b))
    begun = symmetry.on_representatives().act(lower(symmetry, start), second)
    assert found.objective > -task.midpoint_loss(first, begun)
    changed = set()
    for group in symmetry.groups:
        one, other = start[group.name], found.element[group.name]
        for field in ("perm", "sign", "shift", "scale", "matrix"):
            left, right = getattr(one, field), getattr(other, field)
            if left is not None and not torch.equal(left, right):
                changed.add(field)
    assert changed == {"scale", "matrix", "sign"}  # Gains take over the signs of the first network's.


def test_scales_make_up_for_what_shrinks_halfway() -> None:
    """Halfway between the matched networks, activations are small, which raises the loss. Scales alone repair it."""
    module = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 2)).double()
    symmetry = rg.discover(module, (torch.randn(4, 3).double(),))
    inputs = torch.randn(256, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a, b = drawn(module, 1), drawn(module, 2)
    ends = [torch.func.functional_call(module, params, (inputs,)) for params in (a, b)]
    task = rg.Task(module, [(inputs, sum(ends) / 2)], functional.mse_loss)
    start = rg.align(a, b, symmetry)
    method = rg.ContinuousDescent("midpoint", init=start.element, steps=60, every=60)
    found = rg.align(a, b, symmetry, method=method, task=task)
    assert task.midpoint_loss(a, found.params) < 0.7 * task.midpoint_loss(a, start.params)
    assert torch.allclose(task.run(found.params, inputs), ends[1], rtol=1e-9, atol=1e-9)
    for group in symmetry.groups:
        assert torch.equal(found.element[group.name].perm, start.element[group.name].perm)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", ["midpoint", "random"])
def test_pairs_fall_in_one_program_as_they_do_alone(
    case: tuple[rg.Symmetry, rg.Task, Params, Params], loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    symmetry, task, a, b = case
    pairs = [(a, b), (b, a), (a, a)]
    first, second = ({name: torch.stack([pair[k][name] for pair in pairs]) for name in a} for k in (0, 1))
    method = rg.ContinuousDescent(loss, init=rg.WeightMatching(), steps=6, lr=0.06, every=3)

    def align(of: slice) -> Results:
        left, right = ({name: tensor[of] for name, tensor in one.items()} for one in (first, second))
        chance = torch.Generator().manual_seed(0)
        return rg.alignment.align_pairs(left, right, symmetry, method=method, task=task, generator=chance)

    together = align(slice(None))
    assert (together.objective[:2] > together.initial[:2]).all()
    assert together.objective[2] >= together.initial[2]
    for k in range(2):  # Between equal networks Adam follows rounding errors.
        alone = align(slice(k, k + 1))
        assert torch.allclose(alone.objective, together.objective[k : k + 1], rtol=1e-9)
    monkeypatch.setattr(importlib.import_module("regauge.alignment.descent_method"), "PROGRAM", 1)
    assert (align(slice(None)).objective >= together.initial).all()


def test_without_continuous_freedom_the_start_is_returned() -> None:
    module = nn.Sequential(nn.Linear(3, 6), nn.GELU(), nn.Linear(6, 4)).double()
    symmetry = rg.discover(module, (torch.randn(4, 3).double(),))
    a, b = drawn(module, 1), drawn(module, 2)
    task = taught(module, a)
    start = rg.align(a, b, symmetry, method=rg.alignment.MixedMatching(), task=task)
    found = rg.align(a, b, symmetry, method=rg.ContinuousDescent(init=start.element), task=task)
    assert found.is_converged
    best = start.params if task.midpoint_loss(a, start.params) <= task.midpoint_loss(a, b) else b
    assert all(torch.equal(found.params[name], best[name]) for name in b)


def test_what_it_needs() -> None:
    with pytest.raises(ValueError, match="choose 'midpoint' or 'random'"):
        rg.ContinuousDescent("l2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scale_lr=0\.0: both must be positive"):
        rg.ContinuousDescent(scale_lr=0.0)


def test_gains_of_batch_normalization_are_descended_on() -> None:
    """Only scales of the gains preserve running statistics. Representatives, whose gains are one, lose the scales of
    gains.
    """
    module = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double().eval()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=generator, dtype=torch.float64)
    symmetry = rg.discover(module, (x,))
    base = {
        n: t if t.ndim == 0 else t + torch.rand(t.shape, generator=generator, dtype=t.dtype)
        for n, t in module.state_dict().items()
    }
    a, b = (
        {
            n: t
            if t.ndim == 0 or n in symmetry.buffers
            else t + torch.randn(t.shape, generator=generator, dtype=t.dtype)
            for n, t in base.items()
        }
        for _ in range(2)
    )
    teacher = torch.func.functional_call(module, base, (x,)).detach()
    task = rg.Task(module, [(x, teacher)], nn.functional.mse_loss)
    plain = rg.align(a, b, symmetry, method=rg.WeightMatching())
    descent = rg.ContinuousDescent("midpoint", init=rg.WeightMatching(), steps=40)
    found = rg.align(a, b, symmetry, method=descent, task=task)
    assert task.midpoint_loss(a, found.params) < 0.9 * task.midpoint_loss(a, plain.params)
    outputs = [torch.func.functional_call(module, one, (x,)) for one in (b, found.params)]
    assert torch.allclose(*outputs, atol=1e-9)
    assert all(torch.equal(found.params[n].sort().values, b[n].sort().values) for n in symmetry.buffers if b[n].ndim)
    assert not descent.reads_representatives(symmetry, has_task=True)
    for other, kind in ((nn.Linear(8, 8), True), (nn.LayerNorm(8), True)):  # Nothing is lost, or streams are rotated.
        net = nn.Sequential(nn.Linear(3, 8), other, nn.ReLU(), nn.Linear(8, 2)).double()
        assert descent.reads_representatives(rg.discover(net, (x,)), has_task=True) == kind
