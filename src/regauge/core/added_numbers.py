"""Gains written as `1 + weight`: the number that a model adds to a parameter, and the sum that scales and signs act on.

A scale s of a gain 1 + w moves the parameter by `w -> s (w + 1) - 1`. What reads or sets gains does so on the sums, on
which the action is linear as on any other parameter.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from regauge.core.params import Params


def sums(added: Mapping[str, float], params: Mapping[str, Tensor]) -> Params:
    """Return parameters with what the model adds to them, which is computed in at least 32 bits."""
    there = {name: (params[name], number) for name, number in added.items() if name in params}
    wide = {name: t.to(torch.promote_types(t.dtype, torch.float32)) + number for name, (t, number) in there.items()}
    return {**params, **wide}


def from_sums(added: Mapping[str, float], summed: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Params:
    """Return the parameters of sums; those of the given networks where these have the same sums, so that no bit is
    lost."""
    found = dict(summed)
    for name in added:
        if name in summed:
            same = sums(added, {name: given[name]})[name]
            is_same = same.shape == summed[name].shape and torch.equal(same, summed[name].to(same))
            found[name] = given[name].to(summed[name].dtype) if is_same else summed[name] - added[name]
    return found
