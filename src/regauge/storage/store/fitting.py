"""What fits into a store."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regauge.storage.architecture import Architecture, TensorSpec
from regauge.storage.store.packing import are_finite, name_of
from regauge.storage.store.shard import Shard

Parts = Mapping[torch.dtype, Sequence[TensorSpec]]
"""Tensors by the dtype that they are stored in."""


def require_fitting(shard: Shard, parts: Parts) -> None:
    """Refuse a shard of other networks.

    Raises:
        ValueError: It has other values than these.
    """
    for dtype, specs in parts.items():
        expected = (shard.count, sum(spec.size for spec in specs))
        place = shard.places.get(f"weights/{name_of(dtype)}")
        if place is None or (place.dtype, place.shape) != (dtype, expected):
            raise ValueError(
                f"the shard {str(shard.path)!r} has no {name_of(dtype)} values of shape {expected}, so it is of "
                "another store; move it away"
            )


def require_layout(architecture: Architecture, params: Mapping[str, Tensor], count: int) -> None:
    """Refuse networks of another architecture.

    Raises:
        ValueError: They have other tensors.
    """
    layout = {spec.name: spec for spec in architecture.layout}
    if params.keys() != layout.keys():
        raise ValueError(
            f"the store's networks have {sorted(layout.keys() - params.keys())[:4]} besides, and lack "
            f"{sorted(params.keys() - layout.keys())[:4]}; append networks of {architecture.name!r}"
        )
    for name, tensor in params.items():
        spec = layout[name]
        if tuple(tensor.shape) != (count, *spec.shape) or tensor.dtype != spec.dtype:
            raise ValueError(
                f"{name!r} has shape {tuple(tensor.shape)} and {tensor.dtype}, but {count} rows of "
                f"{architecture.name!r} need {(count, *spec.shape)} and {spec.dtype}"
            )


def require_range(
    storage: str, params: Mapping[str, Tensor], finite: Tensor, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse values that get lost where they are stored in fewer bits, unless their network diverged.

    Args:
        storage: Name of the dtype.
        params: `[networks, ...]`.
        finite: Which networks are finite as they are stored, `[networks]`.
        rows: What is known of them.

    Raises:
        ValueError: A network is not finite as it is stored, and was before.
    """
    before = torch.ones_like(finite)
    for tensor in params.values():
        if tensor.is_floating_point():
            before &= are_finite(tensor.reshape(len(finite), math.prod(tensor.shape[1:]))).cpu()
    lost = [k for k in (before & ~finite).nonzero().flatten().tolist() if not rows[k].get("is_diverged")]
    if lost:
        raise ValueError(
            f"network {rows[lost[0]]['id']} has values too large for {storage}; store it as bfloat16 or in "
            "full precision"
        )
