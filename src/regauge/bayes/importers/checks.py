"""Checks of tensors that all importers share."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.core.params import Params, require_finite


def gaussian(mean: Mapping[str, Tensor], std: Mapping[str, Tensor], source: str) -> GaussianPosterior:
    """A checked diagonal Gaussian, on copies that no optimizer writes to.

    Raises:
        ValueError: Nothing is uncertain, a standard deviation has no mean or another shape, is negative, or a number is
            not finite.
    """
    if not std:
        raise ValueError(f"{source} has no uncertain parameters")
    for name, tensor in std.items():
        require_alike(name, tensor.shape, mean, f"standard deviations of {source}")
        if bool((tensor < 0).any()):
            raise ValueError(f"{name!r} has negative standard deviations in {source}; check how they were made")
    means, stds = detach(mean), detach(std)
    require_finite(means, f"the means of {source}")
    require_finite(stds, f"the standard deviations of {source}")
    return GaussianPosterior(means, stds)


def require_alike(name: str, shape: Sequence[int], mean: Mapping[str, Tensor], label: str) -> None:
    """Refuse a tensor that does not belong to a parameter.

    Raises:
        ValueError: There is no such parameter, or it has another shape.
    """
    if name not in mean:
        raise ValueError(f"the {label} name {name!r}, which is no parameter; those are {list(mean)[:6]}, ...")
    if tuple(shape) != tuple(mean[name].shape):
        raise ValueError(
            f"the {label} have shape {tuple(shape)} for {name!r}, whose shape is {tuple(mean[name].shape)}"
        )


def detach(params: Mapping[str, Tensor]) -> Params:
    """Copies without gradients."""
    return {name: tensor.detach().clone() for name, tensor in params.items()}


def names_of(parameters: Sequence[Tensor], module: nn.Module, source: str) -> list[str]:
    """Under which names a module has these very parameters.

    Raises:
        ValueError: The module does not have one of them.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    strangers = [tuple(parameter.shape) for parameter in parameters if id(parameter) not in names]
    if strangers:
        raise ValueError(
            f"{source} holds {len(strangers)} parameters (of shapes {strangers[:4]}) that are not the module's; give "
            "the module that it was made with, not a copy"
        )
    return [names[id(parameter)] for parameter in parameters]


def split(flat: Tensor, parameters: Mapping[str, Tensor], source: str) -> Params:
    """A flat vector cut into the shapes of parameters, in their order.

    Raises:
        ValueError: It is no vector, or not as long as they are together.
    """
    sizes = [tensor.numel() for tensor in parameters.values()]
    if flat.ndim != 1 or len(flat) != sum(sizes):
        raise ValueError(
            f"{source} has shape {tuple(flat.shape)}, but the parameters {list(parameters)[:4]}, ... hold {sum(sizes)} "
            "numbers; it is of other parameters"
        )
    pieces = torch.split(flat, sizes)
    return {name: piece.view(tensor.shape) for (name, tensor), piece in zip(parameters.items(), pieces, strict=True)}
