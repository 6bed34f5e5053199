"""Align networks to the first one, and average them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regauge.align import Method, align
from regauge.core.params import Params, require_finite
from regauge.core.symmetry import Symmetry


def merge(
    params: Sequence[Mapping[str, Tensor]],
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    weights: Sequence[float] | None = None,
    generator: torch.Generator | None = None,
) -> Params:
    """The weighted mean of networks, each aligned to the first.

    Running statistics are averaged like weights; recompute them with `reset_batchnorm` where the model has
    batch normalization.

    Args:
        params: The networks, one at least; all of one architecture.
        symmetry: Of that architecture.
        method: How to align; `WeightMatching()` unless given.
        weights: Share of each network, normalized to sum to one; equal unless given.
        generator: Where chance comes from, for methods that use it.

    Returns:
        New parameters with the first network's dtypes, devices and integer buffers. Sums are taken in float32
        or float64.

    Raises:
        ValueError: There is no network, weights do not fit, or the networks cannot be aligned.

    References:
        Ainsworth et al. (2023), Git Re-Basin.
    """
    if not params:
        raise ValueError("there is no network to merge; give at least one")
    shares = [1.0] * len(params) if weights is None else [float(w) for w in weights]
    if len(shares) != len(params) or any(not 0 <= w < float("inf") for w in shares) or sum(shares) <= 0:
        raise ValueError(
            f"weights are {shares} for {len(params)} networks; give one finite weight for each, none negative and "
            "not all zero"
        )
    first = params[0]
    require_finite(first, "the first network")
    total = sum(shares)
    sums = {
        name: tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * (shares[0] / total)
        for name, tensor in first.items()
        if tensor.is_floating_point()
    }
    for other, share in zip(params[1:], shares[1:], strict=True):
        aligned = align(first, other, symmetry, method=method, generator=generator).params
        for name, partial in sums.items():
            sums[name] = partial + aligned[name].to(partial) * (share / total)
    return {name: sums[name].to(tensor.dtype) if name in sums else tensor.clone() for name, tensor in first.items()}
