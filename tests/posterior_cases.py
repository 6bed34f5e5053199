"""Posteriors of every kind over small networks."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from coverings import covering
from torch import Tensor, nn

import regauge as rg
from regauge import Params, Symmetry
from regauge.bayes.posteriors.gaussian import GaussianPosterior, Posterior
from regauge.bayes.posteriors.kronecker import KroneckerPosterior, KroneckerTerm
from regauge.bayes.posteriors.low_rank import LowRankPosterior
from regauge.bayes.posteriors.particles import ParticlePosterior
from regauge.nets.norm import FilterResponseNorm


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Exponential(nn.Module):
    """A network that multiplies units by exponentials of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.rate.exp()


def mlp(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), activation, nn.Linear(5, 4), activation, nn.Linear(4, 2))


NETS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "relu": lambda: (mlp(nn.ReLU()), torch.randn(6, 3)),
    "tanh": lambda: (mlp(nn.Tanh()), torch.randn(6, 3)),
    "sine": lambda: (mlp(Sine()), torch.randn(6, 3)),
    "exponential": lambda: (
        nn.Sequential(nn.Linear(3, 5), Exponential(), nn.Tanh(), nn.Linear(5, 2)),
        torch.randn(6, 3),
    ),
    "filter response": lambda: (
        nn.Sequential(
            nn.Conv2d(2, 4, 2),
            FilterResponseNorm(4, eps=0.0),
            nn.Conv2d(4, 3, 2),
            FilterResponseNorm(3, eps=0.0),
            nn.Flatten(),
            nn.Linear(12, 2),
        ),
        torch.randn(6, 2, 4, 4),
    ),
    "batch norm": lambda: (
        nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)),
        torch.randn(6, 3),
    ),
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def network(name: str) -> tuple[nn.Module, Tensor, Symmetry]:
    torch.manual_seed(0)
    module, inputs = NETS[name]()
    module, inputs = module.double().eval(), inputs.double()
    return module, inputs, rg.discover(module, (inputs,))


def mean_of(name: str, seed: int) -> Params:
    noise = generator(seed)
    return {
        key: tensor + 0.3 * torch.randn(tensor.shape, generator=noise, dtype=tensor.dtype).abs()
        if tensor.is_floating_point()
        else tensor
        for key, tensor in network(name)[0].state_dict().items()
    }


def uncertain(name: str) -> list[str]:
    return [key for key, _ in network(name)[0].named_parameters()]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def factor(seed: int, size: int) -> Tensor:
    root = normal(seed, size, size + 1)
    return root @ root.mT / size


def gaussian(name: str, seed: int) -> GaussianPosterior:
    mean = mean_of(name, seed)
    return GaussianPosterior(mean, {n: 0.05 + 0.2 * normal(seed + 1, *mean[n].shape).abs() for n in uncertain(name)})


def kronecker(name: str, seed: int, *, columns: int | None = None) -> KroneckerPosterior:
    mean, std = gaussian(name, seed)
    terms = {}
    for key in uncertain(name):
        if mean[key].ndim > 1:
            rest = mean[key][0].numel()
            std.pop(key)
            rows = normal(seed + 2, mean[key].shape[0], mean[key].shape[0])
            terms[key] = (KroneckerTerm(0.4 * rows, 0.4 * normal(seed + 3, rest, columns or rest)),)
    return KroneckerPosterior(mean, terms, std)


def low_rank(name: str, seed: int) -> LowRankPosterior:
    mean, std = gaussian(name, seed)
    std.pop(uncertain(name)[-1])
    return LowRankPosterior(mean, std, deviations(name, seed, mean))


def flat(name: str, seed: int) -> LowRankPosterior:
    mean = mean_of(name, seed)
    return LowRankPosterior(mean, {}, deviations(name, seed, mean))


def deviations(name: str, seed: int, mean: Params) -> Params:
    return {n: 0.2 * normal(seed + k, 3, *mean[n].shape) for k, n in enumerate(uncertain(name)[1:])}


def particles(name: str, seed: int) -> ParticlePosterior:
    networks = [mean_of(name, 100 * seed + k) for k in range(5)]
    return ParticlePosterior({n: torch.stack([w[n] for w in networks]) for n in networks[0]}, network(name)[2].buffers)


KINDS: dict[str, Callable[[str, int], Posterior]] = {
    "gaussian": gaussian,
    "kronecker": kronecker,
    "kronecker of low rank": lambda name, seed: kronecker(name, seed, columns=2),
    "low rank": low_rank,
    "deviations alone": flat,
    "particles": particles,
}


GAUSSIAN = [kind for kind in KINDS if kind != "particles"]


each_kind = pytest.mark.parametrize("kind", KINDS)


def each_pair(part: int, of: int = 3) -> pytest.MarkDecorator:
    """Return pairs of nets and kinds of posteriors. Laws with different parts together test all pairs."""
    return pytest.mark.parametrize(("name", "kind"), covering(NETS, KINDS, part=part, of=of))


def is_close(a: Params, b: Params, atol: float = 1e-10) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], rtol=1e-10, atol=atol) for name in a)


def dense(posterior: Posterior, names: list[str]) -> tuple[Tensor, Tensor]:
    """Return the mean `[n]` and a root `[n, noise]` of the full covariance of a Gaussian, computed by sampling at unit
    noise.
    """
    noise = posterior.draw(1, generator(0))
    size = sum(tensor.numel() for tensor in noise.values())
    columns = torch.eye(size + 1, size, dtype=torch.float64).split([t.numel() for t in noise.values()], 1)
    basis = {key: c.reshape(size + 1, *t.shape[1:]) for c, (key, t) in zip(columns, noise.items(), strict=True)}
    samples = posterior.at(basis)
    rows = torch.cat([samples[name].flatten(1) for name in names], 1)
    return rows[-1], (rows[:-1] - rows[-1]).mT
