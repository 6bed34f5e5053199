"""The share of every group that an element moves."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from regauge.core.element import Element
from regauge.core.symmetry import Symmetry

SHARES = ("moved", "flipped", "turned")
"""Columns that are shares, between zero and one."""


def moves_of(symmetry: Symmetry, element: Element) -> Iterator[dict[str, Any]]:
    """Yield a row for each group on which an element can act, with means over copies and over a batch:
    `Result.moves`."""
    for group in symmetry.groups:
        value = element[group.name]
        row: dict[str, Any] = {"group": group.name, "units": group.size}
        row |= dict.fromkeys((*SHARES, "low", "high"))
        if value.perm is not None and group.has_order:
            row["moved"] = float((value.perm != torch.arange(group.size, device=value.perm.device)).double().mean())
        odd = [] if value.sign is None else [(value.sign < 0).double().flatten()]
        odd += [] if value.shift is None else [(value.shift % 2 != 0).double().flatten()]
        if any(map(len, odd)):
            row["flipped"] = float(torch.cat(odd).mean())
        matrix = value.matrix if value.matrix is not None else element.rotation.get(group.name)
        if matrix is not None:
            far = torch.linalg.matrix_norm(matrix - torch.eye(group.size, dtype=matrix.dtype, device=matrix.device))
            row["turned"] = float((far / math.sqrt(2 * group.size)).clamp(max=1).mean())
        if value.scale is not None and value.scale.numel():
            factors = value.scale.flatten().sort().values
            row["low"], row["high"] = (float(factors[round(share * (len(factors) - 1))]) for share in (0.05, 0.95))
        if any(row[name] is not None for name in (*SHARES, "low")):
            yield row
