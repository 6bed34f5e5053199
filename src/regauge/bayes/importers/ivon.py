"""Posteriors of IVON, the optimizer that learns standard deviations and weights together."""

from typing import Any

from torch import nn

from regauge.bayes.importers.checks import gaussian, names_of, split
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.core.params import Params


def from_ivon(optimizer: Any, module: nn.Module) -> GaussianPosterior:
    """The diagonal Gaussian of an `ivon.IVON` optimizer: `std = 1 / sqrt(ess (hess + weight_decay))`.

    Args:
        optimizer: Outside of its `sampled_params()`, inside which the weights are a sample.
        module: The optimized module; parameters that the optimizer lacks are certain.

    Raises:
        ValueError: The optimizer has no "hess" and "ess", or its parameters are not the module's.

    References:
        Shen et al. (2024), Variational learning is effective for large deep networks, algorithm 1.
    """
    mean = module.state_dict()
    std: Params = {}
    for group in optimizer.param_groups:
        missing = [field for field in ("hess", "ess", "weight_decay") if field not in group]
        if missing:
            raise ValueError(
                f"a group of parameters of this {type(optimizer).__name__} has no {missing}; give an optimizer of IVON"
            )
        parameters = [parameter for parameter in group["params"] if parameter is not None]
        names = names_of(parameters, module, "the optimizer")
        precision = group["ess"] * (group["hess"] + group["weight_decay"])
        if not bool((precision > 0).all()):
            raise ValueError(
                f"{int((~(precision > 0)).sum())} precisions ess (hess + weight_decay) of the optimizer are not "
                "positive; the training that made it failed"
            )
        std |= split(precision.rsqrt(), dict(zip(names, parameters, strict=True)), "the Hessian of the optimizer")
    return gaussian(mean, std, "the optimizer")
