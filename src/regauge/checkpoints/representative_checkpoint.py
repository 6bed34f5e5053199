"""A checkpoint on the disk whose tensors are read as those of its representative."""

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.core.chart import charted
from regauge.core.lazy_chart import LazyRepresentative
from regauge.core.params import work_dtype
from regauge.core.symmetry import Symmetry


class RepresentativeCheckpoint(Checkpoint):
    """A checkpoint without translations and gains, as `Symmetry.split` takes them out; tensors come one at a time.

    Args:
        source: The checkpoint.
        symmetry: With every size known.
    """

    def __init__(self, source: Checkpoint, symmetry: Symmetry) -> None:
        super().__init__(source.label, source.path, source.stored, source.metadata)
        self.source = source
        self._take_over(source)
        self._changed = charted(symmetry)
        self._tensors = LazyRepresentative(symmetry, source.read)
        self._last: tuple[str, Tensor] = "", torch.empty(0)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is read: 16 bits would make another function of it."""
        own = self.source.dtype_of(name)
        return work_dtype(own) if name in self._changed else own

    def read(self, name: str, *, rows: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of one tensor, or of a range of its first axis."""
        if name not in self._changed:
            return self.source.read(name, rows=rows, dtype=dtype)
        dtype = dtype or self.dtype_of(name)
        if rows is None:
            return self._tensors.parameter(name).to(dtype)
        if self._last[0] != name:
            self._last = name, self._tensors.parameter(name).to(dtype)
        return self._last[1][rows[0] : rows[1]].to(dtype, copy=True)
