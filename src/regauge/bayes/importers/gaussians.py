"""Gaussians from bayesian-torch, IVON, laplace-torch and SWAG, read from their objects or running averages."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.kronecker import KroneckerPosterior, KroneckerTerm
from regauge.bayes.posteriors.low_rank import LowRankPosterior
from regauge.core.arguments import check_arguments
from regauge.core.params import Params, require_finite

PLAIN = {"weight": "weight", "kernel": "weight", "bias": "bias"}
"""Names of the fields in bayesian-torch's layers, with the corresponding names in torch's layers."""


def from_bayesian_torch(state: Mapping[str, Tensor]) -> GaussianPosterior:
    """Return the diagonal Gaussian of a bayesian-torch network, under the names of the plain network.

    `layer.mu_weight` and `layer.rho_weight` become `layer.weight` with standard deviation `log(1 + exp(rho))`.
    Convolutions of bayesian-torch use the name "kernel" instead of "weight". Layers that are not Bayesian have no
    uncertainty. Some layers store noise and priors as buffers, which the Gaussian does not contain.

    Args:
        state: The result of `model.state_dict()`.

    Raises:
        ValueError: The network has no Bayesian layers. A mean has no `rho`, or a `rho` has no mean. The error is also
            raised if two tensors get the same name.
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
                raise ValueError(
                    f"{name!r} needs {other!r}, which is missing; give the whole `state_dict()` of the network"
                )
        if plain in target:
            raise ValueError(f"{name!r} and another tensor would both be {plain!r}; rename one of them")
        target[plain] = functional.softplus(tensor) if kind == "rho" and target is std else tensor
    if not std:
        raise ValueError(
            f"no layer has `mu_` and `rho_` parameters; the names are {list(state)[:6]}, ...; give a network of "
            "bayesian-torch"
        )
    return make_gaussian(mean, std, "the network")


@check_arguments
def from_ivon(optimizer: Any, module: nn.Module) -> GaussianPosterior:
    """Return the diagonal Gaussian of an `ivon.IVON` optimizer: `std = 1 / sqrt(ess (hess + weight_decay))`.

    Args:
        optimizer: The optimizer. Call this function outside of `sampled_params()`, because inside of this context, the
            weights are a sample.
        module: The module that was optimized. Parameters that the optimizer does not optimize have no uncertainty.

    Raises:
        ValueError: The optimizer has no "hess" and "ess", or its parameters do not belong to the module.

    References:
        Shen et al. (2024), Variational learning is effective for large deep networks, algorithm 1.
    """
    std: Params = {}
    for group in optimizer.param_groups:
        missing = [field for field in ("hess", "ess", "weight_decay") if field not in group]
        if missing:
            raise ValueError(
                f"a group of parameters of this {type(optimizer).__name__} has no {missing}; give an optimizer of IVON"
            )
        own = _name([parameter for parameter in group["params"] if parameter is not None], module, "the optimizer")
        precision = group["ess"] * (group["hess"] + group["weight_decay"])
        if not bool((precision > 0).all()):
            raise ValueError(
                f"{int((~(precision > 0)).sum())} precisions ess (hess + weight_decay) of the optimizer are not "
                "positive, so the training failed; train again with a smaller learning rate"
            )
        std |= _split(precision.rsqrt(), own, "the Hessian of the optimizer")
    return make_gaussian(module.state_dict(), std, "the optimizer")


