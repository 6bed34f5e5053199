"""Mean-field variational inference recovers conjugate posteriors, and over-pruning is detected."""

import math
from dataclasses import replace

import pytest
import torch
from progress import Recorded
from torch import Tensor, nn

import regauge as rg
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.prediction.likelihoods import Normal
from regauge.bayes.variational.diagnostics import compare_with_prior
from regauge.bayes.variational.mean_field import VariationalConfig, fit
from regauge.core.params import Params
from regauge.nets.classification import initialize
from regauge.nets.mlp import mlp
from regauge.training import SGD, Adam, Constant

NOISE, PRIOR, EXAMPLES = 0.5, 0.3, 40
QUICK = VariationalConfig(
    epochs=500, batch=EXAMPLES, prior_std=PRIOR, optimizer=Adam(0.02), initial_std=0.1, lr_std=0.05, samples=2
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def regression() -> tuple[Tensor, Tensor]:
    """Return correlated inputs, for which correlations of the posterior matter."""
    g = generator(1)
    mixing = torch.tensor([[1.0, 0.6, 0.0], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]], dtype=torch.float64)
    inputs = torch.randn(EXAMPLES, 3, generator=g, dtype=torch.float64) @ mixing
    weights = torch.tensor([0.8, -0.5, 0.2], dtype=torch.float64)
    return inputs, inputs @ weights[:, None] + NOISE * torch.randn(EXAMPLES, 1, generator=g, dtype=torch.float64)


