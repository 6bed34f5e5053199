"""Pictures of comparisons: what one network explains of the layers of another one."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from regauge.report.figures import COLORS, MUTED, draw_figure

LABELED = 80
"""Most layers that have a name in the picture."""


def shares_figure(layers: Sequence[Mapping[str, Any]]) -> Figure:
    """For each layer, from top to bottom, the share that is explained as stored and after alignment."""
    count = len(layers)
    is_labeled = count <= LABELED
    with draw_figure(7.6, 0.9 + (0.24 if is_labeled else 0.06) * count) as figure:
        axes = figure.add_subplot()
        rows = range(count)
        before, after = ([100 * layer[key] for layer in layers] for key in ("before", "after"))
        axes.barh(rows, after, height=0.72, color=COLORS[1], label="after alignment")
        axes.barh(rows, before, height=0.28, color=COLORS[0], label="as stored")
        axes.set_xlim(0, 100)
        axes.set_ylim(count - 0.4, -0.6)
        axes.set_yticks(rows if is_labeled else [], [layer["layer"] for layer in layers] if is_labeled else [])
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("share of the layer of A that B explains (%)", color=MUTED)
        figure.legend(loc="outside upper left", ncols=2, frameon=False)
    return figure
