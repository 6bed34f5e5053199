"""Checkpoints on the disk whose tensors are transformed while they are read, for example by an element."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint, CheckpointView
from regauge.core.chart import changed_by, charted, widen
from regauge.core.element import Element
from regauge.core.families import move_tensor
from regauge.core.lazy_chart import LazyRepresentative, LazyTensors, Rows, move_lazily
from regauge.core.params import round_to, work_dtype
from regauge.core.symmetry import Symmetry


class ChartedCheckpoint(CheckpointView):
    """A checkpoint with some tensors that are computed from stored tensors when they are read.

    Args:
        source: The checkpoint.
        symmetry: The symmetry, with every size known.
        changed: The names of the computed tensors.
        tensors: The object that computes the tensors in `changed`.
    """

    def __init__(
        self, source: Checkpoint, symmetry: Symmetry, changed: Collection[str], tensors: LazyTensors | None
    ) -> None:
        super().__init__(source, source.stored)
        self.symmetry = symmetry
        self._made, self._tensors = frozenset(changed), tensors
        self._first: Mapping[str, str] = {
            name: next(one for one in names if one in source) for names in symmetry.tied for name in names
        }

    def read(self, name: str, *, rows: Rows = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of one tensor, or of a range of its first axis if no group acts on this axis."""
        if name not in self._made:
            return self._read_plain(name, rows, dtype)
        assert self._tensors is not None
        made = self._tensors.parameter(self._first.get(name, name), rows)
        return round_to(made, dtype or self.dtype_of(name), name)

    def _read_plain(self, name: str, rows: Rows, dtype: torch.dtype | None) -> Tensor:
        return self.source.read(name, rows=rows, dtype=dtype)


class RepresentativeCheckpoint(ChartedCheckpoint):
    """A checkpoint from which translations and gains are removed, as by `Symmetry.split`, one tensor at a time.

    Args:
        source: The checkpoint.
        symmetry: The symmetry, with every size known.

    Attributes:
        coordinates: The coordinates of the network, which `Symmetry.split` also returns.
    """

    def __init__(self, source: Checkpoint, symmetry: Symmetry) -> None:
        tensors = LazyRepresentative(symmetry, lambda name, rows: source.read(name, rows=rows))
        super().__init__(source, symmetry, charted(symmetry), tensors)
        self.coordinates = tensors.coordinates

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is read.

        The dtype has at least 32 bits, because rounding to 16 bits would change the function of the network.
        """
        own = self.source.dtype_of(name)
        return work_dtype(own) if name in self._made else own


class MovedCheckpoint(ChartedCheckpoint):
    """A checkpoint transformed by an element, as by `Symmetry.act`, one tensor at a time.

    Args:
        source: The checkpoint.
        symmetry: The symmetry, with every size known.
        element: A single element.
        is_wide: Whether translated or rotated tensors are computed in the next wider dtype, and keep this dtype.
    """

    def __init__(self, source: Checkpoint, symmetry: Symmetry, element: Element, *, is_wide: bool = False) -> None:
        self._element = element

        def read(name: str, rows: Rows) -> Tensor:
            tensor = source.read(name, rows=rows)
            return move_tensor(symmetry, element, name, widen(tensor) if is_wide else tensor)

        changed = changed_by(symmetry, element)
        super().__init__(source, symmetry, changed, move_lazily(symmetry, element, read) if changed else None)

    def _read_plain(self, name: str, rows: Rows, dtype: torch.dtype | None) -> Tensor:
        return move_tensor(self.symmetry, self._element, name, super()._read_plain(name, rows, dtype))
