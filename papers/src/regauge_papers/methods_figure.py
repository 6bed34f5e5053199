"""The figure of a table: the loss of each method along its line between two networks."""

import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regauge.report.figures import COLORS, draw_figure
from regauge.report.line_figures import Curves, draw_curves

FEW = 4
"""The largest number of curves in one panel. Further curves are drawn in additional panels."""


def methods_figure(curves: Curves, title: str) -> Figure:
    """Draw the losses of several methods along their lines, a few in each panel, with the name of each next to its
    curve.

    The highest curves come first so that curves in a panel have similar heights. Every panel has its own loss axis.
    """
    names = sorted(curves, key=lambda name: -max(row["loss"] for row in curves[name]))
    count = -(-len(names) // FEW)
    share = -(-len(names) // count)
    parts = [names[k : k + share] for k in range(0, len(names), share)]
    columns = min(2, len(parts))
    rows = -(-len(parts) // columns)
    with draw_figure(5.6 * columns, 2.7 * rows + 0.3) as figure:
        for k, part in enumerate(parts):
            axes = figure.add_subplot(rows, columns, k + 1)
            draw_curves(
                axes,
                {name: curves[name] for name in part},
                "loss",
                title or "loss" if k == 0 else "",
                ("A", "B"),
                has_barrier=False,
            )
            _name_curves(axes, {name: curves[name] for name in part})
        return figure


def _name_curves(axes: Axes, curves: Curves) -> None:
    """Write the name of each curve to the right of the panel, at the height of the curve's midpoint, with a thin
    line.
    """
    low, high = axes.get_ylim()
    heights = {name: float(np.clip(rows[len(rows) // 2]["loss"], low, high)) for name, rows in curves.items()}
    order = sorted(heights, key=lambda name: heights[name])
    gap = 0.16 * (high - low)
    places = [heights[name] for name in order]
    for k in range(1, len(places)):
        places[k] = max(places[k], places[k - 1] + gap)
    over = max(0.0, places[-1] - high)
    for k in reversed(range(len(places))):
        places[k] = min(places[k], high - gap * (len(places) - 1 - k)) if over else places[k]
    for name, place in zip(order, places, strict=True):
        color = COLORS[list(curves).index(name)]
        axes.plot([0.5, 1.06], [heights[name], place], color=color, linewidth=0.6, alpha=0.7, clip_on=False)
        words = textwrap.fill(name, 24)
        axes.annotate(
            words, (1.07, place), color=color, linespacing=0.9, fontsize=9, va="center", annotation_clip=False
        )
    axes.set_xlim(-0.03, 1.03)
