"""Points between networks, their means, and how far apart networks are.

Half precision is computed in float32 and rounded once. Tensors without values (positions, masks) must be equal in all
networks; counters are those of the first one.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from regauge.core.movable import VALUES, require_shared
from regauge.core.params import Params, require_same_names


def interpolate(params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], t: float | Tensor = 0.5) -> Params:
    """`(1 - t) a + t b`, and exactly a and b at the ends.

    Integer buffers at t = 1 are those of the second network. For populations t may be a tensor `[models]`.
    """
    return combine((params_a, params_b), (1 - t, t))


def combine(networks: Sequence[Mapping[str, Tensor]], weights: Sequence[float | Tensor]) -> Params:
    """`sum_k weights[k] networks[k]`, and exactly network k where its weight is one and all others are zero.

    A ValueError names parameters that only one network has, or a tensor without values that differs.
    """
    used = [(network, w) for network, w in zip(networks, weights, strict=True) if isinstance(w, Tensor) or w != 0]
    if len(used) == 1 and not isinstance(used[0][1], Tensor) and used[0][1] == 1:
        return dict(used[0][0])
    for network, _ in used:
        if not networks[0].keys() <= network.keys():
            require_same_names(networks[0], network)
    lead = max((weight.ndim for _, weight in used if isinstance(weight, Tensor)), default=0)
    result = {}
    for name, first in networks[0].items():
        if first.dtype not in VALUES:
            require_shared(name, [first, *(network[name] for network, _ in used)], lead=lead)
            result[name] = first
            continue
        total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
        for network, weight in used:
            if isinstance(weight, Tensor):
                weight = weight.reshape(*weight.shape, *[1] * (first.ndim - weight.ndim)).to(total)
            total = total + weight * network[name].to(total)
        result[name] = total.to(first.dtype)
    return result


def mean(networks: Sequence[Mapping[str, Tensor]], shares: Sequence[float] | None = None) -> Params:
    """The mean of networks with these shares, which sum to one; equal by default. It shares no memory with them."""
    result = combine(networks, shares_of(None, len(networks)) if shares is None else shares)
    return {name: t.clone() if any(t is n[name] for n in networks) else t for name, t in result.items()}


def shares_of(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """Weights of `count` networks as shares that sum to one; equal by default.

    A ValueError says that they are not as many as networks, negative, not finite, or all zero.
    """
    given = [1.0] * count if weights is None else [float(w) for w in weights]
    if len(given) != count or any(not 0 <= w < math.inf for w in given) or sum(given) <= 0:
        raise ValueError(
            f"weights are {given} for {count} networks; give one finite weight for each, none negative and not all zero"
        )
    return tuple(w / sum(given) for w in given)


def distance(params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], buffers: Collection[str] = ()) -> float:
    """Euclidean distance of two networks, computed in float64.

    Args:
        params_a: The first network; its floating-point tensors are compared.
        params_b: The second network.
        buffers: Names of tensors that are left out. `regauge align`, `regauge merge` and model cards leave out
            `symmetry.buffers`: running statistics are no weights, and their values would hide the distance of the
            weights.
    """
    squares = 0.0
    for name, tensor in params_a.items():
        if tensor.is_floating_point() and name not in buffers:
            difference = tensor.to(torch.float64, copy=True)
            difference -= params_b[name].to(difference)
            squares += float(difference.square_().sum())
    return math.sqrt(squares)
