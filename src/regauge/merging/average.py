"""The weighted mean of networks, tensor by tensor."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regauge.core.params import Params


def shares_of(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """Weights of `count` networks as shares that sum to one; equal unless given.

    Raises:
        ValueError: They are not as many as networks, negative, not finite, or all zero.
    """
    given = [1.0] * count if weights is None else [float(w) for w in weights]
    if len(given) != count or any(not 0 <= w < math.inf for w in given) or sum(given) <= 0:
        raise ValueError(
            f"weights are {given} for {count} networks; give one finite weight for each, none negative and not all zero"
        )
    return tuple(w / sum(given) for w in given)


def mean(networks: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> Params:
    """`sum_k shares[k] networks[k]`, with the first network's dtypes, devices and integer buffers.

    Sums are taken in float32 or float64; the result shares no memory with the networks.
    """
    result: Params = {}
    for name, tensor in networks[0].items():
        if tensor.is_floating_point():
            sums = torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
            for network, share in zip(networks, shares, strict=True):
                sums += network[name].to(sums) * share
            result[name] = sums.to(tensor.dtype)
        else:
            result[name] = tensor.clone()
    return result
