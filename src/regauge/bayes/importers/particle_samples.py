"""Posteriors from samples of Markov chains (such as SGLD), from deep ensembles, and from states of `posteriors`."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from regauge.bayes.importers.gaussians import detach, make_gaussian
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.particles import ParticlePosterior
from regauge.bayes.prediction.likelihoods import Likelihood
from regauge.checkpoints.checkpoint import load
from regauge.core.arguments import check_arguments
from regauge.core.params import require_finite, require_same_shapes


def from_samples(
    samples: Sequence[Mapping[str, Tensor] | str | Path] | Mapping[str, Tensor], *, buffers: Collection[str] = ()
) -> ParticlePosterior:
    """Return a posterior of equally likely samples.

    Args:
        samples: A list of networks or of files, or one dictionary of tensors with a leading sample axis.
        buffers: Names of tensors that are not parameters, such as running statistics.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: `samples` is empty, the samples have different architectures, or a sample is not finite. The error
            is also raised if a sample has no tensor for a name in `buffers`.
    """
    if isinstance(samples, Mapping):
        stack = detach(samples)
        require_finite(stack, "the stack of samples")
    else:
        loaded = [load(sample) if isinstance(sample, str | Path) else dict(sample) for sample in samples]
        if not loaded:
            raise ValueError("there are no samples; give at least one")
        for k, sample in enumerate(loaded):
            require_same_shapes(loaded[0], sample)
            require_finite(sample, f"sample {k}")
        stack = {name: torch.stack([sample[name].detach() for sample in loaded]) for name in loaded[0]}
    unknown = sorted(set(buffers) - stack.keys())
    if unknown:
        raise ValueError(
            f"the samples have no buffers {unknown[:4]}; their names are {list(stack)[:6]}, ...; name some of these"
        )
    return ParticlePosterior(stack, tuple(name for name in stack if name in buffers))


def from_ensemble(modules: Sequence[nn.Module]) -> ParticlePosterior:
    """Return a deep ensemble whose members are equally likely. Each member keeps its buffers.

    Members that were trained independently usually lie in different symmetric copies of a mode. Therefore align the
    members before you use the means and standard deviations of the posterior.

    Raises:
        ValueError: `modules` is empty, the members have different architectures, or a member is not finite.

    References:
        Lakshminarayanan et al. (2017), Simple and scalable predictive uncertainty estimation using deep ensembles.
    """
    states = [module.state_dict() for module in modules]
    learned = dict(modules[0].named_parameters(remove_duplicate=False)) if modules else {}
    return from_samples(states, buffers=[name for name in states[0] if name not in learned] if states else ())


SPREADS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "log_sd_diag": torch.exp,
    "sd_diag": torch.Tensor.detach,
    "prec_diag": torch.rsqrt,
}
"""Fields that only diagonal Gaussians have (variational, extended Kalman filter, Laplace), each with its conversion to
standard deviations."""
DENSE = ("L_factor", "prec", "cov")
"""Fields that identify Gaussians with full covariances."""


def from_posteriors(state: Any, buffers: Mapping[str, Tensor] | None = None) -> GaussianPosterior | ParticlePosterior:
    """Convert a state of the library `posteriors` to a posterior.

    `VIDiagState`, `DiagLaplaceState` and `EKFDiagState` become diagonal Gaussians. States of SGLD, SGHMC or another
    Markov chain become particles. Pass several states as a sequence, or stack them into one state (`tree_map(lambda *x:
    torch.stack(x), *states)`).

    Args:
        state: A state whose `params` are a dictionary from names to tensors, or a sequence of states from a chain.
        buffers: Buffers of the module, which inference does not change.

    Raises:
        TypeError: `params` is not a dictionary of tensors.
        ValueError: The covariance is full, `state` is a single state of a chain, or names and shapes do not fit.

    References:
        Duffield et al. (2024), Scalable Bayesian learning with posteriors.
    """
    rest = dict(buffers or {})
    stacked = getattr(state, "params", None)
    if isinstance(stacked, Sequence) and all(isinstance(one, Mapping) for one in stacked):
        _require_samples(state)
        state = [SimpleNamespace(params=one) for one in stacked]
    if isinstance(state, Sequence):
        for one in state:
            _require_samples(one)
        return from_samples([{**_params(one), **rest} for one in state], buffers=rest)
    mean = _params(state)
    kind = type(state).__name__
    for field, to_std in SPREADS.items():
        spread = getattr(state, field, None)
        if spread is not None:
            std = {name: to_std(tensor.detach()) for name, tensor in spread.items()}
            return make_gaussian({**mean, **rest}, std, f"the {kind}")
    if any(getattr(state, field, None) is not None for field in DENSE):
        raise ValueError(
            f"a {kind} has a full covariance, which regauge does not support; draw samples with its module's `sample` "
            "and read them with `from_samples`, or infer a diagonal one"
        )
    raise ValueError(
        f"a {kind} is one sample, not a posterior; collect the states of the chain and give a list of them"
    )


@check_arguments
def log_posterior(
    module: nn.Module,
    likelihood: Likelihood,
    prior_std: float,
    examples: int,
    buffers: Mapping[str, Tensor] | None = None,
) -> Callable[[Mapping[str, Tensor], tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Return a function that computes the log posterior per example, for the transforms of the library `posteriors`.

    The function maps parameters and a batch `(inputs, targets)` to

        mean over the batch of log p(target | input, params) + (1/N) log N(params; 0, prior_std^2)

    and to the outputs. A transform with `temperature=1/N` infers the posterior. A transform with `temperature=T/N`
    infers the tempered posterior, (likelihood x prior)^(1/T), as `VariationalConfig` does.

    Args:
        module: The module that is called with the parameters, in its current mode.
        likelihood: The likelihood of a target given the outputs.
        prior_std: The standard deviation of the prior on every parameter that the transform infers.
        examples: N, the number of training examples.
        buffers: Constant buffers that replace the buffers of the module. Default: the buffers of the module.

    Raises:
        ValueError: The standard deviation of the prior or the number of examples is not positive.
    """
    if not (prior_std > 0 and examples > 0):
        raise ValueError(f"prior_std is {prior_std} and examples {examples}; both must be positive")
    fixed = detach(dict(module.named_buffers()) if buffers is None else buffers)
    constant = math.log(prior_std) + math.log(2 * math.pi) / 2

    def evaluate(params: Mapping[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        outputs: Tensor = torch.func.functional_call(module, {**fixed, **params}, (inputs,))
        prior = torch.stack([-(p / prior_std).square().sum() / 2 - p.numel() * constant for p in params.values()]).sum()
        return likelihood.log_likelihood(outputs, targets).mean() + prior / examples, outputs

    return evaluate


def _require_samples(state: Any) -> None:
    """Raise a ValueError for a state that describes a distribution instead of a sample."""
    if any(getattr(state, field, None) is not None for field in (*SPREADS, *DENSE)):
        raise ValueError(
            f"several states of {type(state).__name__} are distributions, not samples; read them one by one, or draw "
            "samples with their module's `sample` and read those with `from_samples`"
        )


def _params(state: Any) -> dict[str, Tensor]:
    params = getattr(state, "params", None)
    if not isinstance(params, Mapping) or not all(isinstance(tensor, Tensor) for tensor in params.values()):
        raise TypeError(
            f"the params of a {type(state).__name__} are a {type(params).__name__}; start inference from a dictionary "
            "from names to tensors, such as `dict(module.named_parameters())`"
        )
    return dict(params)
