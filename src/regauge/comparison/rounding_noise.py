"""The change of representatives that the rounding of stored values makes, which may be large."""

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regauge.core.element import Element
from regauge.core.interpolation import distance
from regauge.core.symmetry import Symmetry


def rounding_noise(
    networks: Sequence[Mapping[str, Tensor]],
    precisions: Sequence[float],
    symmetry: Symmetry,
    behind: Symmetry,
    element: Element,
    ignored: set[str],
) -> float:
    """Estimate how far rounding as stored takes the representatives of two networks apart.

    A translation that is large against the weights is stored with errors of its own size, and taking it out leaves
    them. Each value of a network is therefore changed by a random part of half the spacing of its format, and the
    change of the representative is measured.

    Args:
        networks: The first and the second network, as stored.
        precisions: Spacing of the numbers around one in the format of each.
        symmetry: The symmetry of both.
        behind: That of their representatives.
        element: Moves the second representative to the first one.
        ignored: Names of tensors that do not count.

    Returns:
        The Euclidean distance, where the first network's representative is.
    """
    blank, total = behind.identity(), 0.0
    for params, precision, mover in zip(networks, precisions, (blank, element), strict=True):
        wide = {n: t.double() if t.is_floating_point() else t for n, t in params.items()}
        near = {n: perturb(n, t, precision) for n, t in wide.items()}
        here, there = (behind.act(mover, symmetry.split(one)[0]) for one in (wide, near))
        total += distance(here, there, ignored) ** 2
    return float(total**0.5)


def perturb(name: str, tensor: Tensor, precision: float) -> Tensor:
    """Return a tensor in float64 with each value changed as rounding to a format of a precision does."""
    if not tensor.is_floating_point():
        return tensor
    source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    part = torch.rand(tensor.shape, generator=source, dtype=torch.float64).to(tensor.device) - 0.5
    return tensor.double() * (1 + precision * part)
