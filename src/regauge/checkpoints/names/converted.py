"""A checkpoint under its module's tensor names, for files whose tensor names differ."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import READ_BYTES, Checkpoint, CheckpointView
from regauge.checkpoints.form import Form
from regauge.checkpoints.formats.headers import StoredTensor
from regauge.checkpoints.names.conversion import Conversion, join, name_as_stored
from regauge.checkpoints.writing import Pieces, Shard
from regauge.core.params import Params


class Converted(CheckpointView):
    """A checkpoint under a module's tensor names. The tensors stay in the files until they are read.

    If a checkpoint is written from this view, it has the names, shapes, dtypes, order and number of the original files.

    Attributes:
        source: The checkpoint under the names of its files.
        conversion: The file tensors from which each module tensor is assembled.
    """

    def __init__(self, source: Checkpoint, conversion: Conversion) -> None:
        stored = {name: source.stored[there]._replace(name=name) for name, there in conversion.renamed.items()}
        for name, boxes in conversion.made.items():
            blank, first = conversion.blanks[name], source.stored[boxes[0].source]
            nbytes = blank.numel * blank.dtype.itemsize
            stored[name] = StoredTensor(name, first.file, blank.dtype, blank.shape, first.start, nbytes)
        super().__init__(source, stored)
        self.conversion = conversion

    @property
    def unknown(self) -> tuple[str, ...]:
        """Tensors in the files that no class of the checkpoint's model has."""
        return self.conversion.unknown

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is read."""
        if self._params is not None:
            return super().dtype_of(name)
        there = self.conversion.renamed.get(name)
        return self.form.work_dtype(self.stored[name].dtype) if there is None else self.source.dtype_of(there)

    def layout(self, file: str | None = None) -> list[Shard]:
        """Return the files of a new checkpoint, with the same names, dtypes and order as in the source's files."""
        return [replace(shard, translate=self._translate) for shard in self.source.layout(file)]

    def written_as(self, form: Form) -> "Converted":
        """Return a copy that is written in another form.

        The copy is read in a dtype that is wide enough for `form`.
        """
        result = cast(Converted, super().written_as(form))
        result.source = self.source.written_as(form)
        result.read_so_far = result.source.read_so_far
        return result

    def view_alike(self, other: Checkpoint) -> Checkpoint:
        """Return another checkpoint, whose files use the same tensor names, under the module's names."""
        return Converted(other, self.conversion)

    def as_stored(self) -> Params:
        """Return all tensors by their names in the files."""
        pieces = self._translate(lambda name: iter([self[name]]))
        return {name: join(pieces(name)) for name in self.source.stored}

    def from_stored(self, params: Mapping[str, Tensor]) -> Params:
        """Return tensors under the module's names, given tensors under the names of the files."""
        there = Converted(self.source.with_params(params), self.conversion)
        return {name: there.read(name) for name in there.stored}

    def read(self, name: str, *, rows: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of one tensor, or of a range of its first axis, converted to a dtype chunk by chunk."""
        if self._params is not None:
            return super().read(name, rows=rows, dtype=dtype)
        if name in self.conversion.renamed:
            return self.source.read(self.conversion.renamed[name], rows=rows, dtype=dtype)
        dtype = dtype or self.dtype_of(name)
        return self.conversion.make(name, lambda n, r: self.source.read(n, rows=r), rows=rows, dtype=dtype)

    def _translate(self, pieces: Pieces) -> Pieces:
        return name_as_stored(self.conversion, pieces, self._read_extra)

    def _read_extra(self, name: str) -> Iterator[Tensor]:
        for rows in ranges_of(self.source.stored[name]):
            yield self.source.read(name, rows=rows)


def ranges_of(stored: StoredTensor) -> list[tuple[int, int] | None]:
    """Return the ranges of the first axis in which a tensor is read; None for the whole tensor."""
    if not stored.nbytes:
        return [None]
    size = stored.shape[0] if stored.shape else 1
    rows = max(1, READ_BYTES * size // stored.nbytes)
    return [None] if rows >= size else [(first, min(first + rows, size)) for first in range(0, size, rows)]