def optimum(inputs: Tensor, targets: Tensor, prior_precision: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of the exact posterior, and the standard deviations of its best diagonal approximation."""
    precision = inputs.T @ inputs / NOISE**2 + torch.diag(prior_precision)
    return torch.linalg.solve(precision, inputs.T @ targets / NOISE**2).flatten(), precision.diagonal().rsqrt()


def linear() -> tuple[nn.Module, Params]:
    module = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    return module, {"weight": torch.zeros(1, 3, dtype=torch.float64)}


CONFIGS = {
    "adam": QUICK,
    "cold": replace(QUICK, temperature=0.1),
    "hot": replace(QUICK, temperature=4.0),
    "batches of 16, 16 and 8": replace(QUICK, epochs=200, batch=16, optimizer=Adam(0.01), lr_std=0.03),
    "sgd": replace(QUICK, optimizer=SGD(0.02, momentum=0.8), lr_std=0.15),
    "constant": replace(QUICK, schedule=Constant(), optimizer=SGD(0.02, momentum=0.5), lr_std=0.1),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_conjugate_posterior_is_recovered(config: VariationalConfig) -> None:
    inputs, targets = regression()
    module, start = linear()
    fitted = fit(start, module, inputs, targets, config, generator=generator(), likelihood=Normal(NOISE))
    mean, std = optimum(inputs, targets, torch.full((3,), PRIOR**-2, dtype=torch.float64))
    std = std * math.sqrt(config.temperature)
    deviation = float(((fitted.mean["weight"].flatten() - mean) / std).abs().max())
    ratio = float((fitted.std["weight"].flatten() / std).log().abs().max())
    assert deviation < 0.2
    assert ratio < 0.1


def test_what_is_certain_is_trained_as_a_point_without_a_prior() -> None:
    inputs, targets = regression()
    module = nn.Linear(3, 1, dtype=torch.float64)
    start = {**linear()[1], "bias": torch.zeros(1, dtype=torch.float64)}
    fitted = fit(
        start, module, inputs, targets + 2, QUICK, generator=generator(), likelihood=Normal(NOISE), certain=["bias"]
    )
    assert fitted.std.keys() == {"weight"}
    ones = torch.ones(EXAMPLES, 1, dtype=torch.float64)
    precision = torch.tensor([PRIOR**-2] * 3 + [0], dtype=torch.float64)
    mean, std = optimum(torch.cat([inputs, ones], 1), targets + 2, precision)
    assert abs(float(fitted.mean["bias"]) - float(mean[3])) < 0.02
    assert bool(((fitted.mean["weight"].flatten() - mean[:3]) / std[:3]).abs().max() < 0.2)


def test_the_learning_rate_of_table_1_leaves_standard_deviations_at_their_start() -> None:
    inputs, targets = regression()
    module, start = linear()
    many = 60_000 // EXAMPLES
    config = VariationalConfig(
        epochs=1, prior_std=PRIOR, optimizer=SGD(0.06, momentum=0.9), lr_std=0.06, schedule=Constant()
    )
    fitted = fit(
        start,
        module,
        inputs.repeat(many, 1),
        targets.repeat(many, 1),
        config,
        generator=generator(),
        likelihood=Normal(30.0),
    )
    assert bool(
        ((fitted.std["weight"] / config.initial_std).log().abs() < 1e-5 * config.count_steps(60_000) * 1.1).all()
    )
    assert bool((fitted.std["weight"] > config.initial_std).all())


def test_training_depends_on_the_generator_only_and_writes_to_nothing() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    inputs, targets = torch.randn(50, 4, generator=generator(1)), torch.arange(50) % 3
    start = initialize(module, generator(2))
    before = {name: tensor.clone() for name, tensor in start.items()}
    seen = Recorded()
    config = VariationalConfig(epochs=2, batch=16)
    first, again, other = (
        fit(start, module, inputs, targets, config, generator=generator(seed), progress=seen) for seed in (0, 0, 1)
    )
    assert len(seen.losses) == sum(seen.totals) == 3 * config.count_steps(50) == 24
    for name in start:
        assert torch.equal(first.mean[name], again.mean[name])
        assert torch.equal(start[name], before[name])
    assert not torch.equal(first.mean["0.weight"], other.mean["0.weight"])
    assert all(torch.equal(first.std[name], again.std[name]) for name in first.std)
    assert not module.training
    assert list(first.mean) == list(start)
    assert first.std.keys() == {name for name, _ in module.named_parameters()}
    assert int(first.mean["1.num_batches_tracked"]) == config.count_steps(50)
    assert not torch.equal(first.mean["1.running_mean"], start["1.running_mean"])


def test_a_tied_tensor_is_one_tensor() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    inputs, targets = torch.randn(8, 3, generator=generator()), torch.arange(8) % 3
    fitted = fit(start, module, inputs, targets, VariationalConfig(epochs=1, batch=4), generator=generator())
    assert fitted.mean.keys() == fitted.std.keys() == {"0.weight", "0.bias", "2.bias"}
    sample = {name: tensor[0] for name, tensor in fitted.at(fitted.draw(1, generator())).items()}
    assert torch.func.functional_call(module, sample, (inputs,)).shape == (8, 3)


def test_diverging_training_says_so() -> None:
    inputs, targets = regression()
    module, start = linear()
    config = VariationalConfig(epochs=400, batch=10, optimizer=SGD(1e3, momentum=0.9), lr_std=1e3)
    module.eval()
    with pytest.raises(
        ValueError, match=r"training diverged: in step \d+ of 1600 the loss is .*try a smaller lr than 1000.0"
    ):
        fit(start, module, inputs, targets, config, generator=generator(), likelihood=Normal(NOISE))
    assert not module.training


def test_refusals_of_training() -> None:
    inputs, targets = regression()
    module, start = linear()

    def run(start: Params = start, certain: tuple[str, ...] = (), inputs: Tensor = inputs) -> GaussianPosterior:
        return fit(
            start, module, inputs, targets, QUICK, generator=generator(), likelihood=Normal(NOISE), certain=certain
        )

    with pytest.raises(ValueError, match="39 inputs and 40 targets"):
        run(inputs=inputs[1:])
    with pytest.raises(ValueError, match=r"\['wieght'\], which are not parameters"):
        run(certain=("wieght",))
    with pytest.raises(ValueError, match="none remains to be fitted"):
        run(certain=("weight",))
    with pytest.raises(ValueError, match=r"the start lacks \['weight'\]"):
        run(start={})
    mixed = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1).double())
    with pytest.raises(ValueError, match="several dtypes or devices"):
        fit(dict(mixed.state_dict()), mixed, inputs, targets, QUICK, generator=generator())
    for wrong in ({"temperature": 0.0}, {"prior_std": -1.0}, {"lr_std": math.inf}, {"samples": 0}):
        with pytest.raises(ValueError, match="cannot train: samples must be"):
            replace(QUICK, **wrong)
    for wrong in ({"epochs": 0}, {"batch": 0}):
        with pytest.raises(ValueError, match=r"must be (positive|at least 1)"):
            replace(QUICK, **wrong)


def pruned(module: nn.Module, readers: dict[str, tuple[int, ...]]) -> GaussianPosterior:
    """Return means of 1 and standard deviations of 0.1. Weights that read certain units have mean 0.1 and carry no
    information.
    """
    mean = {name: torch.ones_like(tensor) for name, tensor in module.state_dict().items()}
    for name, units in readers.items():
        for unit in units:
            mean[name][:, unit] = 0.1
    return GaussianPosterior(mean, {name: torch.full_like(tensor, 0.1) for name, tensor in mean.items()})


@pytest.mark.parametrize("activation", [torch.relu, torch.tanh], ids=["scales", "signs"])
def test_active_units_are_those_that_are_read(activation: object) -> None:
    module = mlp(5, 6, 7, 2, activation=activation)
    symmetry = rg.discover(module, (torch.randn(2, 5),))
    posterior = pruned(module, {"layers.1.weight": (0, 2), "layers.2.weight": (1, 2, 3)})
    posterior.mean["layers.0.weight"][4] = 0  # what comes in does not count
    found = compare_with_prior(posterior, 1.0, 100, symmetry)
    assert sorted(zip(found.sizes.values(), found.active.values(), strict=True)) == [(6, 4), (7, 4)]
    assert found.active_share == 8 / 13
    assert not found.uncounted
    assert "active units: 8 of 13" in str(found)


def test_every_value_of_a_channel_behind_a_flattening_counts() -> None:
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    symmetry = rg.discover(module, (torch.randn(2, 1, 4, 4),))
    posterior = pruned(module, {"3.weight": (0, 1, 2, 3, 4, 5, 6)})
    assert list(compare_with_prior(posterior, 1.0, 100, symmetry).active.values()) == [2]


def test_groups_that_cannot_be_counted_are_named() -> None:
    module = mlp(4, 3, 2)
    symmetry = rg.discover(module, (torch.randn(2, 4),))
    posterior = pruned(module, {})
    del posterior.std["layers.1.weight"]
    found = compare_with_prior(posterior, 1.0, 100, symmetry)
    assert list(found.uncounted.values()) == ["no uncertain weight reads its units"]
    assert math.isnan(found.active_share)
    assert "units not counted" in str(found)


def test_the_divergence_is_that_of_torch() -> None:
    module = mlp(3, 4, 2).double()
    mean = {name: torch.randn(t.shape, generator=generator(3)).double() for name, t in module.state_dict().items()}
    std = {name: torch.rand(t.shape, generator=generator(4)).double() + 0.1 for name, t in mean.items()}
    normal, zero = torch.distributions.Normal, torch.zeros((), dtype=torch.float64)
    exact = sum(
        float(torch.distributions.kl_divergence(normal(mean[name], std[name]), normal(zero, zero + 0.7)).sum())
        for name in mean
    )
    found = compare_with_prior(GaussianPosterior(mean, std), 0.7, 50)
    assert found.kl == pytest.approx(exact, rel=1e-12)
    assert found.kl_per_example == pytest.approx(exact / 50, rel=1e-12)
    assert found.std_ratios["layers.0.weight"] == pytest.approx(float(std["layers.0.weight"].median()) / 0.7)
    prior = {name: torch.full_like(t, 0.7) for name, t in std.items()}
    at_prior = compare_with_prior(
        GaussianPosterior({name: torch.zeros_like(t) for name, t in mean.items()}, prior), 0.7, 50
    )
    assert at_prior.kl == pytest.approx(0, abs=1e-12)
    assert at_prior.std_ratio == 1


def test_refusals_of_diagnostics() -> None:
    mean = {"weight": torch.ones(2, 2)}
    with pytest.raises(ValueError, match="both must be positive"):
        compare_with_prior(GaussianPosterior(mean, mean), 0.0, 10)
    with pytest.raises(ValueError, match="no standard deviations"):
        compare_with_prior(GaussianPosterior(mean, {}), 1.0, 10)
    with pytest.raises(ValueError, match="divergence from the prior is infinite"):
        compare_with_prior(GaussianPosterior(mean, {"weight": torch.zeros(2, 2)}), 1.0, 10)