def from_laplace(laplace: Any) -> GaussianPosterior | KroneckerPosterior:
    """Return the posterior of a fitted diagonal or Kronecker-factored approximation of laplace-torch.

    The approximation may cover only the last layer or a subnetwork. Weights that the Laplace approximation does not
    cover have no uncertainty. Weights without uncertainty are weights without gradients, weights before the last layer
    (`DiagLLLaplace`, `KronLLLaplace`), and weights outside of a subnetwork (`DiagSubnetLaplace`, where standard
    deviations are zero).

    In `KronLaplace`, a weight has the precision `G (x) A + delta I`. The inverse of `G (x) A + delta I` is not a
    Kronecker product. The returned posterior therefore has the precision `(G + c/pi I) (x) (A + c pi I)`, c^2 = delta
    (`KroneckerPosterior.from_kfac`), and is slightly narrower. With the `damping` of laplace-torch, the precision
    already is a Kronecker product, and is not changed. Biases and other vectors keep their standard deviations and lose
    their correlations.

    Args:
        laplace: A fitted `laplace.Laplace(...)`.

    Raises:
        ValueError: The approximation is not fitted. The covariance is neither diagonal nor Kronecker-factored, or
            belongs to tensors that are not parameters of the model.

    References:
        Daxberger et al. (2021), Laplace redux, section 2; Ritter et al. (2018), section 3.
    """
    source = f"the {type(laplace).__name__}"
    if not isinstance(laplace.mean, Tensor):
        raise ValueError(f"{source} is not fitted; call its `fit` with the training data first")
    module, parameters = laplace.model, laplace.params
    if type(module).__name__ == "FeatureExtractor":  # in which approximations of a last layer wrap their model
        module, parameters = module.model, list(module.last_layer.parameters())
    own = _name(parameters, module, source)
    mean = detach({**module.state_dict(), **_split(laplace.mean, own, f"the mean of {source}")})
    require_finite(mean, f"the means of {source}")
    precision = laplace.posterior_precision
    if isinstance(precision, Tensor) and precision.ndim == 1:
        spread = precision.detach().rsqrt()
        if type(laplace).__name__ == "DiagSubnetLaplace":
            chosen = laplace.backend.subnetwork_indices
            spread = spread.new_zeros(len(laplace.mean)).index_copy(0, chosen, spread)
        return make_gaussian(mean, _split(spread, own, f"the precision of {source}"), source)
    blocks = getattr(precision, "eigenvalues", None)
    if blocks is None or isinstance(precision, Tensor):
        raise ValueError(
            f"{source} is neither diagonal nor Kronecker-factored; fit one with hessian_structure='diag' or 'kron', or "
            "draw samples and read them with `from_samples`"
        )
    if len(blocks) != len(own):
        raise ValueError(
            f"{source} has {len(blocks)} blocks of curvature, but its model has {len(own)} parameters; give the model "
            "that it was fitted to"
        )
    deltas = precision.deltas.detach().expand(len(own)).tolist()
    terms: dict[str, tuple[KroneckerTerm, ...]] = {}
    std: dict[str, Tensor] = {}
    for name, values, vectors, delta in zip(own, blocks, precision.eigenvectors, deltas, strict=True):
        if len(values) == 1:
            variance = vectors[0].detach().square() @ (values[0].detach() + delta).reciprocal()
            std[name] = variance.sqrt().view(mean[name].shape)
        elif getattr(precision, "damping", False):
            roots = (
                ((q * (v + delta**0.5).rsqrt()) @ q.mT).detach().to(mean[name])
                for q, v in zip(vectors, values, strict=True)
            )
            terms[name] = (KroneckerTerm(*roots),)
        else:
            rows, columns = (((q * v) @ q.mT).detach() for q, v in zip(vectors, values, strict=True))
            terms |= KroneckerPosterior.from_kfac(
                mean, {name: (rows, columns)}, examples=1, prior_precision=delta
            ).terms
    require_finite(std, f"the standard deviations of {source}")
    return KroneckerPosterior(mean, terms, std) if terms else make_gaussian(mean, std, source)


