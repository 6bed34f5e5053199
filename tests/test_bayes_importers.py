"""Posteriors of other libraries, read from objects in their layouts. `posteriors` itself is used if it is installed."""

import ast
import importlib.util
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from regauge.bayes import importers
from regauge.bayes.importers.gaussians import from_bayesian_torch, from_ivon, from_laplace, from_swag
from regauge.bayes.importers.particle_samples import from_ensemble, from_posteriors, from_samples, log_posterior
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.kronecker import KroneckerPosterior
from regauge.bayes.posteriors.low_rank import LowRankPosterior
from regauge.bayes.prediction.likelihoods import Categorical, Normal
from regauge.core.params import Params
from regauge.nets.mlp import mlp

LIBRARIES = {"posteriors", "laplace", "ivon", "bayesian_torch"}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network() -> nn.Module:
    module = mlp(3, 4, 2).double()
    module.load_state_dict(random_params(module, 0))
    return module


def random_params(module: nn.Module, seed: int) -> Params:
    g = generator(seed)
    return {
        name: torch.randn(t.shape, generator=g, dtype=t.dtype) if t.is_floating_point() else t.clone()
        for name, t in module.state_dict().items()
    }


def equal(found: Params, expected: Params) -> bool:
    return found.keys() == expected.keys() and all(torch.allclose(found[name], expected[name]) for name in expected)


def test_no_library_is_imported() -> None:
    files = sorted(Path(importers.__file__).parent.glob("*.py"))
    assert {file.stem for file in files} >= {"gaussians", "particle_samples"}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & LIBRARIES, file


@dataclass
class VIDiagState:
    params: Params
    log_sd_diag: Params


@dataclass
class DiagLaplaceState:
    params: Params
    prec_diag: Params


@dataclass
class EKFDiagState:
    params: Params
    sd_diag: Params


@dataclass
class VIDenseState:
    params: Params
    L_factor: Tensor = field(default_factory=lambda: torch.ones(3))


@dataclass
class SGHMCState:
    params: Params
    momenta: Params


STATES = {
    "variational": (VIDiagState, torch.log),
    "Laplace": (DiagLaplaceState, lambda std: std**-2),
    "Kalman filter": (EKFDiagState, torch.clone),
}


@pytest.mark.parametrize(("kind", "keep"), STATES.values(), ids=STATES)
def test_states_of_posteriors_become_gaussians(kind: Any, keep: Any) -> None:
    mean = random_params(network(), 1)
    std = {name: tensor.abs() + 0.1 for name, tensor in random_params(network(), 2).items()}
    buffers = {"running_mean": torch.ones(2)}
    found = from_posteriors(kind(mean, {name: keep(tensor) for name, tensor in std.items()}), buffers)
    assert isinstance(found, GaussianPosterior)
    assert equal(found.mean, {**mean, **buffers})
    assert equal(found.std, std)
    assert found.mean["layers.0.bias"] is not mean["layers.0.bias"]


def test_chains_of_posteriors_become_particles() -> None:
    chain = [SGHMCState(random_params(network(), seed), {}) for seed in range(3)]
    found = from_posteriors(chain, {"running_mean": torch.ones(2)})
    assert found.buffers == ("running_mean",)
    assert torch.equal(found.stack["layers.1.weight"][2], chain[2].params["layers.1.weight"])


def test_one_state_that_was_stacked_of_a_chain_becomes_particles() -> None:
    samples = [random_params(network(), seed) for seed in range(3)]
    found = from_posteriors(SGHMCState(samples, {}), {"running_mean": torch.ones(2)})  # type: ignore[arg-type]
    assert found.buffers == ("running_mean",)
    assert torch.equal(found.stack["layers.1.weight"][2], samples[2]["layers.1.weight"])


