"""Align networks with one another, and average them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regauge.align import ManyMethod, Method, align_many
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


def merge(
    params: Sequence[Mapping[str, Tensor]],
    symmetry: Symmetry,
    *,
    method: ManyMethod | Method | None = None,
    weights: Sequence[float] | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
) -> Params:
    """The weighted mean of networks that are aligned with one another, in the coordinates of the first.

    Running statistics are averaged like weights; recompute them with `reset_batchnorm` where the model has
    batch normalization.

    Args:
        params: The networks, one at least; all of one architecture.
        symmetry: Of that architecture.
        method: How to align, as in `align_many`: `MergeMany()` unless given; a method for pairs aligns every
            network to the first.
        weights: Share of each network in the mean, normalized to sum to one; equal unless given. The alignment
            does not look at them.
        task: Model, data and loss, for methods that use them.
        generator: Where chance comes from, for methods that use it.

    Returns:
        New parameters with the first network's dtypes, devices and integer buffers. Sums are taken in float32
        or float64. Until they are, all aligned networks are held in memory.

    Raises:
        ValueError: There is no network, weights do not fit, or the networks cannot be aligned.

    References:
        Ainsworth et al. (2023), Git Re-Basin; Crisostomi et al. (2024), C2M3.
    """
    if not params:
        raise ValueError("there is no network to merge; give at least one")
    shares = [1.0] * len(params) if weights is None else [float(w) for w in weights]
    if len(shares) != len(params) or any(not 0 <= w < float("inf") for w in shares) or sum(shares) <= 0:
        raise ValueError(
            f"weights are {shares} for {len(params)} networks; give one finite weight for each, none negative and "
            "not all zero"
        )
    aligned = align_many(params, symmetry, method=method, task=task, generator=generator).params
    total = sum(shares)
    merged: Params = {}
    for name, tensor in params[0].items():
        if tensor.is_floating_point():
            sums = torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
            for network, share in zip(aligned, shares, strict=True):
                sums += network[name].to(sums) * (share / total)
            merged[name] = sums.to(tensor.dtype)
        else:
            merged[name] = tensor.clone()
    return merged
