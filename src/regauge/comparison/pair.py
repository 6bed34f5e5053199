"""Two networks under one symmetry, read tensor by tensor, from memory or from files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.core.families import row_ranges
from regauge.core.movable import VALUES
from regauge.core.params import Params, work_dtype
from regauge.core.symmetry import Symmetry

COMPARED_BYTES = 1 << 26
"""Bytes of a piece of a tensor that nothing moves along its first axis."""


@dataclass(frozen=True)
class Pair:
    """Two networks that are compared.

    Attributes:
        first: The network that is not moved: parameters by name, or a checkpoint on the disk.
        second: The network that is moved.
        symmetry: The symmetry of both networks, with every size known.
    """

    first: Mapping[str, Tensor] | Checkpoint
    second: Mapping[str, Tensor] | Checkpoint
    symmetry: Symmetry

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The compared tensors and their shapes: values, no buffers, one of several names of one tensor."""
        ignored = {*self.symmetry.buffers, *(name for names in self.symmetry.tied for name in names[1:])}
        meta: Params = self.first.on_meta() if isinstance(self.first, Checkpoint) else dict(self.first)
        return {
            name: tuple(tensor.shape)
            for name, tensor in meta.items()
            if name not in ignored and tensor.dtype in VALUES and tensor.numel()
        }

    def load(self, name: str, rows: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Return a tensor of both networks, or a range of its first axis, on the CPU in the precision of the
        comparison."""
        pair = [_read(network, name, rows) for network in (self.first, self.second)]
        dtype = work_dtype(*(tensor.dtype for tensor in pair))
        return pair[0].to("cpu", dtype), pair[1].to("cpu", dtype)

    def pieces(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the same tensor of both networks in pieces that an element moves one at a time."""
        first = self.first
        shape = first.stored[name].shape if isinstance(first, Checkpoint) else first[name].shape
        for rows in row_ranges(self.symmetry, name, shape, COMPARED_BYTES):
            yield self.load(name, rows)


def _read(network: Mapping[str, Tensor] | Checkpoint, name: str, rows: tuple[int, int] | None) -> Tensor:
    if isinstance(network, Checkpoint):
        return network.read(name, rows=rows)
    tensor = network[name].detach()
    return tensor if rows is None else tensor[rows[0] : rows[1]]