def test_refusals_of_posteriors() -> None:
    mean = random_params(network(), 1)
    for several in ([VIDiagState(mean, mean)] * 2, VIDiagState([mean, mean], [mean, mean])):
        with pytest.raises(ValueError, match="several states of VIDiagState are distributions, not samples"):
            from_posteriors(several)
    with pytest.raises(ValueError, match="a VIDenseState has a full covariance"):
        from_posteriors(VIDenseState(mean))
    with pytest.raises(ValueError, match="a SGHMCState is one sample"):
        from_posteriors(SGHMCState(mean, mean))
    with pytest.raises(TypeError, match="params of a VIDiagState are a list"):
        from_posteriors(VIDiagState(list(mean.values()), {}))
    with pytest.raises(ValueError, match="'other', which is no parameter"):
        from_posteriors(VIDiagState(mean, {"other": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"have shape \(2,\) for 'layers.0.bias', whose shape is \(4,\)"):
        from_posteriors(VIDiagState(mean, {"layers.0.bias": torch.zeros(2)}))
    with pytest.raises(ValueError, match="standard deviations of the VIDiagState holds NaN or Inf in 4 of"):
        from_posteriors(VIDiagState(mean, {"layers.0.bias": torch.full((4,), torch.inf)}))


@pytest.fixture(scope="module")
def posteriors() -> ModuleType:
    if importlib.util.find_spec("posteriors") is None:
        pytest.skip("the library `posteriors` is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # tensordict on how the library declares its states
        import posteriors
    return posteriors


def data(count: int = 60) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 3, generator=generator(5), dtype=torch.float64)
    noise = 0.5 * torch.randn(count, 1, generator=generator(6), dtype=torch.float64)
    return inputs, inputs @ torch.tensor([[1.0], [-0.5], [0.3]], dtype=torch.float64) + noise


def test_the_log_posterior_is_that_of_every_example() -> None:
    module = network()
    inputs, labels = data()[0], torch.arange(60) % 2
    params = dict(module.named_parameters())
    value, outputs = log_posterior(module, Categorical(), 0.5, 60)(params, (inputs, labels))
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 0.5)
    prior = sum(float(normal.log_prob(tensor.detach()).sum()) for tensor in params.values())
    loss = nn.functional.cross_entropy(module(inputs), labels)
    assert torch.equal(outputs, module(inputs))
    assert value.item() == pytest.approx(prior / 60 - loss.item(), rel=1e-12)
    with pytest.raises(ValueError, match="both must be positive"):
        log_posterior(module, Categorical(), 0.5, 0)


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_variational_inference_of_posteriors_on_our_networks(posteriors: ModuleType, temperature: float) -> None:
    import torchopt

    inputs, targets = data()
    module = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    transform = posteriors.vi.diag.build(
        log_posterior(module, Normal(0.5), 0.3, 60),
        torchopt.adam(lr=0.05),
        temperature=temperature / 60,
        init_log_sds=-3.3,
    )
    state = transform.init({"weight": torch.zeros(1, 3, dtype=torch.float64)})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(150):
            state, _ = transform.update(state, (inputs, targets))
    found = from_posteriors(state)
    precision = inputs.T @ inputs / 0.25 + torch.eye(3, dtype=torch.float64) / 0.09
    std = (temperature / precision.diagonal()).sqrt()
    mean = torch.linalg.solve(precision, inputs.T @ targets / 0.25).flatten()
    assert float(((found.mean["weight"].flatten() - mean) / std).abs().max()) < 1
    assert float((found.std["weight"].flatten() / std).log().abs().max()) < 0.2


def test_a_chain_of_posteriors_on_our_networks(posteriors: ModuleType) -> None:
    module = network()
    batch = data()[0], torch.arange(60) % 2
    transform = posteriors.sgmcmc.sghmc.build(
        log_posterior(module, Categorical(), 0.5, 60), lr=1e-2, temperature=1 / 60
    )
    state = transform.init({name: tensor.detach() for name, tensor in module.named_parameters()})
    chain = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(4):
            state, _ = transform.update(state, batch)
            chain.append(state)
    found = from_posteriors(chain)
    assert found.count == 4
    assert found.stack.keys() == module.state_dict().keys()
    assert not torch.equal(found.stack["layers.0.weight"][0], found.stack["layers.0.weight"][3])


def ivon(module: nn.Module, *groups: list[Tensor]) -> SimpleNamespace:
    """Return an optimizer in the layout of IVON: flat Hessians in the order of the parameters of each group."""
    made = []
    for k, parameters in enumerate(groups):
        count = sum(parameter.numel() for parameter in parameters)
        hess = torch.rand(count, generator=generator(k), dtype=torch.float64) + 0.1
        made.append({"params": parameters, "hess": hess, "ess": 50.0 + k, "weight_decay": 0.01})
    return SimpleNamespace(param_groups=made)


def test_ivon() -> None:
    module = network()
    first, second, third, fourth = module.parameters()
    optimizer = ivon(module, [second, first], [fourth])
    found = from_ivon(optimizer, module)
    assert equal(found.mean, module.state_dict())
    assert found.std.keys() == {"layers.0.bias", "layers.0.weight", "layers.1.bias"}
    hess = optimizer.param_groups[0]["hess"]
    assert torch.allclose(found.std["layers.0.bias"], (50 * (hess[:4] + 0.01)) ** -0.5)
    assert torch.allclose(found.std["layers.0.weight"].flatten(), (50 * (hess[4:] + 0.01)) ** -0.5)
    assert torch.allclose(found.std["layers.1.bias"], (51 * (optimizer.param_groups[1]["hess"] + 0.01)) ** -0.5)
    with pytest.raises(ValueError, match=r"has no \['hess', 'ess'\]; give an optimizer of IVON"):
        from_ivon(torch.optim.SGD([third], lr=0.1, weight_decay=0.1), module)
    with pytest.raises(ValueError, match="that are not the module's"):
        from_ivon(optimizer, network())
    optimizer.param_groups[0]["hess"] = hess[1:]
    with pytest.raises(ValueError, match=r"the Hessian of the optimizer has shape \(15,\).* hold 16 numbers"):
        from_ivon(optimizer, module)
    optimizer.param_groups[0]["hess"] = -hess
    with pytest.raises(ValueError, match=r"16 precisions .* are not positive"):
        from_ivon(optimizer, module)


def test_bayesian_torch() -> None:
    state = {
        "0.mu_kernel": torch.randn(2, 1, 3, 3, generator=generator(1)),
        "0.rho_kernel": torch.randn(2, 1, 3, 3, generator=generator(2)),
        "0.eps_kernel": torch.zeros(2, 1, 3, 3),
        "0.prior_weight_mu": torch.zeros(2, 1, 3, 3),
        "1.weight": torch.ones(2),
        "1.running_mean": torch.zeros(2),
        "3.mu_weight": torch.randn(4, 2, generator=generator(3)),
        "3.rho_weight": torch.full((4, 2), -3.0),
        "3.mu_bias": torch.zeros(4),
        "3.rho_bias": torch.full((4,), -2.0),
    }
    found = from_bayesian_torch(state)
    assert list(found.mean) == ["0.weight", "1.weight", "1.running_mean", "3.weight", "3.bias"]
    assert found.std.keys() == {"0.weight", "3.weight", "3.bias"}
    assert torch.equal(found.mean["0.weight"], state["0.mu_kernel"])
    assert torch.allclose(found.std["0.weight"], torch.log1p(state["0.rho_kernel"].exp()))
    alone = from_bayesian_torch({"mu_bias": torch.zeros(2), "rho_bias": torch.zeros(2)})
    assert alone.std.keys() == {"bias"}
    with pytest.raises(ValueError, match=r"'3.mu_bias' needs '3.rho_bias'"):
        from_bayesian_torch({name: tensor for name, tensor in state.items() if name != "3.rho_bias"})
    with pytest.raises(ValueError, match=r"would both be '3.weight'"):
        from_bayesian_torch({**state, "3.weight": torch.ones(4, 2)})
    with pytest.raises(ValueError, match="no layer has `mu_` and `rho_`"):
        from_bayesian_torch({"weight": torch.zeros(2)})


def test_swag() -> None:
    module = network()
    steps = from_samples([random_params(module, seed) for seed in range(5)]).stack
    mean = {name: tensor.mean(0) for name, tensor in steps.items()}
    square = {name: tensor.square().mean(0) for name, tensor in steps.items()}
    deviations = {name: tensor - mean[name] for name, tensor in steps.items()}
    found = from_swag(mean, square, deviations)
    assert isinstance(found, LowRankPosterior)
    assert found.rank == 5
    variance = {name: tensor.var(0, correction=0) for name, tensor in steps.items()}
    assert equal(found.std, {name: (tensor / 2).sqrt() for name, tensor in variance.items()})
    # Half of the variance, and half of the unbiased variance.
    total = {name: (tensor * (0.5 + 0.5 * 5 / 4)).sqrt() for name, tensor in variance.items()}
    assert equal(found.moments().std, total)
    flat = from_swag(mean, square, {name: tensor.flatten(1) for name, tensor in deviations.items()})
    assert isinstance(flat, LowRankPosterior)
    assert equal(flat.deviations, found.deviations)
    diagonal = from_swag({**mean, "running_mean": torch.zeros(2)}, square)
    assert isinstance(diagonal, GaussianPosterior)
    assert equal(diagonal.std, {name: tensor.sqrt() for name, tensor in variance.items()})
    still = {"weight": torch.full((2,), 0.1)}
    assert torch.equal(from_swag(still, {"weight": torch.full((2,), 0.01)}).std["weight"] < 1e-3, torch.ones(2) > 0)
    with pytest.raises(ValueError, match="below the squares of its means"):
        from_swag(mean, variance)
    with pytest.raises(ValueError, match="'other', which is no parameter"):
        from_swag(mean, {"other": torch.ones(2)})
    with pytest.raises(ValueError, match="behind their first axis"):
        from_swag(mean, square, {**deviations, "layers.0.bias": torch.zeros(5, 3)})
    with pytest.raises(ValueError, match="at least two"):
        from_swag(mean, square, {name: tensor[:1] for name, tensor in deviations.items()})


def test_samples_and_their_files(tmp_path: Path) -> None:
    samples = [random_params(network(), seed) for seed in range(3)]
    save_file(samples[1], tmp_path / "one.safetensors")
    torch.save(samples[2], tmp_path / "two.pt")
    found = from_samples([samples[0], tmp_path / "one.safetensors", str(tmp_path / "two.pt")])
    assert found.count == 3
    for k, sample in enumerate(samples):
        assert all(torch.equal(found.stack[name][k], tensor) for name, tensor in sample.items())
    assert equal(from_samples(found.stack).stack, found.stack)
    with pytest.raises(ValueError, match="there are no samples"):
        from_samples([])
    with pytest.raises(ValueError, match=r"no buffers \['running_mean'\]"):
        from_samples(samples, buffers=["running_mean"])
    with pytest.raises(ValueError, match="same architecture"):
        from_samples([samples[0], random_params(mlp(3, 5, 2), 0)])
    broken = {**samples[0], "layers.0.bias": torch.full((4,), torch.nan, dtype=torch.float64)}
    with pytest.raises(ValueError, match=r"'layers.0.bias' of sample 1 holds NaN or Inf in 4 of 4 entries"):
        from_samples([samples[0], broken])
    with pytest.raises(FileNotFoundError):
        from_samples([tmp_path / "three.pt"])


def test_ensembles_know_their_buffers() -> None:
    members = [nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2)]
    found = from_ensemble(members)
    assert set(found.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert torch.equal(found.stack["0.weight"][1], members[1][0].weight)
    with torch.no_grad():
        members[1][0].weight.zero_()
    assert bool(found.stack["0.weight"][1].any())
    with pytest.raises(ValueError, match="there are no samples"):
        from_ensemble([])


def spectrum(size: int, seed: int) -> tuple[Tensor, Tensor]:
    root = torch.randn(size, size, generator=generator(seed), dtype=torch.float64)
    values, vectors = torch.linalg.eigh(root @ root.T)
    return values, vectors


def laplace(module: nn.Module, precision: Any, parameters: list[Tensor] | None = None) -> SimpleNamespace:
    """Return a fitted approximation in the layout of laplace-torch."""
    chosen = list(module.parameters()) if parameters is None else parameters
    flat = torch.cat([parameter.detach().flatten() for parameter in chosen])
    return SimpleNamespace(model=module, params=chosen, mean=flat, posterior_precision=precision)


def kron(module: nn.Module, deltas: list[float]) -> SimpleNamespace:
    shapes = [parameter.shape for parameter in module.parameters()]
    pairs = [[spectrum(side, 10 * k + j) for j, side in enumerate(shape)] for k, shape in enumerate(shapes)]
    return SimpleNamespace(
        eigenvalues=[[values for values, _ in pair] for pair in pairs],
        eigenvectors=[[vectors for _, vectors in pair] for pair in pairs],
        deltas=torch.tensor(deltas, dtype=torch.float64),
    )


def replace_deltas(curvature: SimpleNamespace, delta: float) -> SimpleNamespace:
    deltas = torch.full((4,), delta, dtype=torch.float64)
    return SimpleNamespace(eigenvalues=curvature.eigenvalues, eigenvectors=curvature.eigenvectors, deltas=deltas)


def test_diagonal_laplace_of_some_parameters() -> None:
    module = network()
    chosen = list(module.parameters())[2:]
    precision = torch.rand(10, generator=generator(), dtype=torch.float64) + 1
    found = from_laplace(laplace(module, precision, chosen))
    assert isinstance(found, GaussianPosterior)
    assert equal(found.mean, dict(module.state_dict()))
    assert found.std.keys() == {"layers.1.weight", "layers.1.bias"}
    assert torch.allclose(found.std["layers.1.bias"], precision[8:] ** -0.5)


def test_kronecker_laplace() -> None:
    module = network()
    curvature = kron(module, [0.5, 0.4, 0.3, 0.2])
    found = from_laplace(laplace(module, curvature))
    assert isinstance(found, KroneckerPosterior)
    assert found.std.keys() == {"layers.0.bias", "layers.1.bias"}
    for k, name in enumerate(module.state_dict()):
        values, vectors = curvature.eigenvalues[k], curvature.eigenvectors[k]
        factors = [(q * v) @ q.T for q, v in zip(vectors, values, strict=True)]
        delta = curvature.deltas[k]
        if name in found.std:
            exact = torch.linalg.inv(factors[0] + delta * torch.eye(len(factors[0]), dtype=torch.float64))
            assert torch.allclose(found.std[name], exact.diagonal().sqrt())
            continue
        (term,) = found.terms[name]
        covariance = torch.kron(term.rows @ term.rows.T, term.columns @ term.columns.T)
        exact = torch.linalg.inv(torch.kron(*factors) + delta * torch.eye(len(covariance), dtype=torch.float64))
        # No wider than the exact one in any direction, and equal to it without a prior.
        assert float(torch.linalg.eigvalsh(exact - covariance)[0]) > -1e-12
        (term,) = from_laplace(laplace(module, replace_deltas(curvature, 1e-16))).terms[name]
        covariance = torch.kron(term.rows @ term.rows.T, term.columns @ term.columns.T)
        assert torch.allclose(covariance @ torch.kron(*factors), torch.eye(len(exact), dtype=torch.float64), atol=1e-4)


class FeatureExtractor(nn.Module):
    """A model in the layout of laplace-torch's approximations of last layers."""

    def __init__(self, model: nn.Module, last_layer: nn.Module) -> None:
        super().__init__()
        self.model, self.last_layer = model, last_layer


class DiagSubnetLaplace(SimpleNamespace):
    """An approximation of a subnetwork in the layout of laplace-torch."""


def test_laplace_of_a_last_layer() -> None:
    module = network()
    names = list(module.state_dict())
    wrapped = FeatureExtractor(module, module.get_submodule("layers.1"))
    flat = torch.cat([parameter.detach().flatten() for parameter in wrapped.last_layer.parameters()]) + 1
    precision = torch.rand(10, generator=generator(), dtype=torch.float64) + 1
    # `params` are those of the model that the approximation was given, of which it has a copy.
    last = SimpleNamespace(model=wrapped, params=list(network().parameters()), mean=flat, posterior_precision=precision)
    found = from_laplace(last)
    assert isinstance(found, GaussianPosterior)
    assert list(found.mean) == names
    assert list(found.std) == names[2:]
    assert torch.equal(found.mean[names[0]], module.state_dict()[names[0]])
    assert torch.equal(found.mean[names[3]], flat[8:])
    assert torch.allclose(found.std[names[3]], precision[8:] ** -0.5)


def test_laplace_of_a_subnetwork() -> None:
    module = network()
    chosen = torch.tensor([13, 2, 20])
    given = laplace(module, torch.tensor([1.0, 4.0, 16.0], dtype=torch.float64))
    backend = SimpleNamespace(subnetwork_indices=chosen)
    found = from_laplace(DiagSubnetLaplace(**vars(given), backend=backend))
    flat = torch.cat([found.std[name].flatten() for name in module.state_dict()])
    wanted = torch.zeros(26, dtype=torch.float64).index_copy(0, chosen, torch.tensor([1.0, 0.5, 0.25]).double())
    assert torch.equal(flat, wanted)


def test_kronecker_laplace_with_damping_is_exact() -> None:
    module = network()
    curvature = kron(module, [0.5, 0.4, 0.3, 0.2])
    curvature.damping = True
    found = from_laplace(laplace(module, curvature))
    assert isinstance(found, KroneckerPosterior)
    for k, name in enumerate(module.state_dict()):
        if name not in found.terms:
            continue
        damped = [
            (q * (v + curvature.deltas[k].sqrt())) @ q.T
            for q, v in zip(curvature.eigenvectors[k], curvature.eigenvalues[k], strict=True)
        ]
        (term,) = found.terms[name]
        covariance = torch.kron(term.rows @ term.rows.T, term.columns @ term.columns.T)
        assert torch.allclose(covariance @ torch.kron(*damped), torch.eye(len(covariance), dtype=torch.float64))


def test_refusals_of_laplace() -> None:
    module = network()
    with pytest.raises(ValueError, match="is not fitted"):
        from_laplace(SimpleNamespace(model=module, params=list(module.parameters()), mean=0.0))
    with pytest.raises(ValueError, match="neither diagonal nor Kronecker-factored"):
        from_laplace(laplace(module, torch.eye(26)))
    with pytest.raises(ValueError, match="not the module's"):
        from_laplace(laplace(network(), torch.ones(26), list(module.parameters())))
    last = laplace(module, torch.ones(10))
    last.mean = last.mean[-10:]
    with pytest.raises(ValueError, match=r"has shape \(10,\).* hold 26 numbers"):
        from_laplace(last)
    with pytest.raises(ValueError, match="1 blocks of curvature, but its model has 4 parameters"):
        from_laplace(laplace(module, SimpleNamespace(eigenvalues=[[]], eigenvectors=[[]], deltas=torch.zeros(1))))
