"""Tensors of a checkpoint in pieces along axis 0: moved by an element, and compared with those of another network."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from regauge.alignment.streamed.memory import CHUNK
from regauge.core import act as _act
from regauge.core.element import Element
from regauge.core.interpolation import distance
from regauge.core.symmetry import Symmetry
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.writing import Pieces


def move_pieces(checkpoint: Checkpoint, symmetry: Symmetry, element: Element) -> Pieces:
    """The values of `symmetry.act(element, params)`, with the dtypes of the checkpoint.

    Args:
        checkpoint: The network that moves.
        symmetry: Its symmetry, with every size known.
        element: One value per group.
    """

    def pieces(name: str) -> Iterator[Tensor]:
        for rows in row_ranges(checkpoint.stored[name].shape, symmetry, name):
            yield move_tensor(symmetry, element, name, checkpoint.read(name, rows=rows))

    return pieces


def measure_distances(
    reference: Checkpoint, checkpoint: Checkpoint, symmetry: Symmetry, element: Element
) -> tuple[float, float]:
    """The distance of a network to a reference, before and after an element moves it; see `distance`.

    Args:
        reference: The network that stays.
        checkpoint: The network that moves, in memory or on the disk.
        symmetry: The symmetry of both, with every size known.
        element: One value per group.
    """
    squares = [0.0, 0.0]
    for name, blank in checkpoint.on_meta().items():
        if name in symmetry.buffers or not blank.is_floating_point():
            continue
        for rows in row_ranges(tuple(blank.shape), symmetry, name, CHUNK // 4):
            x, y = ({name: one.read(name, rows=rows)} for one in (reference, checkpoint))
            moved = {name: move_tensor(symmetry, element, name, y[name])}
            squares = [total + distance(x, other) ** 2 for total, other in zip(squares, (y, moved), strict=True)]
    return math.sqrt(squares[0]), math.sqrt(squares[1])


def row_ranges(
    shape: tuple[int, ...], symmetry: Symmetry, name: str, chunk: int = CHUNK
) -> list[tuple[int, int] | None]:
    """Ranges of axis 0 in which a tensor may be moved, of `chunk` bytes as float32; None for all of it."""
    sites = symmetry.sites.get(name, [])
    used = {s.placement.axis for s in sites} | {axis for s in sites for axis, _ in s.bases}
    if not shape or 0 in used or 0 in shape:
        return [None]
    rows = max(1, chunk // (4 * torch.Size(shape[1:]).numel()))
    return [(first, min(first + rows, shape[0])) for first in range(0, shape[0], rows)]


def move_tensor(symmetry: Symmetry, element: Element, name: str, tensor: Tensor) -> Tensor:
    """A tensor, or a piece of it, moved by an element."""
    if name not in symmetry.sites:
        return tensor
    sites = {name: symmetry.sites[name]}
    return _act.act(symmetry.groups, sites, element, {name: tensor}, {name: tensor.ndim})[name]
