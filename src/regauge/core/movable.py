"""Checks that tensors can be moved or averaged: they must hold values, not codes of values, counters or masks."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from regauge.core.groups import Group

VALUES = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
"""Dtypes whose numbers are the values of a network. Float8 is a code: its scales lie in other tensors."""
INTEGERS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
"""Dtypes of masks, indices and counters, which may be quantized weights, too."""


def require_movable(groups: Iterable[Group], params: Mapping[str, Tensor], buffers: Collection[str]) -> None:
    """Refuse tensors without values where a symmetry acts, such as quantized weights.

    Of integer buffers (masks, indices) it may change the order.

    Raises:
        ValueError: A group acts on a tensor that holds no values.
    """
    for group in groups:
        for place in group.placements:
            dtype = params[place.parameter].dtype
            if dtype in VALUES:
                continue
            is_reordered = group.matrix == "none" and not any((*place.scale, *place.sign, *place.parity, *place.shift))
            if is_reordered and dtype in INTEGERS and place.parameter in buffers:
                continue
            raise ValueError(
                f"{place.parameter!r} is {dtype}, but group {group.name!r} acts on it, and only values in float16, "
                f"bfloat16, float32 or float64 can be moved; {_remedy(dtype)}"
            )


def require_shared(name: str, tensors: Sequence[Tensor], *, lead: int = 0) -> None:
    """Refuse tensors of networks that hold no values and differ, since they have no mean.

    Counters, one integer in each network, may differ.

    Args:
        name: The name of the tensor.
        tensors: One of each network.
        lead: The number of leading model axes.

    Raises:
        ValueError: They differ.
    """
    first, *others = tensors
    if first.dtype in VALUES or (first.dtype in INTEGERS and first.ndim <= lead):
        return
    for other in others:
        if other is not first and not _is_same(first, other):
            raise ValueError(
                f"{name!r} is {first.dtype} and differs between the networks, but only values in float16, bfloat16, "
                f"float32 or float64 have a mean; {_remedy(first.dtype)}"
            )


def _is_same(first: Tensor, other: Tensor) -> bool:
    if first.dtype != other.dtype or first.shape != other.shape:
        return False
    if first.dtype not in INTEGERS and not first.is_complex():
        first, other = (tensor.contiguous().view(torch.uint8) for tensor in (first, other))
    return torch.equal(first, other.to(first.device))


def _remedy(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "hold real and imaginary parts in parameters of their own"
    if dtype in (torch.bool, torch.int64):
        return "if it is an index or a mask, register it as a buffer, equal in all networks"
    return "quantized weights must be dequantized first: load the network, dequantize it and save it in bfloat16"
