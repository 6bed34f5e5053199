"""Points between networks: affine combinations of parameters."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regauge.core.params import Params


def interpolate(params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], t: float) -> Params:
    """`(1 - t) a + t b`, and exactly a and b at the ends.

    Half precision is interpolated in float32 and rounded once. Integer buffers (counters, positions) are
    those of the first network, at t = 1 those of the second.
    """
    return combine((params_a, params_b), (1 - t, t))


def combine(networks: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> Params:
    """`sum_k weights[k] networks[k]`, and exactly network k where its weight is one and all others are zero.

    Half precision is combined in float32 and rounded once. Integer buffers are those of the first network, or of
    the only one that counts.
    """
    used = [(params, weight) for params, weight in zip(networks, weights, strict=True) if weight != 0]
    if len(used) == 1 and used[0][1] == 1:
        return dict(used[0][0])
    result = {}
    for name, first in networks[0].items():
        if not first.is_floating_point():
            result[name] = first
            continue
        dtype = torch.promote_types(first.dtype, torch.float32)
        total = sum((w * params[name].to(device=first.device, dtype=dtype) for params, w in used), torch.zeros(()))
        result[name] = total.to(first.dtype)
    return result
