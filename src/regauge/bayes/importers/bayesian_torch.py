"""Posteriors of bayesian-torch, whose layers hold a mean and an inverse softplus of a standard deviation."""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from regauge.bayes.importers.checks import gaussian
from regauge.bayes.posteriors.gaussian import GaussianPosterior

PLAIN = {"weight": "weight", "kernel": "weight", "bias": "bias"}
"""The names of its layers' fields in torch's layers."""


def from_bayesian_torch(state: Mapping[str, Tensor]) -> GaussianPosterior:
    """The diagonal Gaussian of a network of bayesian-torch, under the names of the plain network.

    `layer.mu_weight` and `layer.rho_weight` become `layer.weight` with standard deviation `log(1 + exp(rho))`; its
    convolutions say "kernel" for "weight". Layers that are not Bayesian are certain. Noise and priors that some of its
    layers keep as buffers are left out.

    Args:
        state: `model.state_dict()`.

    Raises:
        ValueError: There are no Bayesian layers, a mean has no `rho` or the other way round, or two tensors get one
            name.
    """
    mean: dict[str, Tensor] = {}
    std: dict[str, Tensor] = {}
    for name, tensor in state.items():
        layer, _, field = name.rpartition(".")
        kind, _, rest = field.partition("_")
        if kind in ("eps", "prior") and any(f"{layer}.mu_{plain}".removeprefix(".") in state for plain in PLAIN):
            continue
        if kind not in ("mu", "rho") or rest not in PLAIN:
            plain, target = name, mean
        else:
            plain, target = f"{layer}.{PLAIN[rest]}".removeprefix("."), mean if kind == "mu" else std
            other = f"{layer}.{'rho' if kind == 'mu' else 'mu'}_{rest}".removeprefix(".")
            if other not in state:
                raise ValueError(f"{name!r} has no {other!r} beside it; give the whole `state_dict()` of the network")
        if plain in target:
            raise ValueError(f"{name!r} and another tensor would both be {plain!r}; rename one of them")
        target[plain] = functional.softplus(tensor) if kind == "rho" and target is std else tensor
    if not std:
        raise ValueError(f"no layer has `mu_` and `rho_` parameters; the names are {list(state)[:6]}, ...")
    return gaussian(mean, std, "the network")
