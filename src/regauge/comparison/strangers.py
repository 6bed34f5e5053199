"""What alignment alone explains: strangers made of a network's own tensors, each moved by an element of its own."""

import zlib
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from regauge.alignment.streamed.source import move_tensor
from regauge.core.element import Element
from regauge.core.params import Params
from regauge.core.remembered import remembered
from regauge.core.symmetry import Symmetry
from regauge.storage.checkpoints.checkpoint import Checkpoint


def stranger_of(params: Mapping[str, Tensor], symmetry: Symmetry, seed: int) -> Params:
    """A network with the tensors of another one, in each of which units have another order, signs and rotations.

    Whatever held its tensors together is gone, so that what a network explains of it after alignment is due to the
    choice among elements alone.
    """
    return {name: _scramble(symmetry, name, tensor, seed) for name, tensor in params.items()}


class Stranger(Checkpoint):
    """The same of a checkpoint, tensor by tensor when it is read."""

    def __init__(self, source: Checkpoint, symmetry: Symmetry, seed: int) -> None:
        super().__init__(source.label, source.path, source.stored, source.metadata)
        self.source, self.form, self.read_so_far = source, source.form, source.read_so_far
        self._symmetry, self._seed = symmetry, seed

    def read(self, name: str, *, rows: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of one tensor, or of a range of its first axis where nothing acts on that, scrambled."""
        return _scramble(self._symmetry, name, self.source.read(name, rows=rows, dtype=dtype), self._seed)


def _scramble(symmetry: Symmetry, name: str, tensor: Tensor, seed: int) -> Tensor:
    if name not in symmetry.sites:
        return tensor
    generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(name.encode()))
    element = _acting_on(symmetry, name).random(generator, ("permutation", "sign", "linear"))
    return move_tensor(symmetry, _without_stretching(symmetry, element), name, tensor)


@remembered
def _acting_on(symmetry: Symmetry, name: str) -> Symmetry:
    """The symmetry with the groups alone that act on a tensor, and those in which they are repeated."""
    names = {site.group.name for site in symmetry.sites[name]}
    names |= {base for group in symmetry.groups if group.name in names for base in group.within}
    return replace(symmetry, groups=tuple(group for group in symmetry.groups if group.name in names))


def _without_stretching(symmetry: Symmetry, element: Element) -> Element:
    """The element with the nearest rotation to each invertible matrix."""
    for name, value in element.items():
        if value.matrix is not None and symmetry[name].matrix == "linear":
            u, _, vh = torch.linalg.svd(value.matrix)
            element = element.replace(name, replace(value, matrix=u @ vh))
    return element
