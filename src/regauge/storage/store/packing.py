"""The rows of a shard: a segment for each dtype, and in it one tensor after the other."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regauge.core.params import Params
from regauge.storage.architecture import TensorSpec
from regauge.storage.store.columns import Array

STORAGE = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""Dtypes in which floating-point values can be kept in half the bytes."""


@dataclass(frozen=True)
class Segment:
    """The tensors of a network that are stored in one dtype.

    Attributes:
        dtype: The dtype on the disk.
        specs: The tensors in their order.
    """

    dtype: torch.dtype
    specs: tuple[TensorSpec, ...]

    @cached_property
    def name(self) -> str:
        """The tensor of a shard that holds it."""
        return f"weights/{str(self.dtype).removeprefix('torch.')}"

    @cached_property
    def size(self) -> int:
        """Values of one network."""
        return sum(spec.size for spec in self.specs)

    @cached_property
    def width(self) -> int:
        """Bytes of one network."""
        return self.size * self.dtype.itemsize

    def pack(self, params: Mapping[str, Tensor], count: int) -> Tensor:
        """Rows of values from networks, `[count, size]` on the CPU."""
        rows = [params[spec.name].detach().reshape(count, spec.size).to(self.dtype).cpu() for spec in self.specs]
        return torch.cat(rows, dim=1).contiguous()

    def unpack(self, rows: Tensor) -> Params:
        """Networks from rows of values: views of them where the values are stored as they are."""
        count, dtypes = len(rows), {spec.dtype for spec in self.specs}
        if len(dtypes) == 1:
            rows = rows.to(self.specs[0].dtype)
        pieces = rows.split_with_sizes([spec.size for spec in self.specs], 1)
        params = {spec.name: piece.view(count, *spec.shape) for spec, piece in zip(self.specs, pieces, strict=True)}
        return params if len(dtypes) == 1 else {spec.name: params[spec.name].to(spec.dtype) for spec in self.specs}


def segments_of(layout: tuple[TensorSpec, ...], storage: str | None) -> tuple[Segment, ...]:
    """The tensors of one network by the dtype in which they are stored."""
    segments: dict[torch.dtype, list[TensorSpec]] = {}
    for spec in layout:
        stored = STORAGE[storage] if storage is not None and spec.dtype.is_floating_point else spec.dtype
        segments.setdefault(stored, []).append(spec)
    return tuple(Segment(dtype, tuple(specs)) for dtype, specs in segments.items())


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
