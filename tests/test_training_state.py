"""Interrupted trainings: the same call continues them, with results that equal uninterrupted trainings bit by bit."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from progress import Recorded
from torch import Tensor, nn

import regauge as rg
from regauge import flow, learn
from regauge import weightspace as ws
from regauge.bayes.variational.mean_field import VariationalConfig, fit
from regauge.checkpoints import state_file
from regauge.checkpoints.writing import save
from regauge.core.params import Params
from regauge.nets.augmentation import Augmentation
from regauge.nets.classification import ClassifierConfig, initialize, train
from regauge.nets.siren import Siren
from regauge.training import SGD, Adam, AdamW, Optimizer

IMAGES, EPOCH, EPOCHS = 40, 5, 4
OPTIMIZERS: list[Optimizer] = [
    AdamW(1e-2),
    Adam(1e-2),
    SGD(0.05),
    SGD(0.05, momentum=0.9, weight_decay=1e-3, is_nesterov=True),
]


class Stop(Exception):
    pass


class StopAfter(Recorded):
    """A progress display that ends a training after some steps, like a user."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def advance(self, amount: float = 1, /, *, loss: float | None = None) -> None:
        super().advance(amount, loss=loss)
        if sum(self.amounts) >= self.steps:
            raise Stop


@pytest.fixture(autouse=True)
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "SECONDS", 0.0)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def examples() -> tuple[Tensor, Tensor]:
    return torch.randn(IMAGES, 1, 6, 6, generator=seeded(0)), torch.randint(3, (IMAGES,), generator=seeded(1))


def network() -> nn.Module:
    layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    return nn.Sequential(*layers)


