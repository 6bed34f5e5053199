"""Tensors moved one by one, and in pieces along their first axis, so that whole networks need not be in memory."""

import math
from collections.abc import Sequence

from torch import Tensor

from regauge.core import act as _act
from regauge.core.element import Element
from regauge.core.symmetry import Symmetry

CHUNK = 1 << 25
"""Bytes, as float32, of the pieces in which tensors are read that need not be there as a whole."""


def row_ranges(
    symmetry: Symmetry, name: str, shape: Sequence[int] | None = None, chunk: int = CHUNK
) -> list[tuple[int, int] | None]:
    """Ranges of axis 0 in which a tensor may be read and moved, of `chunk` bytes as float32; None for all of it.

    The shape is needed where the symmetry does not move the tensor.
    """
    shape = symmetry.shapes[name] if shape is None else shape
    sites = symmetry.sites.get(name, [])
    used = {axis for site in sites for axis in site.axes}
    if not shape or 0 in used or 0 in shape:
        return [None]
    rows = max(1, chunk // (4 * math.prod(shape[1:])))
    return [(first, min(first + rows, shape[0])) for first in range(0, shape[0], rows)]


def move_tensor(symmetry: Symmetry, element: Element, name: str, tensor: Tensor) -> Tensor:
    """A tensor, or a piece of it, moved by an element."""
    if name not in symmetry.sites:
        return tensor
    sites = {name: symmetry.sites[name]}
    return _act.act(symmetry.groups, sites, element, {name: tensor}, {name: tensor.ndim})[name]
