"""Callbacks: every training reports its steps, losses and rates, and gives the same result without a callback."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from sources import PUBLIC
from torch import Tensor

import regauge as rg
from regauge import bayes, flow, inr, learn
from regauge.nets.classification import ClassifierConfig, train
from regauge.nets.mlp import mlp
from regauge.nets.siren import Siren, plain_population
from regauge.training import DescentConfig, State, fit_signals

NET = mlp(4, 6, 3)
INPUTS, LABELS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
TASK = rg.Task(NET, [(INPUTS, LABELS)])
SYMMETRY = rg.discover(NET, INPUTS)
OTHERS = {
    name: tensor + 0.1 * torch.randn(12, *tensor.shape, generator=torch.Generator().manual_seed(1))
    for name, tensor in NET.state_dict().items()
}
SPLIT = {"train": range(8), "validation": range(8, 10), "test": range(10, 12)}
SETTINGS: dict[str, Any] = {"epochs": 3, "batch": 4, "width": 4, "depth": 1}
PART: dict[str, Any] = {"symmetry": SYMMETRY, "split": SPLIT}
SAMPLES = inr.Samples(torch.rand(20, 2), torch.rand(20, 1))
IMAGE = inr.Inr("siren", 2, 1, 8, 1, "image", pixels=(4, 5))
POPULATION = rg.zoo.presets.uci_mlps(count=3, seed=0)
SIREN = Siren(2, 4, 1, depth=1)
ENDS = [{name: tensor[k] for name, tensor in OTHERS.items()} for k in (0, 1)]

TRAININGS: dict[str, Callable[..., Any]] = {
    "fit_predictor": lambda **more: (
        learn.fit_predictor(
            OTHERS, torch.linspace(0, 1, 12), config=learn.PredictorConfig(**SETTINGS), **PART, **more
        ).trained.history
    ),
    "fit_autoencoder": lambda **more: (
        learn.fit_autoencoder(
            OTHERS, config=learn.AutoencoderConfig(latent=2, **SETTINGS), module=NET, inputs=INPUTS, **PART, **more
        ).trained.history
    ),
    "fit_matching": lambda **more: (
        learn.fit_matching(OTHERS, config=learn.MatchingConfig(**SETTINGS), **PART, **more).trained.history
    ),
    "flow.fit": lambda **more: (
        flow.fit(OTHERS, config=flow.FlowConfig(epochs=3, batch=4), **PART, **more).trained.history
    ),
    "classifier": lambda **more: train(
        NET, NET.state_dict(), INPUTS, LABELS, ClassifierConfig(epochs=3, batch=8), **more
    ),
    "bayes.fit": lambda **more: (
        bayes.fit(NET.state_dict(), NET, INPUTS, LABELS, bayes.VariationalConfig(epochs=2, batch=8), **more).mean
    ),
    "inr.fit": lambda **more: (
        inr.fit(
            IMAGE, SAMPLES, inr.FitConfig(steps=4, batch=5), start=IMAGE.start(torch.Generator().manual_seed(0)), **more
        ).params
    ),
    "train_path": lambda **more: rg.connect.train_path(
        *ENDS, TASK, rg.connect.Bezier.between(*ENDS), steps=5, **more
    ).inner[0],
    "straighten": lambda **more: (
        rg.connect.straighten(*ENDS, TASK, rg.connect.StraightenConfig(steps=4, batch=8), **more).params
    ),
    "fit_signals": lambda **more: fit_signals(
        SIREN,
        plain_population(SIREN, 3, generator=torch.Generator().manual_seed(0)),
        torch.rand(9, 2, generator=torch.Generator().manual_seed(0)),
        torch.zeros(3, 9, 1),
        DescentConfig(steps=3),
        **more,
    ),
    "zoo.train": lambda **more: [*rg.zoo.train(POPULATION, **more)][-1].params,
}


def equal(one: Any, other: Any) -> bool:
    """Return whether results contain the same numbers. Histories differ in seconds."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(equal(value, other[name]) for name, value in one.items() if name != "seconds")
    return all(map(equal, one, other)) if isinstance(one, list | tuple) else bool(one == other or one != one)


@pytest.mark.parametrize("name", TRAININGS)
def test_every_training_tells_its_steps(name: str) -> None:
    seen: list[State] = []
    result = TRAININGS[name](on_step=seen.append)
    assert [state.step for state in seen] == list(range(1, seen[-1].steps + 1))
    assert [state.is_last for state in seen] == [False] * (len(seen) - 1) + [True]
    assert all(bool(state.loss.isfinite().all()) for state in seen)
    assert all(0 <= state.rate.factor <= 1 for state in seen)
    assert equal(result, TRAININGS[name]())


def test_losses_of_a_population_come_with_its_networks() -> None:
    seen: list[State] = []
    [*rg.zoo.train(POPULATION, on_step=seen.append, ids=[0, 2])]
    assert {state.networks for state in seen} == {(0, 2)}
    assert all(state.loss.shape == (2,) for state in seen)


def test_every_public_function_that_trains_takes_a_callback() -> None:
    for name in sorted(PUBLIC):
        package, _, short = name.rpartition(".")
        one = getattr(import_module(package), short, None)
        if inspect.isfunction(one) and {"progress", "config"} <= {*inspect.signature(one).parameters}:
            assert "on_step" in inspect.signature(one).parameters, name
