"""Norms and inner products of large tensors, for rules that interpolate on spheres."""

import math

import torch
from torch import Tensor

PARALLEL = 1e-6
"""A limit. Tensors at an angle with a smaller sine count as parallel. A mean of directions with a smaller norm is
discarded."""


SPHERE_ENTRIES_AT_ONCE = 1 << 17
"""The number of entries in a chunk for inner products."""


def length(tensor: Tensor) -> float:
    """Return the Euclidean norm of all entries, summed in float64."""
    return math.sqrt(inner_product(tensor, tensor))


def inner_product(a: Tensor, b: Tensor) -> float:
    """Return the inner product of all entries in float64, computed in chunks to avoid large copies."""
    portions = zip(*(torch.split(tensor.flatten(), SPHERE_ENTRIES_AT_ONCE) for tensor in (a, b)), strict=True)
    return sum(float(torch.dot(x.double(), y.double())) for x, y in portions)
