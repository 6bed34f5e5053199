"""Shares of each tensor of one network that another network explains, as stored and after alignment."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from regauge.comparison.pair import Pair
from regauge.core.element import Element
from regauge.core.families import move_tensor
from regauge.core.interpolation import ExplainedSums, ExplainedTensor

FORMATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Formats in which networks are stored, coarse ones first; files may hold such values in a wider one."""


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
