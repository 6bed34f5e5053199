"""Rounding errors and channel ranges of the layers of a network, measured while a gauge transforms it in chunks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regauge.core.params import work_dtype
from regauge.core.symmetry import Symmetry
from regauge.gauging.rounding import RoundToNearest, layer_rows

MOST_VALUES = 1 << 19
"""The approximate number of entries of a tensor on which the rounding error is measured. In larger tensors, evenly
spaced rows are used."""
MOST_CHANNELS = 1024
"""The number of channels per layer whose ranges are stored. In wider layers, evenly spaced channels are stored."""


@dataclass
class LayerMeasures:
    """Squared rounding errors of each layer before and after a transformation, and the range of each input channel.

    Args:
        symmetry: The symmetry. The symmetry determines the layers of the model, and the axes that index rows.
        schemes: The rounding schemes for weights.
    """

    symmetry: Symmetry
    schemes: Sequence[RoundToNearest]
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _ranges: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, before: Tensor, after: Tensor) -> None:
        """Add the errors of a tensor, or of a chunk along its first axis, before and after the transformation."""
        rows = layer_rows(self.symmetry).get(name)
        if rows is None:
            return
        work, step = work_dtype(before.dtype), -(-math.prod(self.symmetry.shapes[name]) // MOST_VALUES)
        sums = self._sums.setdefault(name, torch.zeros(2, 1 + len(self.schemes), dtype=torch.float64))
        for k, whole in enumerate((before, after)):
            tensor = whole.movedim(rows[0], 0)[::step].movedim(0, rows[0]).to(work)
            sums[k, 0] += float(tensor.square().sum(dtype=torch.float64))
            for j, scheme in enumerate(self.schemes):
                sums[k, 1 + j] += float((tensor - scheme(tensor, rows)).square().sum(dtype=torch.float64))
            others = [axis for axis in range(tensor.ndim) if axis != _channels(rows, tensor.ndim)]
            ranges = tensor.abs().amax(others)
            known = self._ranges.setdefault(name, [])
            if len(known) <= k:
                known.append(ranges)
            elif known[k].shape == ranges.shape:
                known[k] = torch.maximum(known[k], ranges)

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each layer: relative squared errors by scheme, before and after, and channel ranges."""
        result = []
        for name, sums in self._sums.items():
            errors = (sums[:, 1:] / sums[:, :1].clamp_min(1e-300)).tolist()
            step = -(-len(self._ranges[name][0]) // MOST_CHANNELS)
            result.append(
                {
                    "layer": name,
                    "errors": [
                        {"rounding": str(scheme), "bits": scheme.bits, "before": errors[0][j], "after": errors[1][j]}
                        for j, scheme in enumerate(self.schemes)
                    ],
                    "ranges": {
                        label: ranges[::step].tolist()
                        for label, ranges in zip(("before", "after"), self._ranges[name], strict=True)
                    },
                }
            )
        return result

    def totals(self) -> list[Mapping[str, Any]]:
        """Return the mean relative squared error over all layers, by scheme."""
        if not self._sums:
            return []
        every = torch.stack([sums[:, 1:] / sums[:, :1].clamp_min(1e-300) for sums in self._sums.values()]).mean(0)
        return [
            {"rounding": str(scheme), "before": float(every[0, j]), "after": float(every[1, j])}
            for j, scheme in enumerate(self.schemes)
        ]


def _channels(rows: Sequence[int], ndim: int) -> int:
    """Return the axis of a layer's inputs: the first axis that does not index rows."""
    return next((axis for axis in range(ndim) if axis not in rows), 0)
