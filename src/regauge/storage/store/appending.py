"""Networks on their way into a store: checked, packed into rows, and given a name for their shard."""

import os
import threading
import uuid
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from regauge.storage.architecture import Architecture
from regauge.storage.store.columns import Row
from regauge.storage.store.packing import Segment


class ShardNames:
    """Names for the shards of one writer, in their order; a forked process is another writer."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process, self.prefix, self.count = -1, "", 0

    def next(self) -> str:
        """A name that no other writer uses."""
        with self.lock:
            if self.process != os.getpid():
                self.process, self.prefix, self.count = os.getpid(), uuid.uuid4().hex[:12], 0
            self.count += 1
            return f"{self.prefix}-{self.count - 1:06d}"


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


def require_keys(rows: Sequence[Row]) -> None:
    """Refuse rows that do not say which network they are of.

    Raises:
        ValueError: A row has no integer "id" or "step".
    """
    for k, row in enumerate(rows):
        for key in ("id", "step"):
            if not isinstance(row.get(key), int | np.integer) or isinstance(row[key], bool):
                raise ValueError(f"row {k} has {key}={row.get(key)!r}; each row needs an integer 'id' and 'step'")


def pack(
    params: Mapping[str, Tensor], rows: Sequence[Row], segments: Sequence[Segment], storage: str | None
) -> tuple[dict[str, Tensor], list[bool]]:
    """The tensors of a shard from networks, and which of these are finite as they are stored.

    Raises:
        ValueError: A network that did not diverge has values too large for the storage dtype.
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


def _are_finite(flat: Tensor) -> Tensor:
    """Whether all values of a row are finite, `[rows]`."""
    if not flat.is_floating_point():
        return torch.ones(len(flat), dtype=torch.bool)
    # A finite sum has finite terms, and costs one reading; one that is not may only have overflowed.
    fine = flat.sum(1).isfinite()
    for row in (~fine).nonzero().flatten().tolist():
        fine[row] = flat[row].isfinite().all()
    return fine
