"""Running statistics of batch normalization, recomputed for a network that was not trained."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from regauge.core.params import Params
from regauge.core.task import call, evaluating


def reset_batchnorm(params: Mapping[str, Tensor], module: nn.Module, batches: Iterable[Any]) -> Params:
    """Recompute the running means and variances of every batch normalization layer from data.

    An average of two networks has activations of its own, often of much smaller variance than those that
    averaged statistics describe. The new statistics are the plain averages over the batches of each batch's
    mean and unbiased variance, all layers in the same forward passes: each layer normalizes by its batch while
    statistics are collected, everything else is in evaluation mode.

    Args:
        params: Parameters and buffers, unchanged.
        module: How to run the parameters; its own are not used.
        batches: Inputs without labels, or tuples of positional or mappings of keyword inputs.

    Returns:
        The same parameters with new statistics; equal to `params` where the module has none.

    Raises:
        ValueError: There are no batches, for instance because an iterator was used before.

    References:
        Ainsworth et al. (2023); Jordan et al. (2023), REPAIR.
    """
    layers = _layers(module)
    if not layers:
        return dict(params)
    state = dict(params)
    for name in layers:
        prefix = f"{name}." if name else ""
        for key, start in (("running_mean", 0), ("running_var", 1), ("num_batches_tracked", 0)):
            state[prefix + key] = torch.full_like(params[prefix + key], start)
    momenta = {name: layer.momentum for name, layer in layers.items()}
    seen = 0
    with evaluating(module):
        try:
            for layer in layers.values():
                layer.train()
                layer.momentum = None  # Then torch keeps the cumulative average.
            with torch.no_grad():
                for batch in batches:
                    call(module, state, batch)
                    seen += 1
        finally:
            for name, layer in layers.items():
                layer.momentum = momenta[name]
    if not seen:
        raise ValueError(
            "there are no batches to recompute the statistics from; give a list or a loader that can be read "
            "more than once, not an iterator"
        )
    return state


def has_statistics(module: nn.Module) -> bool:
    """Whether there is something for `reset_batchnorm` to recompute."""
    return bool(_layers(module))


def _layers(module: nn.Module) -> dict[str, _BatchNorm]:
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.running_mean is not None
    }
