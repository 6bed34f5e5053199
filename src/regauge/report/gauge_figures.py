"""Figures of a gauge: ranges of channels and rounding errors of layers, before and after."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from regauge.report.figures import COLORS, draw_figure

PANELS = 4
"""Layers whose channels are drawn: those whose ranges changed most."""


def ranges_figure(layers: Sequence[Mapping[str, Any]]) -> Figure:
    """The largest weight that each input channel of a layer is multiplied by, before and after."""
    shown = sorted(layers, key=_evened, reverse=True)[:PANELS]
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    with draw_figure(4.8 * columns, 2.6 * rows) as figure:
        for k, layer in enumerate(shown):
            axes = figure.add_subplot(rows, columns, k + 1)
            for color, label in zip(COLORS, ("before", "after"), strict=False):
                axes.plot(layer["ranges"][label], color=color, linewidth=1, label=label)
            axes.set(xlabel="input channel", ylabel="largest weight", title=layer["layer"], ylim=(0, None))
            if not k:
                axes.legend(frameon=False, fontsize=9)
        return figure


def errors_figure(layers: Sequence[Mapping[str, Any]]) -> Figure:
    """The relative squared rounding error of each layer, in the order of the network, at several numbers of bits."""
    schemes = [row["rounding"] for row in layers[0]["errors"]]
    with draw_figure(4.0 * len(schemes), 3.2) as figure:
        for k, scheme in enumerate(schemes):
            axes = figure.add_subplot(1, len(schemes), k + 1)
            for color, label in zip(COLORS, ("before", "after"), strict=False):
                values = [max(layer["errors"][k][label], 1e-12) for layer in layers]
                axes.semilogy(values, "o", color=color, markersize=3.5, label=label)
            axes.set(title=scheme, xlabel="layer, in order")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if not k:
                axes.set_ylabel("relative squared error")
                axes.legend(frameon=False, fontsize=9)
        return figure


def _evened(layer: Mapping[str, Any]) -> float:
    """By how much the ratio of the largest range to the mean one fell, in octaves."""
    before, after = (np.array(layer["ranges"][label]) for label in ("before", "after"))
    ratios = [float(one.max() / max(one.mean(), 1e-300)) if len(one) else 1.0 for one in (before, after)]
    return abs(float(np.log2(max(ratios[0], 1e-9) / max(ratios[1], 1e-9))))