def from_swag(
    mean: Mapping[str, Tensor],
    second_moment: Mapping[str, Tensor],
    deviations: Mapping[str, Tensor] | None = None,
) -> LowRankPosterior | GaussianPosterior:
    """Return the Gaussian of SWAG from its running averages over a trajectory of stochastic gradient descent.

    The variance is `second_moment - mean^2`, or zero if rounding makes it negative. If K deviations D are given, half
    of the variance is diagonal and half is low-rank, `mean + sqrt(variance / 2) * e + sum_k z_k D_k / sqrt(2 (K - 1))`.
    Without deviations, all of the variance is diagonal (SWAG-Diagonal).

    Args:
        mean: The weights averaged over the trajectory, and buffers.
        second_moment: The squared weights averaged over the trajectory, for parameters only.
        deviations: Differences of the last K weights from the averages, either `[K, ...]` or, as in the authors' code,
            flat `[K, numel]`.

    Raises:
        ValueError: A tensor belongs to no parameter, has another shape, or is not finite. A variance is clearly
            negative. The error is also raised if there is only one deviation.

    References:
        Maddox et al. (2019), A simple baseline for Bayesian uncertainty in deep learning, section 3 and equation 1.
    """
    variance = {}
    for name, square in second_moment.items():
        _require_alike(name, square.shape, mean, "second moments of SWAG")
        # The rounding error of a difference of two averages is proportional to the averages, not to the difference.
        tolerance = 64 * torch.finfo(square.dtype).eps * square.abs()
        found = square.detach().double() - mean[name].detach().double().square()
        if bool((found < -tolerance).any()):
            raise ValueError(
                f"{name!r} has second moments below the squares of its means; give averages of squares, not variances"
            )
        variance[name] = found.clamp(min=0).to(square.dtype)
    if deviations is None:
        return make_gaussian(mean, {name: tensor.sqrt() for name, tensor in variance.items()}, "SWAG")
    shaped = {}
    for name, tensor in deviations.items():
        if name in mean and tensor.ndim == 2 and tensor.shape[1] == mean[name].numel():
            tensor = tensor.view(-1, *mean[name].shape)
        _require_alike(name, tensor.shape[1:], mean, "deviations of SWAG (behind their first axis)")
        shaped[name] = tensor.detach()
    for part, label in ((mean, "means"), (variance, "second moments"), (shaped, "deviations")):
        require_finite(part, f"the {label} of SWAG")
    if min(map(len, shaped.values()), default=0) < 2:
        raise ValueError("SWAG divides by the number of deviations minus one; give at least two of them")
    share = {name: tensor / math.sqrt(2 * (len(tensor) - 1)) for name, tensor in shaped.items()}
    return LowRankPosterior(detach(mean), {name: (tensor / 2).sqrt() for name, tensor in variance.items()}, share)


def make_gaussian(mean: Mapping[str, Tensor], std: Mapping[str, Tensor], source: str) -> GaussianPosterior:
    """Return a valid diagonal Gaussian with copies of the tensors, which an optimizer cannot change later."""
    if not std:
        raise ValueError(
            f"{source} has no uncertain parameters; give a posterior with standard deviations, or use its mean as one "
            "network"
        )
    for name, tensor in std.items():
        _require_alike(name, tensor.shape, mean, f"standard deviations of {source}")
        if bool((tensor < 0).any()):
            raise ValueError(f"{name!r} has negative standard deviations in {source}; check how they were made")
    posterior = GaussianPosterior(detach(mean), detach(std))
    require_finite(posterior.mean, f"the means of {source}")
    require_finite(posterior.std, f"the standard deviations of {source}")
    return posterior


def detach(params: Mapping[str, Tensor]) -> Params:
    """Return detached copies of the tensors."""
    return {name: tensor.detach().clone() for name, tensor in params.items()}


def _require_alike(name: str, shape: Sequence[int], mean: Mapping[str, Tensor], label: str) -> None:
    """Raise a ValueError for a tensor that belongs to no parameter or has another shape."""
    if name not in mean:
        raise ValueError(f"the {label} name {name!r}, which is no parameter; name some of {list(mean)[:6]}, ...")
    if tuple(shape) != tuple(mean[name].shape):
        raise ValueError(
            f"the {label} have shape {tuple(shape)} for {name!r}, whose shape is {tuple(mean[name].shape)}; give those "
            "of the same module"
        )


def _name(parameters: Sequence[Tensor], module: nn.Module, source: str) -> Params:
    """Return parameters under their names in a module."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    strangers = [tuple(parameter.shape) for parameter in parameters if id(parameter) not in names]
    if strangers:
        raise ValueError(
            f"{source} holds {len(strangers)} parameters (of shapes {strangers[:4]}) that are not the module's; give "
            "the module that it was made with, not a copy"
        )
    return {names[id(parameter)]: parameter for parameter in parameters}


def _split(flat: Tensor, parameters: Mapping[str, Tensor], source: str) -> Params:
    """Split a flat vector into tensors with the shapes of the parameters, in order."""
    sizes = [tensor.numel() for tensor in parameters.values()]
    if flat.ndim != 1 or len(flat) != sum(sizes):
        raise ValueError(
            f"{source} has shape {tuple(flat.shape)}, but the parameters {list(parameters)[:4]}, ... hold {sum(sizes)} "
            "numbers; it belongs to other parameters"
        )
    pieces = torch.split(flat, sizes)
    return {name: piece.view(tensor.shape) for (name, tensor), piece in zip(parameters.items(), pieces, strict=True)}
