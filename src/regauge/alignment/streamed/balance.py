"""Positive scales balanced from the disk: one part of the network after another."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from regauge.alignment.streamed.plan import Plan, restricted
from regauge.core.element import Element
from regauge.core.params import require_finite
from regauge.core.scales import balance, balanced_parts
from regauge.storage.checkpoints.checkpoint import Checkpoint


def balance_streamed(plan: Plan, checkpoint: Checkpoint, advance: Callable[[int], object]) -> Element:
    """Balance the positive scales of a checkpoint: `regauge.core.scales.balance(..., buffers="keep")` from the disk.

    Tensors whose scales depend on one another are read together. Of those on whose first axis nothing acts only the
    sums of squares over that axis are kept.

    Args:
        plan: The plan of the alignment.
        checkpoint: The network.
        advance: Advances by the bytes that were read.

    Raises:
        ValueError: A tensor holds NaN or Inf.
    """
    symmetry = plan.symmetry
    element = symmetry.identity()
    buffers = {name for name in symmetry.buffers if name in symmetry.sites}
    for part in balanced_parts(symmetry, buffers="keep"):
        before = checkpoint.read_so_far.nbytes
        params = {name: checkpoint.read(name) for name in sorted(buffers)}
        params |= {name: _reduce(plan, checkpoint, name) for name in sorted(part)}
        sub = restricted(symmetry, part | buffers)
        sub = replace(sub, shapes={name: tuple(params[name].shape) for name in sub.shapes})
        found = balance(params, sub, buffers="keep")
        for name, value in found.items():
            if value.scale is not None:
                known = element[name]
                assert known.scale is not None
                element = element.replace(name, replace(known, scale=known.scale * value.scale))
        advance(checkpoint.read_so_far.nbytes - before)
    return element


def _reduce(plan: Plan, checkpoint: Checkpoint, name: str) -> Tensor:
    rows = plan.sizes.rows_of(name)
    if rows is None:
        tensor = checkpoint.read(name)
        require_finite({name: tensor}, str(checkpoint.path))
        return tensor
    length, *rest = plan.symmetry.shapes[name]
    squares = torch.zeros(1, *rest, dtype=torch.float64)
    for first in range(0, length, rows):
        piece = checkpoint.read(name, rows=(first, min(first + rows, length)), dtype=torch.float32)
        require_finite({name: piece}, str(checkpoint.path))
        squares += piece.square_().sum(0, keepdim=True, dtype=torch.float64)
    return squares.sqrt()
