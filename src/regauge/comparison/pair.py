"""Two networks under one symmetry, read tensor by tensor, and the share of each tensor that the other one explains."""

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
"""Bytes of a piece of a tensor that nothing moves along its first axis."""
FORMATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Formats in which networks are stored, coarse ones first; files may hold such values in a wider one."""


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


@dataclass(frozen=True)
class TensorShare(ExplainedTensor):
    """One tensor of two networks, and the formats in which it may have been stored.

    Attributes:
        formats: The formats that hold all values of the first network's tensor, and the formats for the second
            network's tensor.
        equal: The formats in which both tensors are the same.
    """

    formats: tuple[frozenset[torch.dtype], frozenset[torch.dtype]] = field(repr=False)
    equal: frozenset[torch.dtype] = field(repr=False)

    @property
    def layer(self) -> str:
        """Return the part of the model that contains the tensor: its name without the last word."""
        return self.name.rpartition(".")[0] or self.name


def measure_shares(pair: Pair, element: Element) -> list[TensorShare]:
    """Compare the tensors of two networks as stored and after an element moved the second network; see `ExplainedSums`.

    Args:
        pair: Both networks.
        element: The element that moves the second network.
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
    """The formats that hold the tensor of each network, and those in which both are the same."""

    def __init__(self) -> None:
        self.own, self.equal = (frozenset(FORMATS), frozenset(FORMATS)), frozenset(FORMATS)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Look at a piece of a tensor of both networks."""
        first, second = (
            frozenset(f for f in known if _holds(f, tensor)) for known, tensor in zip(self.own, (x, y), strict=True)
        )
        self.own = first, second
        if not torch.equal(x, y):
            narrow = [f for f in self.equal if f.itemsize < x.itemsize]
            self.equal = frozenset(f for f in narrow if torch.equal(x.to(f), y.to(f)))


def _holds(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Return whether a format holds all values of a tensor."""
    return dtype.itemsize >= tensor.itemsize or torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)