def trained(optimizer: Optimizer, path: Path | None, progress: Recorded) -> Params:
    settings = ClassifierConfig(epochs=EPOCHS, batch=IMAGES // EPOCH, optimizer=optimizer)
    seen = {"generator": seeded(3), "augmentation": Augmentation(1), "state": path, "progress": progress}
    return train(network(), initialize(network(), seeded(2)), *examples(), settings, **seen)


def fitted(optimizer: Optimizer, path: Path | None, progress: Recorded) -> Params:
    settings = VariationalConfig(epochs=EPOCHS, batch=IMAGES // EPOCH, optimizer=optimizer, lr_std=0.03, samples=2)
    seen = {"generator": seeded(3), "augmentation": Augmentation(1), "state": path, "progress": progress}
    found = fit(initialize(network(), seeded(2)), network(), *examples(), settings, certain={"1.bias"}, **seen)
    return {**found.mean, **{f"std/{name}": tensor for name, tensor in found.std.items()}}


@pytest.mark.parametrize("train", [trained, fitted])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("stops", [(EPOCH,), (EPOCH + 2,), (2, 3 * EPOCH - 1, 3 * EPOCH + 1)], ids=str)
def test_interrupted_trainings_continue_to_the_same_bits(
    train: Callable[..., Params], optimizer: Optimizer, stops: tuple[int, ...], tmp_path: Path
) -> None:
    whole = Recorded()
    expected = train(optimizer, None, whole)
    path, done = tmp_path / "state.safetensors", 0
    for stop in stops:
        with pytest.raises(Stop):
            train(optimizer, path, StopAfter(stop))
        # A stop comes before the state of its step is written: at the last step of an epoch it loses the epoch.
        assert path.exists() == (stop > EPOCH)
        done = max(done, (stop - 1) // EPOCH * EPOCH)
    last = Recorded()
    found = train(optimizer, path, last)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert last.losses == whole.losses[done:]
    assert sum(last.amounts) == sum(whole.amounts) == EPOCHS * EPOCH


@cache
def sirens() -> tuple[nn.Module, rg.Symmetry, Params]:
    """Return small sine networks."""
    module = Siren(2, 4, 1, depth=1, omega=3.0, generator=seeded(0))
    chance = seeded(1)
    networks = {name: torch.randn(40, *tensor.shape, generator=chance) for name, tensor in module.state_dict().items()}
    return module, rg.discover(module, (torch.randn(5, 2),)), networks


def predicted(**arguments: Any) -> nn.Module:
    _, symmetry, networks = sirens()
    config = learn.PredictorConfig(**SMALL, dropout=0.3, average=0.9, statistics=False)
    return learn.fit_predictor(networks, networks["layers.0.bias"].sum(1), symmetry, config, **arguments).net


def predicted_in_stages(**arguments: Any) -> nn.Module:
    module, symmetry, networks = sirens()
    config = learn.PredictorConfig(**SMALL, probes=2, changes=(learn.Translation(0.1),), statistics=False)
    values, points = networks["layers.0.bias"].sum(1), learn.grid((2, 2))
    return learn.fit_predictor(networks, values, symmetry, config, module=module, inputs=points, **arguments).net


def encoded(**arguments: Any) -> nn.Module:
    module, symmetry, networks = sirens()
    config = learn.AutoencoderConfig(
        **SMALL, latent=3, decoder=ws.MLPDecoder((6,)), dropout=0.3, examples=7, augment=("sign",)
    )
    points = learn.grid((3, 3))
    made = learn.fit_autoencoder(networks, symmetry, config, module=module, inputs=points, **arguments)
    return nn.ModuleList([made.encoder, made.decoder])


def matched(**arguments: Any) -> nn.Module:
    _, symmetry, networks = sirens()
    config = learn.MatchingConfig(**SMALL, vectors=4, checked=2)
    return learn.fit_matching(networks, symmetry, config, **arguments).net


def flowing(**arguments: Any) -> nn.Module:
    _, symmetry, networks = sirens()
    config = flow.FlowConfig(net=flow.Perceptron(6, 1), epochs=3, batch=8, is_aligned=True)
    return flow.fit(networks, symmetry, config, **arguments).velocity


SMALL: dict[str, Any] = {"width": 6, "depth": 1, "epochs": 3, "batch": 8}


@pytest.mark.parametrize("fit", [predicted, predicted_in_stages, encoded, matched, flowing])
@pytest.mark.parametrize("stops", [(2,), (3, 4, 9), (11,)], ids=str)
def test_interrupted_nets_over_networks_continue_to_the_same_bits(
    fit: Callable[..., nn.Module], stops: tuple[int, ...], tmp_path: Path
) -> None:
    """Four steps are an epoch. Without a generator, all random numbers come from seed 0."""
    path, whole = tmp_path / "state.safetensors", Recorded()
    expected = fit(generator=seeded(0), progress=whole).state_dict()
    for stop in stops:
        with pytest.raises(Stop):
            fit(state=path, progress=StopAfter(stop))
        assert path.exists()
    last = Recorded()
    found = fit(state=path, progress=last).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert last.losses == whole.losses[stops[-1] - 1 :]
    assert sum(last.amounts) == sum(whole.amounts)
    with pytest.raises(ValueError, match=r"had other settings or networks \(.*seed\); give the same"):
        fit(state=path, generator=seeded(1))


def test_a_state_of_another_training_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    with pytest.raises(Stop):
        trained(AdamW(1e-2), path, StopAfter(EPOCH + 1))
    kept = path.read_bytes()
    with pytest.raises(ValueError, match=r"had other settings or networks \(settings\); give the same .*or delete it"):
        trained(SGD(0.1), path, Recorded())
    assert path.read_bytes() == kept
    path.write_bytes(kept[:200])
    with pytest.raises(ValueError, match=r"the interrupted training in .*state\.safetensors' is damaged .*; delete it"):
        trained(AdamW(1e-2), path, Recorded())
    save({"a": torch.zeros(2)}, path, overwrite=True)
    with pytest.raises(ValueError, match="is not the state of a training; give another name, or move it away"):
        trained(AdamW(1e-2), path, Recorded())


def test_short_trainings_write_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "SECONDS", 60.0)
    trained(AdamW(1e-2), tmp_path / "state.safetensors", Recorded())
    assert not list(tmp_path.iterdir())
