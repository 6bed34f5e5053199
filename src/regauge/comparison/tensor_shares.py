"""Shares of each tensor of one network that another one explains, as stored and after alignment."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regauge.comparison.pair import Pair
from regauge.core.element import Element
from regauge.core.families import average, dot, move_tensor
from regauge.core.symmetry import Symmetry

CONSTANT_TENSOR = 1e-10
"""Below this share of its squares nothing in a tensor tells units apart."""
FORMATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Formats in which networks are stored, coarse ones first; files may hold such values in a wider one."""


@dataclass(frozen=True)
class TensorShare:
    """One tensor of two networks.

    Attributes:
        name: The name of the tensor.
        shape: Its shape.
        before: The share of the first network's tensor that the second one's explains as stored: the squared
            correlation, zero where it is negative; None where nothing tells units apart in one of both.
        after: The share after the second network was moved.
        weight: The squares of the first network's tensor around the part that all elements keep.
        squares: Squared distances as stored and moved, and the squared norm of the first network's tensor.
        formats: The formats that hold all values of the first network's tensor, and of the second one's.
        equal: The formats in which both tensors are the same.
    """

    name: str
    shape: tuple[int, ...]
    before: float | None
    after: float | None
    weight: float
    squares: tuple[float, float, float] = field(repr=False)
    formats: tuple[frozenset[torch.dtype], frozenset[torch.dtype]] = field(repr=False)
    equal: frozenset[torch.dtype] = field(repr=False)

    @property
    def layer(self) -> str:
        """The part of the model that it belongs to: its name without the last word."""
        return self.name.rpartition(".")[0] or self.name


def measure_shares(pair: Pair, element: Element) -> list[TensorShare]:
    """Compare tensors of two networks as they are, and the second network's moved by an element.

    What every element keeps, such as the mean over units, says nothing about units, and networks for one purpose share
    it: gains around one, the frequency of a symbol. So correlations are between what is left without it.

    Args:
        pair: Both networks.
        element: Moves the second network.
    """
    result = []
    for name, shape in pair.shapes.items():
        total = _Sums()
        for x, y in pair.pieces(name):
            total.add(pair.symmetry, name, x, y, move_tensor(pair.symmetry, element, name, y))
        result.append(total.share_of(name, shape))
    return result


def mean_share(shares: Sequence[TensorShare], *, is_after: bool = True) -> float | None:
    """The mean over matrices, each counted once; over vectors if there is no matrix, None if there are none either."""
    known = [share for share in shares if share.after is not None and share.before is not None]
    counted = [share for share in known if len(share.shape) > 1] or known
    values = [share.after if is_after else share.before for share in counted]
    return sum(value for value in values if value is not None) / len(values) if values else None


class _Sums:
    """Squares of both networks, as they are and around what is kept, and products; the second one's twice."""

    def __init__(self) -> None:
        self._first = self._own = 0.0
        self._gaps, self._second, self._others, self._products = ([0.0, 0.0] for _ in range(4))
        self._formats, self._equal = [frozenset(FORMATS)] * 2, frozenset(FORMATS)

    def add(self, symmetry: Symmetry, name: str, x: Tensor, y: Tensor, moved: Tensor) -> None:
        """Add a piece of a tensor of both networks, and of the second one moved."""
        centered = x - _kept(symmetry, name, x)
        self._first += dot(x, x)
        self._own += dot(centered, centered)
        for k, second in enumerate((y, moved)):
            other = second - _kept(symmetry, name, second)
            self._gaps[k] += dot(second - x, second - x)
            self._second[k] += dot(second, second)
            self._others[k] += dot(other, other)
            self._products[k] += dot(centered, other)
        for k, tensor in enumerate((x, y)):
            self._formats[k] = frozenset(f for f in self._formats[k] if _holds(f, tensor))
        if not torch.equal(x, y):
            narrow = [f for f in self._equal if f.itemsize < x.itemsize]
            self._equal = frozenset(f for f in narrow if torch.equal(x.to(f), y.to(f)))

    def share_of(self, name: str, shape: Sequence[int]) -> TensorShare:
        """The shares and squared distances of a tensor from the sums over its pieces."""
        is_constant = self._own <= CONSTANT_TENSOR * self._first or self._others[0] <= CONSTANT_TENSOR * self._second[0]
        before, after = (None if is_constant else self._squared_correlation(k) for k in range(2))
        squares = (*self._gaps, self._first)
        formats = (self._formats[0], self._formats[1])
        return TensorShare(
            name, tuple(shape), before, after, self._own, (squares[0], squares[1], squares[2]), formats, self._equal
        )

    def _squared_correlation(self, k: int) -> float:
        size = self._own * self._others[k]
        return min(1.0, max(0.0, self._products[k]) ** 2 / size) if size > 0 else 0.0


def _holds(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Whether a format holds all values of a tensor."""
    return dtype.itemsize >= tensor.itemsize or torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def _kept(symmetry: Symmetry, name: str, tensor: Tensor) -> Tensor:
    """The part of a tensor that no element changes: its average over all elements."""
    sites = symmetry.sites.get(name, ())
    if not sites:
        return tensor.new_zeros(())
    for site in sites:
        tensor = average(tensor, site)
    return tensor
