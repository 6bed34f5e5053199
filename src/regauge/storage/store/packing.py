"""Networks as rows of numbers. A row has one segment of concatenated tensors for each dtype."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from regauge.checkpoints.formats.headers import TensorSpec
from regauge.core.params import Params
from regauge.storage.architecture import Architecture
from regauge.storage.store.columns import Array, Row

STORAGE = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""Dtypes with 16 bits in which floating-point entries can be stored."""


@dataclass(frozen=True)
class Segment:
    """The tensors of a network that are stored in one dtype, in order."""

    dtype: torch.dtype
    specs: tuple[TensorSpec, ...]

    @cached_property
    def name(self) -> str:
        """The name of the tensor in a shard that contains this segment."""
        return f"weights/{str(self.dtype).removeprefix('torch.')}"

    @cached_property
    def size(self) -> int:
        """The number of entries per network."""
        return sum(spec.size for spec in self.specs)

    @cached_property
    def width(self) -> int:
        """The number of bytes per network."""
        return self.size * self.dtype.itemsize

    def pack(self, params: Mapping[str, Tensor], count: int) -> Tensor:
        """Convert networks to rows of entries, `[count, size]` on the CPU."""
        rows = [params[spec.name].detach().reshape(count, spec.size).to(self.dtype).cpu() for spec in self.specs]
        return torch.cat(rows, dim=1).contiguous()

    def unpack(self, rows: Tensor) -> Params:
        """Convert rows of entries to networks. Tensors are views if their dtype equals the storage dtype."""
        count, dtypes = len(rows), {spec.dtype for spec in self.specs}
        if len(dtypes) == 1:
            rows = rows.to(self.specs[0].dtype)
        pieces = rows.split_with_sizes([spec.size for spec in self.specs], 1)
        params = {spec.name: piece.view(count, *spec.shape) for spec, piece in zip(self.specs, pieces, strict=True)}
        return params if len(dtypes) == 1 else {spec.name: params[spec.name].to(spec.dtype) for spec in self.specs}


def segments_of(layout: tuple[TensorSpec, ...], storage: str | None) -> tuple[Segment, ...]:
    """Return the segments of a network, that is, its tensors grouped by storage dtype."""
    segments: dict[torch.dtype, list[TensorSpec]] = {}
    for spec in layout:
        stored = STORAGE[storage] if storage is not None and spec.dtype.is_floating_point else spec.dtype
        segments.setdefault(stored, []).append(spec)
    return tuple(Segment(dtype, tuple(specs)) for dtype, specs in segments.items())


def require_networks(architecture: Architecture, params: Mapping[str, Tensor], rows: Sequence[Row]) -> None:
    """Raise a ValueError unless the networks have the architecture and each row has the required columns."""
    layout, count = {spec.name: spec for spec in architecture.layout}, len(rows)
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
    for k, row in enumerate(rows):
        for key in ("id", "step"):
            if not isinstance(row.get(key), int | np.integer) or isinstance(row[key], bool):
                raise ValueError(f"row {k} has {key}={row.get(key)!r}; each row needs an integer 'id' and 'step'")


def pack(
    params: Mapping[str, Tensor], rows: Sequence[Row], segments: Sequence[Segment], storage: str | None
) -> tuple[dict[str, Tensor], list[bool]]:
    """Return the tensors of a shard for some networks, and whether each network is finite as stored.

    Raises:
        ValueError: A network without NaN and Inf has entries that are too large for the storage dtype.
    """
    finite, before = (torch.ones(len(rows), dtype=torch.bool) for _ in range(2))
    tensors = {segment.name: segment.pack(params, len(rows)) for segment in segments}
    for tensor in tensors.values():
        finite &= _are_finite(tensor)
    if storage is not None and not finite.all():
        for tensor in params.values():
            before &= _are_finite(tensor.reshape(len(rows), -1)).cpu()
        lost = [k for k in (before & ~finite).nonzero().flatten().tolist() if not rows[k].get("is_diverged")]
        if lost:
            raise ValueError(
                f"network {rows[lost[0]]['id']} has values too large for {storage}; store it as bfloat16 or in "
                "full precision"
            )
    return tensors, finite.tolist()


def memory_of(tensor: Tensor, size: int) -> Array:
    """Return a memory view of `size` bytes that begins with a tensor."""
    storage = tensor.untyped_storage()
    if storage.nbytes() != size or tensor.storage_offset():
        raise ValueError(
            f"`out` has {storage.nbytes()} bytes instead of {size}; give what `read` returned for as many networks, "
            "from a store that does not round values"
        )
    memory: Array = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return memory


def _are_finite(flat: Tensor) -> Tensor:
    """Return whether all entries of each row are finite, `[rows]`."""
    if not flat.is_floating_point():
        return torch.ones(len(flat), dtype=torch.bool)
    # If a sum is finite, all its terms are, and the sum takes one pass. A sum that is not finite may be an overflow.
    fine = flat.sum(1).isfinite()
    for row in (~fine).nonzero().flatten().tolist():
        fine[row] = flat[row].isfinite().all()
    return fine
