"""Optimizers on stacked tensors and schedules: they equal torch's results for each network alone, in float64."""

import math
from collections.abc import Sequence

import pytest
import torch
from coverings import covering
from torch import Tensor

from regauge.training import SGD, Adam, AdamW, Constant, Cosine, LogUniform, OneCycle, StepDecay
from regauge.training import optimizers as module_of_optimizers
from regauge.training.optimizers import Optimizer, stack_optimizer
from regauge.training.schedules import Rate, Schedule
from regauge.training.settings import Choice, Uniform, bounds, derive_seed, draw

NETWORKS, STEPS = 5, 7
SHAPES = ((3, 4), (3,), (), (2, 3, 2))
METHODS: dict[str, tuple[Optimizer, type[torch.optim.Optimizer], dict[str, object]]] = {
    "sgd": (SGD(lr=0.1), torch.optim.SGD, {}),
    "momentum": (SGD(lr=0.1), torch.optim.SGD, {}),
    "nesterov": (SGD(lr=0.1, momentum=0.5, is_nesterov=True), torch.optim.SGD, {"nesterov": True}),
    "adam": (Adam(lr=0.1, betas=(0.8, 0.95), eps=1e-6), torch.optim.Adam, {"betas": (0.8, 0.95), "eps": 1e-6}),
    "adamw": (AdamW(lr=0.1), torch.optim.AdamW, {}),
}
SETTINGS = {
    "lr": [0.1, 0.02, 0.3, 0.05, 0.01],
    "weight_decay": [0.0, 0.1, 0.01, 0.0, 0.5],
    "momentum": [0.9, 0.5, 0.1, 0.99, 0.3],
}


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(NETWORKS, *shape, dtype=torch.float64, generator=generator) for shape in SHAPES]


def alone(name: str, settings: dict[str, list[float]], rates: Sequence[Rate]) -> list[list[Tensor]]:
    """Return every network after torch's own optimizer, `[network][tensor]`."""
    _, kind, fixed = METHODS[name]
    results = []
    for k in range(NETWORKS):
        params = [tensor[k].clone().requires_grad_() for tensor in gradients(-1)]
        own = {key: values[k] for key, values in settings.items()}
        optimizer = kind(params, **own, **fixed)  # type: ignore[call-arg]
        for step, rate in enumerate(rates):
            for param, gradient in zip(params, gradients(step), strict=True):
                param.grad = gradient[k].clone()
            group = optimizer.param_groups[0]
            group["lr"] = own["lr"] * rate.factor
            if rate.momentum is not None and "betas" in group:
                group["betas"] = (rate.momentum, group["betas"][1])
            elif rate.momentum is not None and group["momentum"]:
                group["momentum"] = rate.momentum
            optimizer.step()
        results.append([param.detach() for param in params])
    return results


def settings_for(name: str, *, are_same: bool) -> dict[str, list[float]]:
    keys = METHODS[name][0].per_network
    chosen = {key: [SETTINGS[key][1]] * NETWORKS if are_same else SETTINGS[key] for key in keys}
    if name == "sgd":
        chosen["momentum"] = [0.0] * NETWORKS
    return chosen


FUSED = {"fused": True, "apart": False, "as torch decides": None}
RATES = [f"{settings} settings, {momentum} momentum" for settings in ("same", "own") for momentum in ("own", "cycled")]


@pytest.mark.parametrize(("name", "how", "fused"), covering(METHODS, RATES, FUSED, of=1))
def test_every_network_moves_as_if_alone(name: str, how: str, fused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    are_same, is_cycled, is_fused = how.startswith("same"), how.endswith("cycled momentum"), FUSED[fused]
    # Blocks smaller than a tensor, and than a network.
    monkeypatch.setattr(module_of_optimizers, "UPDATED_AT_ONCE", 5)
    settings = settings_for(name, are_same=are_same)
    rates = [Rate(1 / (1 + step), 0.9 - 0.1 * step if is_cycled else None) for step in range(STEPS)]
    expected = alone(name, settings, rates)
    params = gradients(-1)
    optimizer = stack_optimizer(METHODS[name][0], params, settings, is_fused=is_fused)
    index = torch.tensor([4, 1, 2])
    for step, rate in enumerate(rates):
        given = gradients(step)
        if step == 3:
            params = [param[index] for param in params]
            optimizer.keep(params, index)
        given = [g[index] for g in given] if step >= 3 else given
        # Strides are nobody's business: autograd gives gradients in any order of memory.
        given[0] = given[0].transpose(1, 2).contiguous().transpose(1, 2)
        optimizer.update(given, rate)
    for place, k in enumerate(index.tolist()):
        for tensor, wanted in zip(params, expected[k], strict=True):
            torch.testing.assert_close(tensor[place], wanted, rtol=1e-12, atol=1e-12)
    if not are_same:
        assert not torch.allclose(params[0][0], expected[1][0])


SCHEDULES: dict[str, Schedule] = {
    "constant": Constant(),
    "cosine": Cosine(),
    "cosine to a tenth": Cosine(0.1),
    "one cycle": OneCycle(),
    "one cycle of momentum too": OneCycle(momentum=(0.85, 0.95)),
    "short rise": OneCycle(rise=0.1, start=0.5, end=0.01),
    "step": StepDecay(4, 0.5),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 10, 37])
