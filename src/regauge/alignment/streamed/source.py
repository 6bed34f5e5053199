"""Tensors of checkpoints on the disk: balanced, moved by an element, and compared, piece by piece where that goes."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regauge.alignment.engine.frames import rescale
from regauge.alignment.streamed.memory import CHUNK, row_ranges
from regauge.alignment.streamed.state import State
from regauge.core import act as _act
from regauge.core.element import Element
from regauge.core.families import dot
from regauge.core.interpolation import distance
from regauge.core.params import Params, require_finite
from regauge.core.scales import balance, balanced_parts
from regauge.core.symmetry import Symmetry
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.writing import Pieces


class Source:
    """The tensors of both networks of a streamed alignment, where they are compared.

    The second network is moved by the element that the state has when `refresh` is called.

    Attributes:
        scale: `sum |a| |b|` over what was loaded since `refresh`.
        identity: The objective of the identity, over what the first sweep loaded.
    """

    def __init__(self, a: Checkpoint, b: Checkpoint, symmetry: Symmetry, state: State) -> None:
        self._a, self._b, self._symmetry, self._state = a, b, symmetry, state
        self.refresh()

    def refresh(self) -> None:
        """Take over the element of the state: the second network is balanced, then moved by it. Sums begin at zero."""
        right, element = self._state.right, self._state.element
        self._total = element if right is None else self._symmetry.compose(element, right)
        self.scale = self.identity = 0.0

    def load(self, name: str, rows: tuple[int, int] | None = None) -> tuple[Tensor, Tensor, float]:
        """Both tensors of a name, balanced, the second one moved; the squared norm of the second before it is moved.

        Raises:
            ValueError: A tensor holds NaN or Inf; looked for in the first sweep.
        """
        state, dtype = self._state, torch.promote_types(self._a.stored[name].dtype, torch.float32)
        x, y = (one.read(name, rows=rows, dtype=dtype) for one in (self._a, self._b))
        if state.initial is None:
            require_finite({name: x}, str(self._a.path))
            require_finite({name: y}, str(self._b.path))
        x, is_first, norm = self._rescale(name, x, state.left), state.initial is None and state.is_anchored, 0.0
        if is_first or self._is_changing(name):
            balanced = self._rescale(name, y, state.right)
            norm = dot(balanced, balanced)
        if is_first:
            there = self._rescale(name, y, state.left)
            self.identity += dot(x, there) - (dot(there, there) - norm) / 2
        self.scale += float(torch.linalg.vector_norm(x)) * float(torch.linalg.vector_norm(y))
        return x, move_tensor(self._symmetry, self._total, name, y), norm

    def objective(self, name: str, x: Tensor, y: Tensor, norm: float) -> float:
        """What a loaded tensor contributes: `<x, y> - (|y|^2 - norm) / 2`; most moves do not change norms."""
        return dot(x, y) - ((dot(y, y) - norm) / 2 if self._is_changing(name) else 0.0)

    def nbytes(self, names: Sequence[str]) -> int:
        """Bytes of some tensors in both files."""
        return sum(one.stored[name].nbytes for one in (self._a, self._b) for name in names)

    def balance(self, advance: Callable[[int], object]) -> tuple[Element, Element]:
        """What balances the positive scales of each network; `advance` is told the bytes that were read."""
        left, right = (_balance(one, self._symmetry, advance) for one in (self._a, self._b))
        return left, right

    @property
    def bytes_and_seconds(self) -> tuple[int, float]:
        """Bytes that were read from both files, and the seconds that this took."""
        readings = (self._a.read_so_far, self._b.read_so_far)
        return sum(r.nbytes for r in readings), sum(r.seconds for r in readings)

    def _rescale(self, name: str, tensor: Tensor, scales: Element | None) -> Tensor:
        return tensor if scales is None else rescale(self._symmetry, scales, {name: tensor})[name]

    def _is_changing(self, name: str) -> bool:
        """Whether moves change the norm of a tensor: shifts, and at the identity the scales of the first network."""
        places = [site.placement for site in self._symmetry.sites[name]]
        return any(any(place.shift) or (self._state.is_from_identity and any(place.scale)) for place in places)


def move_pieces(checkpoint: Checkpoint, symmetry: Symmetry, element: Element) -> Pieces:
    """The values of `symmetry.act(element, params)`, with the dtypes of the checkpoint."""

    def pieces(name: str) -> Iterator[Tensor]:
        for rows in row_ranges(symmetry, name, checkpoint.stored[name].shape):
            yield move_tensor(symmetry, element, name, checkpoint.read(name, rows=rows))

    return pieces


def measure_distances(
    reference: Checkpoint, checkpoint: Checkpoint, symmetry: Symmetry, element: Element
) -> tuple[float, float]:
    """The distance of a network to a reference, before and after an element moves it; see `distance`."""
    squares = [0.0, 0.0]
    for name, blank in checkpoint.on_meta().items():
        if name in symmetry.buffers or not blank.is_floating_point():
            continue
        for rows in row_ranges(symmetry, name, blank.shape, CHUNK // 4):
            x, y = (one.read(name, rows=rows) for one in (reference, checkpoint))
            for k, other in enumerate((y, move_tensor(symmetry, element, name, y))):
                squares[k] += distance({name: x}, {name: other}) ** 2
    return math.sqrt(squares[0]), math.sqrt(squares[1])


def move_tensor(symmetry: Symmetry, element: Element, name: str, tensor: Tensor) -> Tensor:
    """A tensor, or a piece of it, moved by an element."""
    if name not in symmetry.sites:
        return tensor
    sites = {name: symmetry.sites[name]}
    return _act.act(symmetry.groups, sites, element, {name: tensor}, {name: tensor.ndim})[name]


def _balance(checkpoint: Checkpoint, symmetry: Symmetry, advance: Callable[[int], object]) -> Element:
    """`balance(params, symmetry, buffers="keep")` of a checkpoint, one part of it after the other.

    Tensors whose scales depend on one another are read together. Of those on whose first axis nothing acts only the
    sums of squares over that axis are kept.
    """
    element, buffers = symmetry.identity(), set(symmetry.buffers) & symmetry.sites.keys()
    for part in balanced_parts(symmetry, buffers="keep"):
        before = checkpoint.read_so_far.nbytes
        params = {name: checkpoint.read(name) for name in sorted(buffers)}
        params |= {name: _reduce(checkpoint, symmetry, name) for name in sorted(part)}
        for name, value in balance(params, _restrict(symmetry, params), buffers="keep").items():
            if value.scale is not None:
                known = element[name]
                assert known.scale is not None
                element = element.replace(name, replace(known, scale=known.scale * value.scale))
        advance(checkpoint.read_so_far.nbytes - before)
    return element


def _restrict(symmetry: Symmetry, params: Params) -> Symmetry:
    """The symmetry on some parameters alone, of these shapes."""
    groups = (
        replace(group, placements=tuple(p for p in group.placements if p.parameter in params))
        for group in symmetry.groups
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in params.items()}
    buffers = tuple(name for name in symmetry.buffers if name in params)
    return Symmetry(tuple(group for group in groups if group.placements), shapes, buffers=buffers)


def _reduce(checkpoint: Checkpoint, symmetry: Symmetry, name: str) -> Tensor:
    """A tensor, or of one that is read in pieces the roots of its sums of squares over the first axis."""
    ranges, squares = row_ranges(symmetry, name), torch.zeros(())
    for rows in ranges:
        piece = checkpoint.read(name, rows=rows, dtype=None if len(ranges) == 1 else torch.float32)
        require_finite({name: piece}, str(checkpoint.path))
        if len(ranges) == 1:
            return piece
        squares = squares + piece.square_().sum(0, keepdim=True, dtype=torch.float64)
    return squares.sqrt()
