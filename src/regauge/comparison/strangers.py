"""Strangers, the control for alignment: a network's own tensors, each moved by a random element of its own."""

import zlib
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from regauge.alignment.streamed.source import move_tensor
from regauge.comparison.common import restrict
from regauge.core.element import Element
from regauge.core.params import Params
from regauge.core.remembered import remembered
from regauge.core.symmetry import Symmetry


def stranger_of(params: Mapping[str, Tensor], symmetry: Symmetry, seed: int) -> Params:
    """A network with the tensors of another one, in each of which units have another order, signs and rotations.

    Whatever held its tensors together is gone, so that what a network explains of it after alignment is due to the
    choice among elements alone.
    """
    return {name: scramble(symmetry, name, tensor, seed) for name, tensor in params.items()}


def scramble(symmetry: Symmetry, name: str, tensor: Tensor, seed: int) -> Tensor:
    """One tensor with its units in another order, with other signs and rotations."""
    if name not in symmetry.sites:
        return tensor
    generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(name.encode()))
    element = _acting_on(symmetry, name).random(generator, ("permutation", "sign", "linear"))
    return move_tensor(symmetry, _without_stretching(symmetry, element), name, tensor)


@remembered
def _acting_on(symmetry: Symmetry, name: str) -> Symmetry:
    """The symmetry with the groups alone that act on a tensor, and those in which they are repeated."""
    return restrict(symmetry, {name: symmetry.shapes[name]})


def _without_stretching(symmetry: Symmetry, element: Element) -> Element:
    """The element with the nearest rotation to each invertible matrix."""
    for name, value in element.items():
        if value.matrix is not None and symmetry[name].matrix == "linear":
            u, _, vh = torch.linalg.svd(value.matrix)
            element = element.replace(name, replace(value, matrix=u @ vh))
    return element
