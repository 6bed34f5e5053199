"""Outputs of a network at many points, computed in chunks, and the errors of rendered images."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from regauge.data.images import pixel_centers
from regauge.inr.representation import Inr

EVALUATED_AT_ONCE = 2**11
"""The number of points evaluated at once. For 2048 points, the activations of a layer of width 128 take 1 MB, which
fits in a processor's cache."""


def evaluate(network: Inr | nn.Module, params: Mapping[str, Tensor], points: Tensor) -> Tensor:
    """Return the outputs `[points, out]` (or `[models, points, out]`) at `[points, in]`, without gradients."""
    module = module_of(network)
    is_many = is_population(module, params)
    like = next(iter(params.values()))
    points = points.to(like)
    with torch.no_grad():
        if is_many:
            portions = torch.split(points, max(1, EVALUATED_AT_ONCE // len(like)))
            call = torch.func.vmap(lambda one, x: torch.func.functional_call(module, one, (x,)), in_dims=(0, None))
            return torch.cat([call(dict(params), portion) for portion in portions], 1)
        return torch.cat(
            [torch.func.functional_call(module, dict(params), (x,)) for x in torch.split(points, EVALUATED_AT_ONCE)]
        )


def render_image(network: Inr | nn.Module, params: Mapping[str, Tensor], height: int, width: int) -> Tensor:
    """Return the image that a network represents, at any resolution.

    Args:
        network: The module or INR that is called with the parameters.
        params: The parameters of one network, or of a population with a leading model axis.

    Returns:
        `[height, width, channels]`, or `[models, height, width, channels]` for a population. Values outside [0, 1] are
        clipped, but NaN stays NaN.

    Raises:
        ValueError: The image has no pixels, or the parameters do not fit the network.
    """
    if height < 1 or width < 1:
        raise ValueError(f"an image of {height} x {width} pixels is empty; both numbers must be at least 1")
    values = evaluate(network, params, pixel_centers(height, width))
    return values.reshape(*values.shape[:-2], height, width, values.shape[-1]).clamp(0, 1)


def psnr(image: Tensor, reference: Tensor) -> float:
    """Return the peak signal-to-noise ratio in decibels for values in [0, 1]: `-10 log10` of the mean squared error.

    Raises:
        ValueError: The images differ in shape.
    """
    if image.shape != reference.shape:
        raise ValueError(
            f"images of shapes {tuple(image.shape)} and {tuple(reference.shape)} cannot be compared; render both at "
            "one size"
        )
    error = (image.detach().double() - reference.detach().double()).square().mean().item()
    return math.inf if error == 0 else -10 * math.log10(error)


def module_of(network: Inr | nn.Module) -> nn.Module:
    """Return the module of a network. For an INR, the module is on the meta device."""
    if isinstance(network, nn.Module):
        return network
    with torch.device("meta"):
        return network.module()


def is_population(module: nn.Module, params: Mapping[str, Tensor]) -> bool:
    """Return whether the parameters have a leading model axis.

    Raises:
        ValueError: The parameters do not fit the module.
    """
    expected = module.state_dict()
    different = sorted(expected.keys() ^ params.keys())
    if different:
        raise ValueError(
            f"the parameters do not belong to this network: only one of both has {different[:5]}; give parameters of "
            "this architecture"
        )
    extra = {params[name].ndim - tensor.ndim for name, tensor in expected.items()}
    if extra not in ({0}, {1}):
        name = next(iter(expected))
        raise ValueError(
            f"{name!r} has shape {tuple(params[name].shape)}, but the network's has {tuple(expected[name].shape)}; "
            "give one network, or a population with one leading axis on every tensor"
        )
    return extra == {1}


def require_one(module: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if the parameters have a leading model axis, as those of a population.

    Raises:
        ValueError: The parameters have a leading model axis, or do not fit the module.
    """
    if is_population(module, params):
        raise ValueError("these are the parameters of a population; extract the surface of one network at a time")
