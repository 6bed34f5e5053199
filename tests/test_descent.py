"""Descent: the steps equal those of torch's optimizers and schedulers, and the best parameters within the time limit
are returned.
"""

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from progress import Recorded
from torch import Tensor

from regauge.core.params import Params
from regauge.training import (
    SGD,
    Adam,
    AdamW,
    Constant,
    Cosine,
    DescentConfig,
    OneCycle,
    Optimizer,
    PlainProgram,
    Schedule,
    descend,
    differentiate,
    minimize,
)
from regauge.training.descent import Clock
from regauge.training.settings import Uniform

Schedulers = torch.optim.lr_scheduler


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def quadratic(params: Params, target: Tensor) -> Tensor:
    return (params["w"] @ params["x"] - target).square().sum()


def start() -> Params:
    generator = seeded()
    return {
        "w": torch.randn(3, 4, generator=generator, dtype=torch.float64),
        "x": torch.randn(4, 2, generator=generator, dtype=torch.float64),
        "unused": torch.ones(2, dtype=torch.float64),
    }


def targets() -> Iterator[Tensor]:
    generator = seeded(1)
    while True:
        yield torch.randn(3, 2, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (Adam(0.02), lambda p: torch.optim.Adam(p, 0.02)),
        (AdamW(0.02, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1)),
        (SGD(0.01, momentum=0.9), lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)),
    ],
)
@pytest.mark.parametrize(
    ("schedule", "scheduler"),
    [
        (Constant(), lambda o: Schedulers.ConstantLR(o, 1.0)),
        (Cosine(), lambda o: Schedulers.CosineAnnealingLR(o, 12)),
        (OneCycle(), lambda o: Schedulers.OneCycleLR(o, o.param_groups[0]["lr"], 12, cycle_momentum=False)),
    ],
)
def test_steps_are_those_of_torch(optimizer: Optimizer, make, schedule: Schedule, scheduler) -> None:
    before = start()
    progress = Recorded()
    found = minimize(
        *(differentiate(quadratic), before, targets()),
        DescentConfig(steps=12, optimizer=optimizer, schedule=schedule),
        progress=progress,
    )
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in start().items()}
    expected = make(list(leaves.values()))
    rates = scheduler(expected)
    losses = []
    for target in itertools.islice(targets(), 12):
        loss = quadratic(leaves, target)
        expected.zero_grad()
        loss.backward()
        expected.step()
        rates.step()
        losses.append(loss.item())
    for name, tensor in leaves.items():
        torch.testing.assert_close(found.params[name], tensor.detach(), rtol=1e-12, atol=1e-12)
        assert torch.equal(before[name], start()[name])
    assert found.losses.tolist() == pytest.approx(losses)
    assert progress.losses == found.losses.tolist()
    assert (progress.totals, progress.amounts) == ([12], [1] * 12)


def test_parameters_may_have_learning_rates_of_their_own() -> None:
    program = PlainProgram(differentiate(quadratic), start(), SGD(0.1), lrs={"x": 0.0})
    states = list(descend(program, targets(), steps=3))
    assert [state.step for state in states] == [1, 2, 3]
    found = program.params()
    assert torch.equal(found["x"], start()["x"])
    assert not torch.equal(found["w"], start()["w"])


def test_several_losses_are_independent_descents() -> None:
    params = {"w": torch.tensor([1.0, 2.0, float("nan")])}
    program = PlainProgram(differentiate(lambda p, _: p["w"].square()), params, SGD(0.25))
    *_, last = descend(program, itertools.repeat(None), steps=2)
    assert last.loss.shape == (3,)
    assert program.params()["w"][:2].tolist() == [0.25, 0.5]


@pytest.mark.parametrize(
    ("seconds", "rates"), [(0.0, [9]), (1.0, [9]), (3.5, [2, 8]), (99.0, range(10)), (None, range(10))]
)
def test_time_ends_a_descent_and_the_schedule_with_it(
    seconds: float | None, rates: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, read = itertools.count(), list[int]()  # a second passes at every look
    monkeypatch.setattr("regauge.training.descent.time.monotonic", lambda: float(next(now)))

    def batches() -> Iterator[Tensor]:
        for k, target in enumerate(targets()):
            read.append(k)
            yield target

    program = PlainProgram(differentiate(quadratic), start(), Adam(0.1))
    states = list(descend(program, batches(), steps=10, schedule=Cosine(), clock=Clock(seconds)))
    assert len(states) == len(read) == len(rates)
    assert [state.is_last for state in states] == [False] * (len(rates) - 1) + [True]
    assert [state.rate for state in states] == [Cosine().rate(at, 10) for at in rates]


def test_descents_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"in step 2 of 5 the loss is inf; try a smaller lr than 1e\+100"):
        minimize(differentiate(quadratic), start(), targets(), DescentConfig(steps=5, optimizer=SGD(1e100)))
    with pytest.raises(ValueError, match=r"lr is Uniform\(low=0.1, high=0.2\), but must be a number here"):
        PlainProgram(differentiate(quadratic), start(), Adam(Uniform(0.1, 0.2)))
    assert DescentConfig(epochs=3, batch=4).count_steps(10) == 9
    assert DescentConfig(epochs=0.5, batch=None).count_steps(10) == 1
