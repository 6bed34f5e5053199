"""Two networks, read tensor by tensor, and the explained share (squared correlation) of each tensor."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.core.element import Element
from regauge.core.families import move_tensor, row_ranges
from regauge.core.interpolation import ExplainedSums, ExplainedTensor
from regauge.core.params import VALUES, Params, work_dtype
from regauge.core.symmetry import Symmetry

COMPARED_BYTES = 1 << 26
"""The number of bytes of a tensor's chunk, if the tensor can be compared in chunks."""
FORMATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The formats in which networks are stored, from coarse to fine. A file may contain numbers of a coarse format in a
finer format."""


@dataclass(frozen=True)
class Pair:
    """Two networks that are compared.

    Attributes:
        first: The first network, which stays unchanged: parameters by name, or a checkpoint on disk.
        second: The second network, to which elements are applied.
        symmetry: The symmetry of both networks. All sizes of its groups must be known.
    """

    first: Mapping[str, Tensor] | Checkpoint
    second: Mapping[str, Tensor] | Checkpoint
    symmetry: Symmetry

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The compared tensors and their shapes. Buffers are left out, and a tied tensor appears under one name."""
        ignored = {*self.symmetry.buffers, *(name for names in self.symmetry.tied for name in names[1:])}
        meta: Params = self.first.on_meta() if isinstance(self.first, Checkpoint) else dict(self.first)
        return {
            name: tuple(tensor.shape)
            for name, tensor in meta.items()
            if name not in ignored and tensor.dtype in VALUES and tensor.numel()
        }

    def load(self, name: str, rows: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Return a tensor of both networks, or a range of its first axis, on the CPU in the comparison's precision."""
        pair = [_read(network, name, rows) for network in (self.first, self.second)]
        dtype = work_dtype(*(tensor.dtype for tensor in pair))
        return pair[0].to("cpu", dtype), pair[1].to("cpu", dtype)

    def pieces(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one tensor of both networks, in chunks to which an element can be applied separately."""
        first = self.first
        shape = first.stored[name].shape if isinstance(first, Checkpoint) else first[name].shape
        for rows in row_ranges(self.symmetry, name, shape, COMPARED_BYTES):
            yield self.load(name, rows)


@dataclass(frozen=True)
class TensorShare(ExplainedTensor):
    """The comparison of one tensor in two networks, and the formats in which it may have been stored.

    Attributes:
        formats: For each of the two networks, the formats that represent all entries of the tensor exactly.
        equal: The formats in which both tensors are equal.
    """

    formats: tuple[frozenset[torch.dtype], frozenset[torch.dtype]] = field(repr=False)
    equal: frozenset[torch.dtype] = field(repr=False)

    @property
    def layer(self) -> str:
        """Return the module that contains the tensor: its name without the last component."""
        return self.name.rpartition(".")[0] or self.name


def measure_shares(pair: Pair, element: Element) -> list[TensorShare]:
    """Compare the tensors of two networks as stored, and after an element was applied to the second network.

    Args:
        pair: Both networks.
        element: The element that is applied to the second network.
    """
    result = []
    for name, shape in pair.shapes.items():
        total, formats = ExplainedSums(), _Formats()
        for x, y in pair.pieces(name):
            total.add(pair.symmetry, name, x, y, move_tensor(pair.symmetry, element, name, y))
            formats.add(x, y)
        result.append(TensorShare(**vars(total.tensor(name, shape)), formats=formats.own, equal=formats.equal))
    return result


def _read(network: Mapping[str, Tensor] | Checkpoint, name: str, rows: tuple[int, int] | None) -> Tensor:
    if isinstance(network, Checkpoint):
        return network.read(name, rows=rows)
    tensor = network[name].detach()
    return tensor if rows is None else tensor[rows[0] : rows[1]]


class _Formats:
    """The formats that represent each network's tensor exactly, and the formats in which both tensors are equal."""

    def __init__(self) -> None:
        self.own, self.equal = (frozenset(FORMATS), frozenset(FORMATS)), frozenset(FORMATS)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Check a chunk of a tensor of both networks."""
        first, second = (
            frozenset(f for f in known if holds(f, tensor)) for known, tensor in zip(self.own, (x, y), strict=True)
        )
        self.own = first, second
        if not torch.equal(x, y):
            narrow = [f for f in self.equal if f.itemsize < x.itemsize]
            self.equal = frozenset(f for f in narrow if torch.equal(x.to(f), y.to(f)))


def holds(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Return whether a format represents all entries of a tensor exactly."""
    return dtype.itemsize >= tensor.itemsize or torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)