def test_schedules_are_those_of_torch(name: str, steps: int) -> None:
    schedule = SCHEDULES[name]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0, momentum=0.5)
    theirs: torch.optim.lr_scheduler.LRScheduler
    match schedule:
        case Constant():
            theirs = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        case Cosine(final):
            theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 2.0 * final)
        case OneCycle(rise, start, end, momentum):
            if rise * steps <= 1:
                pytest.skip("torch divides by zero")
            theirs = torch.optim.lr_scheduler.OneCycleLR(
                optimizer,
                2.0,
                steps,
                pct_start=rise,
                cycle_momentum=momentum is not None,
                div_factor=1 / start,
                final_div_factor=1 / end,
            )
        case StepDecay(every, gamma):
            theirs = torch.optim.lr_scheduler.StepLR(optimizer, every, gamma)
    for step in range(steps):
        rate, group = schedule.rate(step, steps), optimizer.param_groups[0]
        assert 2.0 * rate.factor == pytest.approx(group["lr"], rel=1e-9, abs=1e-12)
        assert (0.5 if rate.momentum is None else rate.momentum) == pytest.approx(group["momentum"], rel=1e-9)
        optimizer.step()
        if step + 1 < steps:
            theirs.step()


def test_settings_are_drawn_from_their_distributions() -> None:
    for setting in (Uniform(-1.0, 3.0), LogUniform(1e-4, 1e-1), Choice((1.0, 5.0, 7.0))):
        values = torch.tensor([draw(setting, 0, "lr", k) for k in range(2000)], dtype=torch.float64)
        low, high = bounds(setting)
        assert low <= float(values.min()) <= float(values.max()) <= high
        assert values.tolist() == [draw(setting, 0, "lr", k) for k in range(2000)]
        assert draw(setting, 1, "lr", 0) != draw(setting, 0, "lr", 0) or isinstance(setting, Choice)
    logs = torch.tensor([math.log10(draw(LogUniform(1e-4, 1e-1), 0, k)) for k in range(4000)])
    shares = torch.histc(logs, 3, -4, -1) / 4000
    assert float((shares - 1 / 3).abs().max()) < 0.03
    chosen = torch.tensor([draw(Choice((0.0, 1.0)), 0, k) for k in range(4000)])
    assert float(chosen.mean()) == pytest.approx(0.5, abs=0.03)
    assert draw(0.25, "anything") == 0.25
    assert derive_seed(1, "a", 23) != derive_seed(1, "a2", 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(2, 1), "not an interval"),
        (lambda: LogUniform(0, 1), "no logarithms"),
        (lambda: Choice(()), "nothing to choose from"),
        (lambda: SGD(lr=0.0), r"lr is 0.0, but must lie in \(0, infinity\)"),
        (lambda: Adam(lr=Uniform(-0.1, 0.1)), "lr is Uniform.*must lie in"),
        (lambda: AdamW(lr=1e-3, weight_decay=-1.0), r"weight_decay is -1.0"),
        (lambda: SGD(lr=0.1, is_nesterov=True), "momentum of Nesterov's method is 0.0"),
        (lambda: Adam(lr=0.1, betas=(0.9, 1.0)), r"betas must lie in \[0, 1\)"),
        (lambda: Cosine(2.0), "final share"),
        (lambda: OneCycle(rise=0.0), "is not a cycle"),
        (lambda: OneCycle(momentum=(0.9, 0.8)), "the smaller one first"),
        (lambda: StepDecay(0), "is not a decay"),
    ],
)
def test_settings_that_make_no_sense(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
