"""Training of small classifiers is repeatable, and lowers the loss."""

import pytest
import torch
from progress import Recorded
from torch import nn

import regauge as rg
from regauge.nets.classification import ClassifierConfig, initialize, split_batches, train
from regauge.nets.cnn import CNN
from regauge.nets.mlp import mlp
from regauge.nets.norm import ChannelLayerNorm, FilterResponseNorm, NormName
from regauge.nets.resnet import resnet20
from regauge.nets.siren import Siren, plain_population
from regauge.training import DescentConfig, fit_signals
from regauge.training.optimizers import Adam, AdamW
from regauge.training.schedules import Constant


def _blobs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (300,), generator=generator)
    return torch.eye(3)[labels].repeat(1, 2) * 3 + torch.randn(300, 6, generator=generator), labels


def test_training_learns_and_repeats() -> None:
    inputs, labels = _blobs()
    module, training = mlp(6, 16, 3), ClassifierConfig(epochs=8, batch=32, optimizer=AdamW(1e-2))
    runs, losses = [], []
    for _ in range(2):
        generator = torch.Generator().manual_seed(1)
        start = initialize(module, generator)
        before = {name: tensor.clone() for name, tensor in start.items()}
        seen = Recorded()
        runs.append(train(module, start, inputs, labels, training, generator=generator, progress=seen))
        losses.append(seen.losses)
        assert seen.totals == [80]
        assert all(torch.equal(start[name], before[name]) for name in start)
    assert len(losses[0]) == training.count_steps(300) == 80
    assert losses[0] == losses[1]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in module.state_dict())
    evaluate = rg.Task(module, split_batches(inputs, labels, 64)).evaluate
    assert evaluate(runs[0])["accuracy"] > 0.95
    assert evaluate(runs[0])["loss"] < 0.2 < evaluate(start)["loss"]


def test_a_constant_schedule_is_plain_adam() -> None:
    inputs, labels = _blobs()
    module = mlp(6, 5, 3)
    start = initialize(module, torch.Generator().manual_seed(3))
    training = ClassifierConfig(epochs=2, batch=300, optimizer=Adam(1e-2), schedule=Constant())
    found = train(module, start, inputs, labels, training, generator=torch.Generator().manual_seed(4))
    module.load_state_dict(start)
    adam = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(2):
        adam.zero_grad()
        nn.functional.cross_entropy(module(inputs), labels).backward()
        adam.step()
    assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in module.state_dict().items())


def test_networks_that_are_fitted_together_do_not_see_one_another() -> None:
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    targets = torch.stack([torch.sin(2 * x), torch.cos(3 * x), x])
    module, steps = Siren(1, 8, 1, omega=5.0), Recorded()
    start = plain_population(module, 3, generator=torch.Generator().manual_seed(0))
    fitting = DescentConfig(steps=60, batch=None, optimizer=Adam(5e-3))
    together = fit_signals(module, start, x, targets, fitting, progress=steps)
    assert len(steps.amounts) == 60
    for k in range(3):
        alone = fit_signals(module, {n: t[k : k + 1] for n, t in start.items()}, x, targets[k : k + 1], fitting)
        for name in start:
            assert torch.allclose(alone[name][0], together[name][k], atol=1e-4)
        error = [
            float((torch.func.functional_call(module, params, (x,)) - targets[k]).detach().square().mean())
            for params in ({n: t[k] for n, t in start.items()}, {n: t[0] for n, t in alone.items()})
        ]
        assert error[1] < 0.2 * error[0]


def test_initialization_depends_on_the_generator_only() -> None:
    module = CNN((4, 8), 16, 10, image=8)
    draws = [initialize(module, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert all(torch.equal(draws[0][name], draws[1][name]) for name in draws[0])
    assert not any(torch.equal(draws[0][name], draws[2][name]) for name in draws[0])
    assert float(draws[0]["conv2.weight"].abs().max()) <= 36**-0.5


def test_batch_normalization_starts_as_torch_starts_it() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    fresh = {name: tensor.clone() for name, tensor in module[1].state_dict().items()}
    with torch.no_grad():
        module[1](torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)))
        module[1].weight.fill_(7)
    start = initialize(module, torch.Generator())
    assert all(torch.equal(start[f"1.{name}"], tensor) for name, tensor in fresh.items())
    assert start["1.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize(
    "layer", [nn.LayerNorm((3, 2)), nn.GroupNorm(2, 4), ChannelLayerNorm(4), FilterResponseNorm(4)], ids=repr
)
def test_normalizations_start_as_they_are_made(layer: nn.Module) -> None:
    fresh = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(7)
    start = initialize(layer, torch.Generator())
    assert start.keys() == fresh.keys()
    assert all(torch.equal(start[name], tensor) for name, tensor in fresh.items())


@pytest.mark.parametrize("norm", ["filter", "layer"])
def test_residual_networks_of_the_papers_can_be_drawn(norm: NormName) -> None:
    module = resnet20(1, norm=norm)
    assert initialize(module, torch.Generator()).keys() == module.state_dict().keys()


def test_refusals() -> None:
    with pytest.raises(
        ValueError, match=r"response normalization can be initialized, but the module has \['0.weight'\]"
    ):
        initialize(nn.Sequential(nn.RMSNorm(3)), torch.Generator())
    with pytest.raises(ValueError, match="steps is None and epochs is 0; the one given must be positive"):
        ClassifierConfig(epochs=0)
    with pytest.raises(ValueError, match=r"steps is 0 .* the one given must be positive"):
        DescentConfig(steps=0)
    with pytest.raises(ValueError, match="give one of them, and only one"):
        ClassifierConfig(steps=3)
    with pytest.raises(ValueError, match="batch is 0, but must be at least 1"):
        DescentConfig(steps=1, batch=0)
    with pytest.raises(ValueError, match=r"multiple of 4, not 10"):
        CNN((4, 8), 16, 10, image=10)
    with pytest.raises(ValueError, match="at least inputs and outputs"):
        mlp(3)
