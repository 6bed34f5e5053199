"""How networks lie in the rows of a shard: parts by dtype, tensors one after the other."""

import numpy as np
import torch
from torch import Tensor

from regauge.core.params import Params
from regauge.storage.architecture import TensorSpec
from regauge.storage.store.columns import Array

STORAGE = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""Dtypes in which floating-point values can be kept in half the bytes."""


def parts_of(layout: tuple[TensorSpec, ...], storage: str | None) -> dict[torch.dtype, list[TensorSpec]]:
    """The tensors of one network by the dtype in which they are stored."""
    parts: dict[torch.dtype, list[TensorSpec]] = {}
    for spec in layout:
        stored = STORAGE[storage] if storage is not None and spec.dtype.is_floating_point else spec.dtype
        parts.setdefault(stored, []).append(spec)
    return parts


def are_finite(flat: Tensor) -> Tensor:
    """Whether all values of a row are finite, `[rows]`."""
    # A finite sum has finite terms, and costs one reading; one that is not may only have overflowed.
    fine = flat.sum(1).isfinite()
    for row in (~fine).nonzero().flatten().tolist():
        fine[row] = flat[row].isfinite().all()
    return fine


def name_of(dtype: torch.dtype) -> str:
    """Such as "float32"."""
    return str(dtype).removeprefix("torch.")


def unpacked(flat: Tensor, specs: list[TensorSpec]) -> Params:
    """Tensors by name from rows of values."""
    dtypes = {spec.dtype for spec in specs}
    if len(dtypes) == 1:
        flat = flat.to(specs[0].dtype)
    pieces = torch.split(flat, [spec.size for spec in specs], dim=1)
    return {
        spec.name: piece.view(len(flat), *spec.shape).to(spec.dtype) for spec, piece in zip(specs, pieces, strict=True)
    }


def memory_of(tensor: Tensor, size: int) -> Array:
    """The bytes behind a tensor that begins a batch.

    Raises:
        ValueError: They are not the memory of a batch of that many bytes.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() != size or tensor.storage_offset():
        raise ValueError(
            f"`out` has {storage.nbytes()} bytes instead of {size}; give what `read` returned for as many networks, "
            "from a store that keeps values as they are"
        )
    memory: Array = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return memory


def runs_of(wanted: Array, order: Array, starts: Array) -> list[tuple[int, int, int, int]]:
    """What to read: (shard, row, position in the result, length), where neighbors in both are read at once."""
    if not len(wanted):
        return []
    indices = wanted[order]
    number = np.searchsorted(starts, indices, side="right") - 1
    joined = (np.diff(indices) == 1) & (np.diff(order) == 1) & (np.diff(number) == 0)
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    length = np.diff(np.append(first, len(indices)))
    row = indices - starts[number]
    return list(zip(number[first].tolist(), row[first].tolist(), order[first].tolist(), length.tolist(), strict=True))
